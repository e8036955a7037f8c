"""Rewards without a signal: after how many steps `zero_std` and `no_reward` fire, and which healthy runs pass."""

from __future__ import annotations

from typing import Any

import pytest

from mm_grpo.health import RewardRange, Streak
from mm_grpo.health.reward_signal import NoReward, ZeroStd


def constant(value: float = 0.0) -> dict[str, Any]:
    """The metrics of a step in which every completion has the same reward."""
    rewards = {"reward": value, "reward_min": value, "reward_max": value}
    return {**rewards, "advantages/frac_zero": 1.0, "frac_reward_none": 0.0}


def mixed(reward: float = 0.5, zero: float = 0.5, low: float = 0.0, high: float = 1.0) -> dict[str, Any]:
    rewards = {"reward": reward, "reward_min": low, "reward_max": high}
    return {**rewards, "advantages/frac_zero": zero, "frac_reward_none": 0.0}


def actions(guard: Any, rows: list[dict[str, Any]]) -> dict[int, str]:
    """The action of each step that raises an alarm."""
    found = {step: guard.observe(step, row) for step, row in enumerate(rows, start=1)}
    return {step: alarm.action for step, alarm in found.items() if alarm is not None}


def test_streaks_and_ranges_by_hand() -> None:
    streak = Streak()
    assert [streak.count(held) for held in (True, True, False, True)] == [1, 2, 0, 1]
    seen = RewardRange()
    assert not seen.solved(constant(1.0))  # nothing else was seen yet
    assert not seen.solved(mixed(0.5))
    assert seen.solved(mixed(0.9)) and not seen.solved(mixed(0.89))  # of 0 to 1
    assert not seen.solved(mixed(0.9, high=3.0)) and seen.solved(mixed(2.7, high=2.7))  # now of 0 to 3
    assert not seen.solved({"reward": 3.0})


def test_constant_rewards_warn_at_500_completions_and_stop_at_1000() -> None:
    rows = [constant()] * 30
    assert actions(ZeroStd(64), rows) == {
        **dict.fromkeys(range(10, 20), "warn"),
        **dict.fromkeys(range(20, 31), "stop"),
    }
    # 25 completions a step: 500 of them after 20 steps, 1000 after 40
    assert actions(ZeroStd(25), [constant()] * 41) == {
        **dict.fromkeys(range(20, 40), "warn"), 40: "stop", 41: "stop",
    }  # fmt: skip
    assert actions(ZeroStd(12), rows) == {}  # 360 completions may all have missed a rare reward


def test_the_message_about_constant_rewards_names_cause_and_remedy() -> None:
    guard = ZeroStd(64)
    alarm = [guard.observe(step, constant(0.25)) for step in range(1, 21)][-1]
    assert alarm is not None
    for words in ("in none of 20 steps", "the mean reward is 0.25", "mm-grpo check CONFIG", "data.columns"):
        assert words in alarm.message


def test_spread_that_ends_warns_and_one_group_in_sixteen_is_enough() -> None:
    lost = [mixed()] + [constant()] * 30  # it had spread once, so it never stops
    found = actions(ZeroStd(64), lost)
    assert found == dict.fromkeys(range(11, 32), "warn")
    assert actions(ZeroStd(64), [mixed(zero=15 / 16)] * 40) == {}
    interrupted = ([constant()] * 9 + [mixed()]) * 4
    assert actions(ZeroStd(64), interrupted) == {}


def test_a_solved_task_has_no_spread_and_is_no_failure() -> None:
    solved = [mixed()] + [{**constant(1.0)}] * 40
    assert actions(ZeroStd(128), solved) == {}
    sure_and_half_wrong = [mixed()] + [mixed(0.5, zero=1.0)] * 40
    assert actions(ZeroStd(128), sure_and_half_wrong)[11] == "warn"


def test_the_end_of_a_run_in_which_no_group_ever_had_spread() -> None:
    guard = ZeroStd(12)
    assert actions(guard, [constant()] * 9) == {} and guard.finish() is None
    assert guard.observe(10, constant()) is None
    alarm = guard.finish()
    assert alarm is not None and alarm.action == "stop" and "in none of 10 steps" in alarm.message
    guard.observe(11, mixed())
    assert guard.finish() is None


EMPTY = {"frac_reward_none": 1.0, "advantages/frac_zero": 1.0, "epoch": 0.1}


def test_no_reward_at_all_warns_after_10_steps_and_stops_after_100_prompts() -> None:
    assert actions(NoReward(["a"], 16), [EMPTY] * 11) == {10: "stop", 11: "stop"}  # 160 prompts
    few = actions(NoReward(["a"], 4), [EMPTY] * 26)
    assert few == {**dict.fromkeys(range(10, 25), "warn"), 25: "stop", 26: "stop"}
    every_row = actions(NoReward(["a"], 4), [{**EMPTY, "epoch": 1.5}] * 10)
    assert every_row == {10: "stop"}
    assert actions(ZeroStd(64), [EMPTY] * 40) == {}  # that is for `no_reward` to say


def test_rewards_that_were_there_once_only_warn_when_they_end() -> None:
    rows = [{"frac_reward_none": 0.9, "rewards/a/mean": 0.5}] + [EMPTY] * 30
    assert set(actions(NoReward(["a"], 16), rows).values()) == {"warn"}
    half = [{"frac_reward_none": 0.99, "rewards/a/mean": 0.5}] * 40
    assert actions(NoReward(["a"], 16), half) == {}


def test_a_reward_that_never_applied_is_named_after_500_prompts_or_all_rows() -> None:
    rows = [{"frac_reward_none": 0.0, "rewards/a/mean": 0.5, "epoch": 0.1}] * 40
    assert actions(NoReward(["a", "b"], 16), rows) == dict.fromkeys(range(32, 41), "warn")  # 512 prompts
    assert actions(NoReward(["a", "b"], 4), rows) == {}
    passed = [{**row, "epoch": 1.0} for row in rows]
    assert actions(NoReward(["a", "b"], 4), passed) == dict.fromkeys(range(20, 41), "warn")
    guard = NoReward(["a", "b"], 16)
    (message,) = {alarm.message for row in rows[:32] if (alarm := guard.observe(1, row))}
    assert "in 32 steps b applied to no completion" in message and "mm-grpo check" in message
    once = [*rows[:5], {**rows[0], "rewards/b/mean": 0.0}, *rows[5:]]
    assert actions(NoReward(["a", "b"], 16), once) == {}


def test_masked_failures_and_columns_that_are_null_are_counted_apart() -> None:
    guard = NoReward(["a"], 16)
    failed = {**EMPTY, "rewards/a/errors": 100.0, "rewards/a/timeouts": 28.0}
    alarm = [guard.observe(step, failed) for step in range(1, 11)][-1]
    assert alarm is not None and "128 calls of the last step failed and were masked" in alarm.message
    null = [NoReward(["a"], 16).observe(1, EMPTY)]
    assert null == [None]


@pytest.mark.parametrize(("steps", "action"), [(9, "warn"), (10, "stop")])
def test_the_end_of_a_run_without_any_reward(steps: int, action: str) -> None:
    guard = NoReward(["a"], 4)
    actions(guard, [EMPTY] * steps)
    alarm = guard.finish()
    assert (
        alarm is not None and alarm.action == action and f"for {steps} steps no completion" in alarm.message
    )
    guard.observe(steps + 1, {"frac_reward_none": 0.5})
    assert guard.finish() is None
