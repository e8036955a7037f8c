"""Facts about the engines of `rollout.engine` by name for code that must not import them.

A new engine is a line here, a name in `RolloutConfig.engine`, and a maker in `build.ENGINES`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineFacts:
    """Place of an engine's weights. Others than an embedded engine have their own limits, and read `rollout.vllm`."""

    embedded: bool = False
    """True when the engine samples from the learner's own module."""
    remote: bool = False
    """True when its weights lie in other processes, on memory of their own: it can sample while the learner works."""

    @property
    def colocated(self) -> bool:
        """Return True when a copy of the weights shares the device with the learner."""
        return not self.embedded and not self.remote


ENGINE_FACTS: dict[str, EngineFacts] = {
    "transformers": EngineFacts(embedded=True),
    "vllm": EngineFacts(),
    "vllm_server": EngineFacts(remote=True),
}
