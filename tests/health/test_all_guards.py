"""All guards of a run together: which are there, how often they warn, what a resume rebuilds, how a run ends."""

from __future__ import annotations

import logging
from typing import Any, get_args

import pytest

from mm_grpo.config import GRPOConfig
from mm_grpo.config.values import GuardName
from mm_grpo.errors import GuardStop
from mm_grpo.health.guards import Guards
from mm_grpo.health.update_happens import NoUpdate
from mm_grpo.rewards.resolve import resolve_entries

EVERYWHERE = {"duplicate_completions", "logp_gap", "update_happens", "unread_images"}
"""Guards of one moment, which the trainer calls by their names."""


def guards(rewards: Any = ("exact_match",), /, **run: Any) -> Guards:
    config = {
        "model": {"path": "m"},
        "rollout": {"prompts_per_step": 8, "num_generations": 8},
        "algorithm": {"beta": 0.1},
        "run": run,
    }
    return Guards(GRPOConfig.from_dict(config), resolve_entries(list(rewards)))


def row(**changes: Any) -> dict[str, Any]:
    """A step that shows nothing unusual."""
    return {
        "reward": 0.5, "reward_min": 0.0, "reward_max": 1.0, "advantages/frac_zero": 0.25, "frac_reward_none": 0.0,
        "rewards/exact_match/mean": 0.5, "completions/mean_logprob": -0.5, "completions/clipped_ratio": 0.1,
        "kl": 1e-6, "learner/updates": 1, "learner/update_norm": 0.1, "learner/overflows": 0, "learning_rate": 1e-6,
        "epoch": 0.1, **changes,
    }  # fmt: skip


CLIPPED = row(**{"completions/clipped_ratio": 1.0})


def test_the_config_names_every_guard_and_no_other() -> None:
    watching = {guard.name for guard in guards()._watching}
    assert watching | EVERYWHERE == set(get_args(GuardName)) and not watching & EVERYWHERE


def test_a_healthy_run_raises_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    all_of_them = guards()
    with caplog.at_level(logging.WARNING, logger="mm_grpo"):
        for step in range(1, 201):
            all_of_them.observe(step, row())
        all_of_them.finish(200)
    assert caplog.text == ""


def test_a_warning_comes_again_after_50_steps(caplog: pytest.LogCaptureFixture) -> None:
    all_of_them = guards()
    warned = []
    for step in range(1, 121):
        caplog.clear()
        all_of_them.observe(step, CLIPPED)
        warned += [step] * len(caplog.records)
    assert warned == [10, 60, 110]
    assert "guard clipped_lengths: for 110 steps" not in caplog.text  # step 120 was silent


@pytest.mark.parametrize(("action", "stops"), [("stop", True), ("warn", False), ("off", False)])
def test_the_config_decides_over_the_guards_own_choice(
    action: str, stops: bool, caplog: pytest.LogCaptureFixture
) -> None:
    all_of_them = guards(guards={"clipped_lengths": action})
    for step in range(1, 10):
        all_of_them.observe(step, CLIPPED)
    if stops:
        with pytest.raises(GuardStop, match=r"guard clipped_lengths: .*run.guards.clipped_lengths=stop"):
            all_of_them.observe(10, CLIPPED)
    else:
        all_of_them.observe(10, CLIPPED)
    assert len(caplog.records) == (action == "warn")


def test_a_resumed_run_warns_and_stops_where_the_whole_one_would(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"step": 0, "eval/accuracy": 0.3}, *({"step": step, **CLIPPED} for step in range(1, 31))]
    resumed = guards()
    resumed.replay(rows)
    assert caplog.text == ""  # what happened before is not reported again
    warned = []
    for step in range(31, 70):
        caplog.clear()
        resumed.observe(step, CLIPPED)
        warned += [step] * len(caplog.records)
    assert warned == [60]  # after that of step 10, which it did not see itself
    flat = row(**{"reward_min": 0.5, "reward_max": 0.5, "advantages/frac_zero": 1.0})
    dead = guards()
    dead.replay({"step": step, **flat} for step in range(1, 20))
    with pytest.raises(GuardStop, match="guard zero_std: in none of 20 steps"):
        dead.observe(20, flat)


def test_rewards_that_wait_for_a_gate_or_weigh_nothing_may_apply_to_nothing() -> None:
    rewards = [
        "exact_match",
        {"name": "length", "only_if": "exact_match", "max_length": 9},
        {"name": "format", "weight": 0},
    ]
    (no_reward,) = [g for g in guards(rewards)._watching if g.name == "no_reward"]
    assert no_reward.names == ("exact_match",)  # type: ignore[attr-defined]


def test_a_run_without_an_update_is_stopped_at_its_end() -> None:
    still = row(**{"learner/update_norm": 0.0, "learner/updates": 0})
    all_of_them = guards()
    for step in (1, 2):
        all_of_them.observe(step, still)
    with pytest.raises(
        GuardStop, match=r"guard no_update: the run made no update in 2 steps: no completion that"
    ):
        all_of_them.finish(2)
    all_of_them.observe(3, row())
    all_of_them.finish(3)


def test_the_end_of_a_run_warns_even_right_after_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    all_of_them = guards(guards={"zero_std": "warn"})
    flat = row(**{"reward_min": 0.5, "reward_max": 0.5, "advantages/frac_zero": 1.0})
    for step in range(1, 13):
        all_of_them.observe(step, flat)
    assert len(caplog.records) == 1
    all_of_them.finish(12)
    assert len(caplog.records) == 2 and "in none of 12 steps" in caplog.records[1].message


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"learner/overflows": 1}, "every gradient overflowed"),
        ({"learner/updates": 2, "learning_rate": 0.0}, "the learning rate was 0 in all 4 updates"),
        (
            {"learner/updates": 1},
            "the gradient was 0 in all 2 updates, for every token was clipped or masked",
        ),
        ({"frac_reward_none": 1.0, "advantages/frac_zero": 1.0}, "no completion had a reward"),
        ({"advantages/frac_zero": 1.0}, "the rewards of no group differed"),
        ({"completions/clipped_ratio": 1.0}, "every completion was cut at rollout.max_completion_length"),
        ({}, "no completion that enters the loss had an advantage"),
    ],
)
def test_a_run_without_an_update_says_why(changes: dict[str, Any], cause: str) -> None:
    guard = NoUpdate()
    for step in (1, 2):
        assert (
            guard.observe(step, row(**{"learner/updates": 0, "learner/update_norm": 0.0, **changes})) is None
        )
    alarm = guard.finish()
    assert alarm is not None and alarm.action == "stop"
    assert alarm.message.startswith(f"the run made no update in 2 steps: {cause}")
