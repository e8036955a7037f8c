"""The guard `sight_lost`: rewards that rise without looking, against runs that learn to see or learn nothing."""

from __future__ import annotations

from typing import Any

import pytest

from mm_grpo.health.sight import SightLost

# (reward, nats per completion) of the shapes demo, seed 0, measured at every step from 1 to 24, and at every tenth
EVERY = [
    (0.258, 0.039), (0.281, 0.009), (0.266, 0.014), (0.312, 0.028), (0.258, -0.023), (0.227, 0.023), (0.297, -0.052),
    (0.336, 0.003), (0.312, 0.006), (0.344, 0.041), (0.344, 0.034), (0.391, 0.159), (0.367, 0.078), (0.414, 0.001),
    (0.523, 0.191), (0.453, 0.136), (0.578, 0.480), (0.555, 1.136), (0.617, 0.330), (0.711, 0.764), (0.750, 1.704),
    (0.766, 1.597), (0.695, 0.809), (0.781, 1.595),
]  # fmt: skip
TENTH = [
    (0.258, 0.039), (0.344, 0.041), (0.711, 0.764), (0.914, 2.046), (0.969, 5.699), (0.867, 4.350), (0.977, 3.808),
    (0.992, 3.469), (0.984, 4.152),
]  # fmt: skip
# the same base on rows of which four in five have one answer, with the images of other rows
SWAPPED = [
    (0.180, 0.293), (0.367, -0.008), (0.469, 0.039), (0.641, 0.114), (0.750, 0.070), (0.836, -0.003), (0.719, -0.001),
]  # fmt: skip


def rows(measured: list[tuple[float, float]], low: float = 0.0, high: float = 1.0) -> list[dict[str, Any]]:
    every = [(reward, nats, nats / 2) for reward, nats in measured]
    return [
        {
            "reward": r, "reward_min": low, "reward_max": high,
            "sight/reward": r, "sight/nats": n, "sight/nats_per_token": t,
        } for r, n, t in every
    ]  # fmt: skip


def alarms(given: list[dict[str, Any]], completions: int = 128) -> list[int]:
    guard = SightLost(completions)
    return [step for step, row in enumerate(given, start=1) if guard.observe(step, row) is not None]


@pytest.mark.parametrize(
    ("measured", "fired"),
    [
        (EVERY, []),
        (TENTH, []),
        (SWAPPED, [6, 7]),
        ([(0.3, 4.7)] * 3 + [(0.9, 4.0)] * 6, []),
        ([(0.3, 4.7)] * 3 + [(0.9, 0.7)] * 6, [6, 7, 8, 9]),
        ([(0.3, 4.7)] * 3 + [(0.9, 1.2)] * 6, []),
        ([(0.3, 4.7)] * 3 + [(0.35, 0.0)] * 6, []),
        ([(0.9, 4.7)] * 3 + [(0.3, 0.0)] * 6, []),
        ([(0.5, 0.0)] * 20, []),
    ],
    ids=[
        "the demo, every step", "the demo", "swapped images", "sees", "fell to 15 %", "fell to 26 %", "no rise",
        "reward falls", "nothing learned",
    ],
)  # fmt: skip
def test_it_fires_where_rewards_rise_without_sight(
    measured: list[tuple[float, float]], fired: list[int]
) -> None:
    assert alarms(rows(measured)) == fired


def test_both_sight_per_completion_and_per_token_have_to_fall() -> None:
    """Answers of a fifth of the length have less sight each, and as much per token."""
    short = rows([(0.3, 5.0)] * 3 + [(0.9, 0.9)] * 3)
    for row in short[3:]:
        row["sight/nats_per_token"] = 2.5
    assert alarms(short) == []


def test_the_rise_is_measured_by_the_range_of_rewards_and_the_number_of_completions() -> None:
    blind = [(0.3, 0.01)] * 3 + [(0.6, 0.01)] * 3
    assert alarms(rows(blind)) == [6]
    assert alarms(rows(blind, high=2.0)) == []  # 0.3 of 2
    assert (
        alarms(rows(blind), completions=16) == []
    )  # 3 x 16 completions: 0.3 may be chance, 0.306 is the bound
    assert alarms(rows([(0.5, 0.0)] * 6, high=0.0)) == []  # no range at all


def test_steps_that_were_not_measured_are_passed_over_and_the_message_has_the_numbers() -> None:
    guard, found = SightLost(128), []
    for step, row in enumerate(rows(SWAPPED[:6]), start=1):
        found += [guard.observe(step * 10 - 1, {"reward": 0.5, "reward_min": 0.0, "reward_max": 1.0})]
        found += [guard.observe(step * 10, row)]
    (alarm,) = [one for one in found if one is not None]
    assert alarm.action == "warn"
    assert (
        "has risen from 0.3387 to 0.7423" in alarm.message
        and "by 0.0603 nats (at the start 0.108" in alarm.message
    )
    assert "run.guards.sight_lost=off" in alarm.message
