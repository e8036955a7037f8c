"""Runs that are larger than their GPU: refused before the weights are loaded, and explained where the estimate erred.

Both say the settings that help, the cheapest first, as `mm-grpo estimate` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import ConfigError, GuardStop, UserError
from mm_grpo.learner.model import resolve_device
from mm_grpo.preflight.estimate import phases, what_fits
from mm_grpo.preflight.memory import EMBEDDED_CACHE, Phases, device_memory

SMALLER = 0.9
"""Share of the memory that an estimate should need after a card was full although it said that all fits."""


class OutOfDeviceMemory(RuntimeError):
    """A GPU was full; the message says what helps. Exit code 1."""


def refuse_too_large(config: GRPOConfig, *, processes: int = 1) -> None:
    """ConfigError where a phase of a run is past the memory of its GPU, but for a cache that its rows may not fill.

    On a CPU there is no such limit, and a model that the estimate cannot read is let through.
    """
    device = resolve_device(config.model.device)
    if device.type != "cuda":
        return
    card = device_memory(device)
    if (found := _phases(config, card, processes)) is None:
        return
    least = max(
        sum(phase.values()) - phase.get(EMBEDDED_CACHE, 0) for phase in (found.learner, found.rollout)
    )
    if least <= card and not found.fault:
        return
    reason = found.fault or "more than there is"
    raise ConfigError(
        f"model.path = '{config.model.path}': {found.sentence(card)}: {reason}; {help_for(config, card, processes)}"
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
        found, said = _phases(config, card, processes), help_for(config, round(SMALLER * card), processes)
        held = "" if found is None else f" ({found.sentence(card)})"
        raise OutOfDeviceMemory(f"the GPU's memory is full; {said}{held}") from error


def is_out_of_memory(error: BaseException | None) -> bool:
    """True for torch's errors of a full GPU, vLLM's, which its C++ raises as a RuntimeError, and what these caused; not
    for what a server says in an EngineError."""
    while error is not None:
        of_cuda = type(error).__name__ in ("OutOfMemoryError", "AcceleratorError", "RuntimeError")
        if of_cuda and "out of memory" in str(error).lower():
            return True
        error = error.__cause__
    return False


def _phases(config: GRPOConfig, card: int, processes: int) -> Phases | None:
    with suppress(ConfigError):  # of a model whose axes the estimate cannot read
        return phases(config, card, processes=processes)
    return None


def help_for(config: GRPOConfig, card: int, processes: int) -> str:
    """The settings with which a run fits into `card` bytes, in a half sentence."""
    remedy = None
    with suppress(ConfigError):
        remedy = what_fits(config, card, processes=processes)
    if remedy is None or not remedy.settings:
        return "take a smaller model, or fewer tokens and pixels (optim.max_tokens_per_pack, data.max_pixels)"
    return f"set {', '.join(remedy.settings)} ({remedy.peak / 1e9:.1f} GB by estimate)"
