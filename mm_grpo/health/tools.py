"""Tools that never help: every call fails, or the model calls none although it could.

`ToolsFailing`. A tool whose every call fails teaches the model only not to call it: the tool or its server is broken,
or the model has not understood its arguments. `ToolsUnused`. A model that never calls a tool gets no reward for calling
one, so GRPO cannot teach it to: it has to call them now and then before training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mm_grpo.health import Alarm, Streak

FAILING_STEPS, UNUSED_STEPS = 5, 10
"""Consecutive steps after which each warns."""


class ToolsFailing:
    """The guard `tools_failing`. Reads `tools/call_frequency` and `tools/failure_frequency`."""

    name = "tools_failing"

    def __init__(self) -> None:
        self._streak = Streak()

    def observe(self, step: int, metrics: Mapping[str, Any]) -> Alarm | None:
        if not metrics.get("tools/call_frequency"):
            return None  # a step without calls says nothing of them
        if self._streak.count(metrics["tools/failure_frequency"] == 1) < FAILING_STEPS:
            return None
        kinds = [k.removeprefix("tools/failures/") for k in metrics if k.startswith("tools/failures/")]
        return Alarm(
            f"for {self._streak.length} steps every call of a tool has failed ({', '.join(kinds)} in the last): the "
            "model learns not to call it. See `turns` in rollouts/ for what it was told; raised means that the tool "
            "itself is broken, bad_arguments and malformed_call that the model does not write calls as the tool wants "
            "them: show one in the prompt, or warm the model up on some"
        )


class ToolsUnused:
    """The guard `tools_unused`. Reads `tools/call_frequency`."""

    name = "tools_unused"

    def __init__(self) -> None:
        self._streak = Streak()

    def observe(self, step: int, metrics: Mapping[str, Any]) -> Alarm | None:
        calls = metrics.get("tools/call_frequency")
        if calls is None or self._streak.count(calls == 0) < UNUSED_STEPS:
            return None
        return Alarm(
            f"for {self._streak.length} steps no completion has called a tool, although the run has some: what is "
            "never tried cannot be rewarded. Tell the model in the prompt when to call one, reward a call, raise "
            "rollout.temperature, or leave rollout.tools and rollout.environment out"
        )
