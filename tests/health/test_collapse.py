"""Collapsed completions: entropies that vanish before the task is solved, and completions that never end."""

from __future__ import annotations

from typing import Any

from mm_grpo.health.collapse import ClippedLengths, EntropyCollapse


def step(entropy: float, reward: float = 0.4) -> dict[str, Any]:
    return {"completions/mean_logprob": -entropy, "reward": reward, "reward_min": 0.0, "reward_max": 1.0}


def alarms(guard: Any, rows: list[dict[str, Any]]) -> dict[int, Any]:
    found = {number: guard.observe(number, row) for number, row in enumerate(rows, start=1)}
    return {number: alarm for number, alarm in found.items() if alarm is not None}


def test_entropy_near_0_at_a_poor_reward_warns_after_10_steps() -> None:
    start = [step(0.5), step(0.3), step(0.4), step(0.4), step(0.4)]  # 0.4 on average: collapsed below 0.02
    found = alarms(EntropyCollapse(), start + [step(0.019)] * 12)
    assert list(found) == [15, 16, 17] and found[15].action == "warn"
    for words in ("0.019 nats per token", "began at 0.4, for 10 steps", "mean reward (0.4)", "entropy_coef"):
        assert words in found[15].message
    assert alarms(EntropyCollapse(), start + [step(0.021)] * 40) == {}


def test_both_bounds_have_to_be_passed() -> None:
    sharp_from_the_start = [step(0.015)] * 40  # below 0.02, and no part of its own beginning
    assert alarms(EntropyCollapse(), sharp_from_the_start) == {}
    long_way_down = [step(2.0)] * 5 + [step(0.05)] * 40  # 2.5 % of its beginning, and 0.05 nats are choices
    assert alarms(EntropyCollapse(), long_way_down) == {}


def test_a_policy_that_is_sure_and_right_has_not_collapsed() -> None:
    start = [step(0.7)] * 5
    assert alarms(EntropyCollapse(), start + [step(0.001, reward=0.95)] * 40) == {}
    assert list(alarms(EntropyCollapse(), start + [step(0.001, reward=0.7)] * 12)) == [15, 16, 17]


def test_completions_that_are_all_cut_warn_after_10_steps() -> None:
    found = alarms(ClippedLengths(64, left_out=False), [{"completions/clipped_ratio": 1.0}] * 40)
    assert list(found) == list(range(10, 41)) and {a.action for a in found.values()} == {"warn"}
    assert "(100% in the last) have been cut at rollout.max_completion_length = 64" in found[10].message
    assert alarms(ClippedLengths(64, left_out=False), [{"completions/clipped_ratio": 0.9}] * 40) == {}
    often = ([{"completions/clipped_ratio": 1.0}] * 9 + [{"completions/clipped_ratio": 0.5}]) * 4
    assert alarms(ClippedLengths(64, left_out=False), often) == {}


def test_where_cut_completions_are_left_out_and_all_are_cut_nothing_is_learned() -> None:
    every = alarms(ClippedLengths(64, left_out=True), [{"completions/clipped_ratio": 1.0}] * 21)
    assert [every[n].action for n in (10, 19, 20, 21)] == ["warn", "warn", "stop", "stop"]
    assert "mask_truncated_completions leaves them out" in every[20].message
    nearly = alarms(ClippedLengths(64, left_out=True), [{"completions/clipped_ratio": 0.97}] * 40)
    assert {a.action for a in nearly.values()} == {"warn"}
