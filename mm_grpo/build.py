"""What a run is made of, from its config: the plan of its steps, and processor, model, learner, engine and sync.

`mm-grpo train`, `check` and `doctor` all come through here, so what is found sound before a run is what the run
uses. torch and the engines are imported when they are built, for `check` needs the plan alone.

A new engine is one function here, in `ENGINES` under its name in `rollout.engine`. The function imports the
engine itself, so that no run pays for one that it does not use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from mm_grpo.data.mixture import MixedDataset
from mm_grpo.data.mixture_order import MixtureOrder
from mm_grpo.data.order import PromptOrder
from mm_grpo.errors import ConfigError
from mm_grpo.rollout.engine_limits import engine_limits
from mm_grpo.rollout.prompts import PromptBuilder, context_of
from mm_grpo.rollout.seeds import SeedPlan

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig
    from mm_grpo.data.dataset import Dataset
    from mm_grpo.distributed.ranks import Ranks
    from mm_grpo.environments.toolbox import Toolbox
    from mm_grpo.learner.learner import Learner
    from mm_grpo.parity.sync import VerifiedSync
    from mm_grpo.processors.base import Processor
    from mm_grpo.rollout.engine import RolloutEngine

# the plan ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunPlan:
    """How many steps and optimizer updates a run makes, the seeds of its generations, the order of its rows."""

    max_steps: int
    updates: int
    seeds: SeedPlan
    order: PromptOrder


def plan_run(
    config: GRPOConfig, rows: Sized, *, at_least_an_epoch: bool = False, several_turns: bool = False
) -> RunPlan:
    """The plan of a run over `rows`: `run.max_steps` steps, by default one epoch.

    `at_least_an_epoch` lengthens a shorter run to as many prompts as there are rows, so that each has its seeds
    (`PromptBuilder.first`); those of the run stay the same. With `several_turns` conversations have up to
    `rollout.max_turns`. Raises ConfigError when the warm-up is longer than the run, or when there are not seeds enough.
    """
    rollout, run = config.rollout, config.run
    how = (rollout.prompts_per_step, run.seed, config.data.shuffle)
    order = (
        MixtureOrder(rows.sizes, rows.weights, rows.names, *how)
        if isinstance(rows, MixedDataset)
        else PromptOrder(len(rows), *how)
    )
    steps = run.max_steps or order.steps_per_epoch
    updates = steps * config.optim.updates_per_step * config.algorithm.num_iterations
    if config.optim.warmup_steps > updates:
        raise ConfigError(
            f"optim.warmup_steps = {config.optim.warmup_steps}: the run makes {updates} updates, so the learning "
            "rate would never be reached; lower it, or raise run.max_steps"
        )
    seeds = SeedPlan(
        run_seed=run.seed,
        prompts=rollout.prompts_per_step,
        generations=rollout.num_generations,
        attempts=rollout.max_attempts,
        max_steps=max(steps, -(-order.n_rows // order.prompts_per_step)) if at_least_an_epoch else steps,
        max_turns=rollout.max_turns if several_turns else 1,
    )
    return RunPlan(steps, updates, seeds, order)


# the parts -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """What turns rows into prompts, samples from them and learns; `sync` has sent the learner's weights once.

    `sentences` say which limits were chosen because the config sets none.
    """

    processor: Processor
    model: Any
    prompt_builder: PromptBuilder
    learner: Learner
    engine: RolloutEngine
    sync: VerifiedSync
    sentences: tuple[str, ...] = ()


def build_parts(
    config: GRPOConfig,
    updates: int,
    datasets: Iterable[Dataset],
    *,
    model: Any = None,
    processor: Processor | None = None,
    ranks: Ranks | None = None,
    toolbox: Toolbox | None = None,
) -> Parts:
    """Load what `config` names, in place of which a `model` and a `processor` can be given.

    `updates` is the length of the learning-rate schedule, `datasets` are all whose rows will be asked about,
    `ranks` the processes that train together, `toolbox` what the model may call. Raises ConfigError for what cannot be
    loaded and GuardStop when the weights did not reach the engine.
    """
    from mm_grpo.distributed.accelerate_env import check_launcher
    from mm_grpo.learner.learner import Learner
    from mm_grpo.learner.model import (
        adopt_model,
        check_saveable,
        load_model,
        resolve_device,
        resolve_dtype,
    )
    from mm_grpo.parity.sync import VerifiedSync
    from mm_grpo.processors.base import load_processor
    from mm_grpo.processors.special_tokens import set_special_tokens

    for name, given in (("model", model), ("processor", processor)):
        if isinstance(given, str | PathLike):
            raise ConfigError(
                f"{name} = {str(given)!r}: must be a loaded one; to have it loaded, write the path into the config:"
                " model.path"
            )
    device = resolve_device(config.model.device)
    dtype = getattr(model, "dtype", None) or resolve_dtype(config.model.dtype, device)
    check_launcher(config, device, dtype)
    processor_from_path = "processor" if processor is None else None
    if processor is None:
        processor = load_processor(
            config.model.path,
            named=config.model.processor,
            min_pixels=config.data.min_pixels,
            max_pixels=config.data.max_pixels,
            trust_remote_code=config.model.trust_remote_code,
            chat_template_kwargs=config.data.chat_template_kwargs,
        )
    elif (asked := config.data.chat_template_kwargs) != getattr(processor, "chat_template_kwargs", {}):
        raise ConfigError(
            f"data.chat_template_kwargs = {asked}: the processor that was passed in has "
            f"{getattr(processor, 'chat_template_kwargs', {})}, and keeps them; give load_processor(...) the same"
        )
    set_special_tokens(processor, config.data.special_tokens)
    if model is None:
        model = load_model(config.model, processor.family)
    else:
        several = ranks is not None and ranks.world > 1
        from_path = "engine" if config.rollout.engine != "transformers" else processor_from_path
        model = adopt_model(model, config.model, processor.family, from_path=from_path, several=several)
    check_saveable(model, processor)
    context, limits = context_of(model.config), None
    if config.rollout.engine == "vllm":
        limits = engine_limits(config, processor, datasets, context, toolbox)
    length = limits.max_model_len if limits else None
    prompt_builder = PromptBuilder(processor, config, context, length, toolbox=toolbox)
    learner = Learner(model, processor, config, updates, ranks)
    engine = build_engine(limits.in_config(config) if limits else config, model, processor)
    sync = VerifiedSync(engine, learner, config)
    sync.start()
    sentences = [limits.sentence] if limits is not None and limits.sentence else []
    if config.data.max_pixels is None:
        sentences.insert(0, f"images: resized to at most {processor.max_pixels:,} pixels (data.max_pixels)")
    if processor.layout == "unshared":
        sentences.append(
            "layout: unshared: sharing a prompt between its completions is not exact for this model, so the learner "
            "runs each completion after a prompt of its own; images are still encoded once"
        )
    return Parts(processor, model, prompt_builder, learner, engine, sync, tuple(sentences))


# the engine ----------------------------------------------------------------------------------


def build_engine(config: GRPOConfig, model: Any, processor: Processor) -> RolloutEngine:
    """The engine of `rollout.engine`. `model` is the learner's, which an embedded engine samples from.

    An engine with weights of its own has to be sent the learner's before it samples.
    """
    name: str = config.rollout.engine
    if name not in ENGINES:
        raise ConfigError(f"rollout.engine = '{name}': must be one of {', '.join(sorted(ENGINES))}")
    return ENGINES[name](config, model, processor)


def _transformers(config: GRPOConfig, model: Any, processor: Processor) -> RolloutEngine:
    from mm_grpo.rollout.transformers_engine import TransformersEngine

    return TransformersEngine(model, processor)


def _vllm(config: GRPOConfig, model: Any, processor: Processor) -> RolloutEngine:
    """vLLM in this process, at the learner's dtype and under the processor's pixel limits."""
    from mm_grpo.processors.base import mm_processor_kwargs
    from mm_grpo.rollout.vllm.engine import VLLMEngine
    from mm_grpo.rollout.vllm.launch import EngineSettings

    given = config.rollout.vllm
    limits = engine_limits(
        config, processor, (), context_of(model.config)
    )  # those of rows stand in the config
    settings = EngineSettings(
        model=config.model.path,
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=limits.max_model_len,
        mm_processor_kwargs=tuple(mm_processor_kwargs(processor).items()),
        max_images=limits.max_images,
        gpu_memory_utilization=given.gpu_memory_utilization,
        sleep_level=given.sleep_level,
        trust_remote_code=config.model.trust_remote_code,
        engine_kwargs=tuple(given.engine_kwargs.items()),
    )
    try:
        return VLLMEngine(settings, processor, timeout=given.timeout)
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("vllm"):
            raise
        raise ConfigError(
            "rollout.engine = 'vllm': vLLM is not installed; install mm_grpo[vllm] on a GPU machine, "
            "mm_grpo[cpu] on a CPU, or use rollout.engine=transformers"
        ) from error


ENGINES: dict[str, Callable[[GRPOConfig, Any, Processor], RolloutEngine]] = {
    "transformers": _transformers,
    "vllm": _vllm,
}
