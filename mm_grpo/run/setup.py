"""Both sides of a run, loaded in one place: the learner, and the engine that samples for it.

`mm-grpo train` and `mm-grpo doctor` both come through here, so what the doctor finds sound is what a
run will use.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Any

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import ConfigError
from mm_grpo.learner.distributed import Ranks
from mm_grpo.learner.launchers import check_launcher
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.policy import load_policy
from mm_grpo.processors.base import Processor, load_processor
from mm_grpo.rollout.build import build_engine
from mm_grpo.rollout.engine import RolloutEngine
from mm_grpo.rollout.prompting import Prompter, context_of
from mm_grpo.run.sync import VerifiedSync


@dataclass(frozen=True)
class Sides:
    """What turns rows into prompts, samples from them and learns; `sync` has sent the learner's weights once."""

    processor: Processor
    model: Any
    prompter: Prompter
    learner: Learner
    engine: RolloutEngine
    sync: VerifiedSync


def load_sides(
    config: GRPOConfig,
    updates: int,
    *,
    model: Any = None,
    processor: Processor | None = None,
    ranks: Ranks | None = None,
) -> Sides:
    """Load what `config` names, in place of which a `model` and a `processor` can be given.

    `updates` is the length of the learning-rate schedule, `ranks` the processes that train together. Raises
    ConfigError for what cannot be loaded and GuardStop when the weights did not reach the engine.
    """
    check_launcher(config)
    for name, given in (("model", model), ("processor", processor)):
        if isinstance(given, str | PathLike):
            raise ConfigError(
                f"{name} = {str(given)!r}: must be a loaded one; to have it loaded, write the path into the config:"
                " model.path"
            )
    if processor is None:
        processor = load_processor(
            config.model.path, min_pixels=config.data.min_pixels, max_pixels=config.data.max_pixels
        )
    if model is None:
        model = load_policy(config.model)
    prompter = Prompter(processor, config, context_of(model.config))
    learner = Learner(model, processor, config, updates, ranks)
    engine = build_engine(config, model, processor)
    sync = VerifiedSync(engine, learner, config)
    sync.start()
    return Sides(processor, model, prompter, learner, engine, sync)
