"""Runs that are larger than their GPU: refused before the weights are loaded, and explained where the estimate erred.

Both say the settings that help, the cheapest first, as `mm-grpo estimate` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import ConfigError, GuardStop, UserError
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.model import resolve_device
from mm_grpo.preflight.estimate import phases, sizes_of, what_fits
from mm_grpo.preflight.memory import EMBEDDED_CACHE, device_memory, run_sentence

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
    try:
        found = phases(*sizes_of(config), config, card, processes=processes)
    except ConfigError:
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
def memory_explained(learner: Learner) -> Iterator[None]:
    """Turn torch's and vLLM's errors of a full GPU into OutOfDeviceMemory, which says what helps."""
    try:
        yield
    except Exception as error:
        # a reward may have a GPU of its own that is full
        if isinstance(error, UserError | GuardStop) or not is_out_of_memory(error):
            raise
        card, config = device_memory(learner.model.device), learner.config
        found = help_for(config, round(SMALLER * card), learner.ranks.world)
        raise OutOfDeviceMemory(f"the GPU's memory is full; {found}. {run_sentence(learner)}") from error


def is_out_of_memory(error: BaseException | None) -> bool:
    """True for torch's error of a full GPU, vLLM's, which its C++ raises as a RuntimeError, and what these caused."""
    while error is not None:
        full = type(error) is RuntimeError and "out of memory" in str(error).lower()
        if full or isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__
    return False


def help_for(config: GRPOConfig, card: int, processes: int) -> str:
    """The settings with which a run fits into `card` bytes, in a half sentence."""
    remedy = None
    with suppress(ConfigError):  # of a model whose axes the estimate cannot read
        remedy = what_fits(config, card, processes=processes)
    if remedy is None or not remedy.settings:
        return "take a smaller model, or fewer tokens and pixels (optim.max_tokens_per_pack, data.max_pixels)"
    return f"set {', '.join(remedy.settings)} ({remedy.peak / 1e9:.1f} GB by estimate)"
