"""Runs that are larger than their GPU: refuse them before the weights are loaded, and explain a full GPU.

Both messages give the settings that help, cheapest first, as `mm-grpo estimate` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import ConfigError, GuardStop, UserError
from mm_grpo.learner.model import resolve_device
from mm_grpo.preflight.estimate import find_remedy, phases
from mm_grpo.preflight.memory import EMBEDDED_CACHE, Phases, device_memory

SAFE_SHARE = 0.9
"""Share of a GPU's memory that settings should need, by estimate, after the GPU was full in spite of it."""


class OutOfDeviceMemory(RuntimeError):
    """A GPU was full; the message says what helps. Exit code 1."""


def refuse_too_large(config: GRPOConfig, *, processes: int = 1) -> None:
    """Raise ConfigError if a phase of a run needs more memory than its GPU has.

    The embedded engine's cache is not counted, because short rows do not fill it. A run on a CPU, or with a model
    that the estimate cannot read, is never refused.
    """
    device = resolve_device(config.model.device)
    if device.type != "cuda":
        return
    card = device_memory(device)
    if (memory := _phases(config, card, processes)) is None:
        return
    both = (memory.learner, memory.rollout)
    peak = max(sum(phase.values()) - phase.get(EMBEDDED_CACHE, 0) for phase in both)
    if peak <= card and not memory.fault:
        return
    reason = memory.fault or "more than there is"
    raise ConfigError(
        f"model.path = '{config.model.path}': {memory.sentence(card)}: {reason}; {help_for(config, card, processes)}"
    )


@contextmanager
def memory_explained(config: GRPOConfig, *, processes: int) -> Iterator[None]:
    """Turn torch's and vLLM's errors of a full GPU into OutOfDeviceMemory, which says what helps."""
    try:
        yield
    except Exception as error:
        # a reward may have a GPU of its own that is full
        if isinstance(error, UserError | GuardStop) or not is_out_of_memory(error):
            raise
        card = device_memory(resolve_device(config.model.device))
        memory = _phases(config, card, processes)
        details = "" if memory is None else f" ({memory.sentence(card)})"
        remedy = help_for(config, round(SAFE_SHARE * card), processes)
        raise OutOfDeviceMemory(f"the GPU's memory is full; {remedy}{details}") from error


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True for torch's and vLLM's errors of a full GPU and for errors that they caused.

    An EngineError that quotes a server is not one.
    """
    while error is not None:
        # vLLM's C++ raises a plain RuntimeError
        is_cuda = type(error).__name__ in ("OutOfMemoryError", "AcceleratorError", "RuntimeError")
        if is_cuda and "out of memory" in str(error).lower():
            return True
        error = error.__cause__
    return False


def _phases(config: GRPOConfig, card: int, processes: int) -> Phases | None:
    with suppress(ConfigError):  # the estimate cannot read the model's axes
        return phases(config, card, processes=processes)
    return None


def help_for(config: GRPOConfig, card: int, processes: int) -> str:
    """Return a clause with the settings that make a run fit into `card` bytes."""
    remedy = None
    with suppress(ConfigError):
        remedy = find_remedy(config, card, processes=processes)
    if remedy is None or not remedy.settings:
        fields = "optim.max_tokens_per_pack, data.max_pixels, data.video_max_frames"
        return f"take a smaller model, or fewer tokens and pixels ({fields})"
    return f"set {', '.join(remedy.settings)} ({remedy.peak / 1e9:.1f} GB by estimate)"
