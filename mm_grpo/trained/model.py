"""Load the model of a checkpoint as the learner holds it: base weights, adapters, trained weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mm_grpo.build import processor_of
from mm_grpo.config import GRPOConfig
from mm_grpo.errors import ConfigError
from mm_grpo.learner.model import check_saveable, load_model
from mm_grpo.learner.state import frozen_digest, load_weights
from mm_grpo.processors.base import Processor
from mm_grpo.processors.model_folder import quoted
from mm_grpo.run.paths import RunPaths
from mm_grpo.trained.source import RunCheckpoint


@dataclass(frozen=True)
class Trained:
    """Trained model with its processor, and its run's config, paths and log."""

    model: Any
    processor: Processor
    config: GRPOConfig
    paths: RunPaths
    step: int  # the last one that trained it
    rows: Sequence[Mapping[str, Any]] = ()  # of metrics.jsonl, up to that step
    rewards: Sequence[str] = ()  # their names


def load_trained(checkpoint: RunCheckpoint) -> Trained:
    """Load the model of a checkpoint. Raises ConfigError if the base model is not the run's."""
    config = checkpoint.config
    processor = processor_of(config)
    model = load_model(config.model, processor.family)
    check_saveable(model, processor)
    put_in(model, checkpoint)
    contents, step = checkpoint.checkpoint, checkpoint.step
    rows = [json.loads(line) for line in (contents.log or b"").splitlines()]
    rows = [row for row in rows if row["step"] <= step]
    rewards = [str(reward["name"]) for reward in contents.extra["rewards"]]
    return Trained(model.eval(), processor, config, checkpoint.paths, step, rows, rewards)


def put_in(model: Any, checkpoint: RunCheckpoint) -> None:
    """Replace the trained weights of `model`, which `checkpoint.config` loaded, by the checkpoint's, in place.

    Raises ConfigError if they belong to another model or cannot be read.
    """
    section, manifest = checkpoint.config.model, checkpoint.checkpoint.manifest
    field, path = f"model.path = '{section.path}'", checkpoint.checkpoint.path
    trained: Mapping[str, list[int]] = manifest["parameters"]
    parameters = dict(model.named_parameters())
    shapes = {name: list(p.shape) for name, p in parameters.items()}
    if wrong := sorted(name for name, shape in trained.items() if shapes.get(name) != shape):
        shape = shapes.get(wrong[0], "none")
        raise ConfigError(
            f"{field}: '{path}' is of another model: {wrong[0]} has shape {trained[wrong[0]]} there and {shape} here; "
            "give the run's base model"
        )
    # the config alone does not tell what was trained: a model passed in Python may have more of it frozen
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in trained)
    if frozen_digest(model) != manifest["frozen"]:
        raise ConfigError(
            f"{field} in {section.dtype}: the weights that are not trained are not the frozen weights of '{path}'; "
            "give the run's base model in its number format (model.dtype=...)"
        )
    files = [path / str(file["name"]) for file in manifest["files"]]
    with as_config_error(f"'{path}' cannot be read"):
        load_weights({name: parameters[name] for name in trained}, files)


@contextmanager
def as_config_error(prefix: str) -> Iterator[None]:
    """Raise any error of a library as ConfigError, behind `prefix`."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{prefix} ({type(error).__name__}: {quoted(error)})") from None
