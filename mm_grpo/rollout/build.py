"""Which engine a config asks for, and how it is made.

A new engine is one function here, in `BUILDERS` under its name in `rollout.engine`. The function imports
the engine itself, so that no run pays for one that it does not use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mm_grpo.errors import ConfigError
from mm_grpo.rollout.prompting import context_of

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig
    from mm_grpo.processors.base import Processor
    from mm_grpo.rollout.engine import RolloutEngine


def build_engine(config: GRPOConfig, model: Any, processor: Processor) -> RolloutEngine:
    """The engine of `rollout.engine`. `model` is the learner's, which an embedded engine samples from.

    An engine with weights of its own has to be sent the learner's before it samples.
    """
    name: str = config.rollout.engine
    if name not in BUILDERS:
        raise ConfigError(f"rollout.engine = '{name}': must be one of {', '.join(sorted(BUILDERS))}")
    return BUILDERS[name](config, model, processor)


def _transformers(config: GRPOConfig, model: Any, processor: Processor) -> RolloutEngine:
    from mm_grpo.rollout.transformers_engine import TransformersEngine

    return TransformersEngine(model, processor)


def _vllm(config: GRPOConfig, model: Any, processor: Processor) -> RolloutEngine:
    """vLLM in this process, at the learner's dtype and under the processor's pixel limits."""
    from mm_grpo.rollout.vllm_engine import VLLMEngine
    from mm_grpo.rollout.vllm_launch import EngineSettings

    given = config.rollout.vllm
    settings = EngineSettings(
        model=config.model.path,
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=given.max_model_len or _longest(config, model),
        min_pixels=processor.min_pixels,
        max_pixels=processor.max_pixels,
        max_images=given.max_images,
        tensor_parallel_size=given.tensor_parallel_size,
        gpu_memory_utilization=given.gpu_memory_utilization,
        sleep_level=given.sleep_level,
        engine_kwargs=tuple(given.engine_kwargs.items()),
    )
    try:
        return VLLMEngine(settings, processor)
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("vllm"):
            raise
        raise ConfigError(
            "rollout.engine = 'vllm': vLLM is not installed; install mm_grpo[vllm] on a GPU machine, "
            "mm_grpo[cpu] on a CPU, or use rollout.engine=transformers"
        ) from error


def _longest(config: GRPOConfig, model: Any) -> int:
    """Prompt and completion at their limits and one token for scoring, else all that the model can take."""
    context = context_of(model.config) or 32768
    longest = config.data.max_prompt_length
    answer = max(config.rollout.max_completion_length, config.rollout.eval.max_completion_length or 0)
    return context if longest is None else min(context, longest + answer + 1)


BUILDERS: dict[str, Callable[[GRPOConfig, Any, Processor], RolloutEngine]] = {
    "transformers": _transformers,
    "vllm": _vllm,
}
