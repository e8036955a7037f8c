"""Sums of rewards, written in Python: `0.8 * get("iou") + 0.2 * get("format")`.

A sum is no reward of its own: where it stands in a list of rewards it is replaced by its parts, each with
its weight. So the total is the sum, each part keeps its own metrics, time-out and process, and a part
that does not apply leaves the rest. In a mapping, `{"name": a_sum, "weight": 0.5, "as": "both"}` scales
every part and calls them both.iou, both.format.

Only sums: where one reward should count under a condition that another sets, see `only_if` in `policy.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mm_grpo.errors import RewardError
from mm_grpo.rewards.registry import RewardSpec, check_name, check_weight


@dataclass(frozen=True)
class RewardSum:
    """Several rewards whose weighted scores are added. Usable wherever a list of rewards is."""

    parts: tuple[RewardSpec, ...]

    def __mul__(self, factor: float) -> RewardSum:
        return RewardSum(tuple(part * factor for part in self.parts))

    __rmul__ = __mul__

    def __neg__(self) -> RewardSum:
        return self * -1

    def __add__(self, other: RewardSpec | RewardSum | Literal[0]) -> RewardSum:
        if isinstance(other, RewardSum):
            return RewardSum(self.parts + other.parts)
        if isinstance(other, RewardSpec):
            return RewardSum((*self.parts, other))
        if isinstance(other, int) and other == 0:  # sum() starts with it
            return self
        raise RewardError(
            f"rewards: {other!r} cannot be added to {self}; legal are rewards from get('name') or "
            f"resolve_entry(...), and sums of them"
        )

    def __radd__(self, other: Literal[0]) -> RewardSum:
        return self + other

    def __sub__(self, other: RewardSpec | RewardSum) -> RewardSum:
        return self + -other

    def __str__(self) -> str:
        return " + ".join(f"{part.weight:g} * {part.name}" for part in self.parts)


def parts_of(entry: Mapping[str, Any]) -> list[RewardSpec]:
    """The parts of a sum that stands in a mapping, with the mapping's weight and prefix."""
    total: RewardSum = entry["name"]
    if strange := sorted(set(entry) - {"name", "weight", "as"}):
        raise RewardError(
            f"rewards: the sum {total} has no setting {strange[0]!r}; legal keys of its entry are name, weight "
            f"and as. Set it on a part: resolve_entry({{'name': ..., {strange[0]!r}: ...}})"
        )
    prefix = entry.get("as")
    if prefix is not None:
        check_name(prefix)
        total = RewardSum(
            tuple(dataclasses.replace(part, name=f"{prefix}.{part.name}") for part in total.parts)
        )
    return list((total * check_weight(str(total), entry.get("weight", 1.0))).parts)
