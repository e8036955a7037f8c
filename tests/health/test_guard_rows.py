"""Guards that watch several steps: rows of metrics, and the steps at which one of them warns and stops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import pytest

from mm_grpo.config import GRPOConfig
from mm_grpo.config.values import GuardName
from mm_grpo.errors import GuardStop
from mm_grpo.health.guards import Guards
from mm_grpo.health.rows import guard_rows
from mm_grpo.rewards.resolve import resolve_entries

HEALTHY = {
    "reward": 0.5, "reward_min": 0.0, "reward_max": 1.0, "advantages/frac_zero": 0.25, "frac_reward_none": 0.0,
    "rewards/exact_match/mean": 0.5, "completions/mean_logprob": -0.5, "completions/clipped_ratio": 0.1,
    "kl": 1e-6, "learner/updates": 1, "learner/update_norm": 0.1, "learner/overflows": 0, "learning_rate": 1e-6,
    "epoch": 0.1,
}  # fmt: skip
OK: dict[str, Any] = {}
EXACT = ["exact_match"]
Steps = Sequence[tuple[int, dict[str, Any]]]


def guards(rewards: Any = EXACT, log: Any = None, **sections: Any) -> Guards:
    given = {
        "model": {"path": "m"},
        "rollout": {"prompts_per_step": 8, "num_generations": 8, **sections.pop("rollout", {})},
        "algorithm": {"beta": 0.1, **sections.pop("algorithm", {})},
    }
    return Guards(GRPOConfig.from_dict({**given, **sections}), resolve_entries(list(rewards)), log)


def rows(*steps: tuple[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Healthy rows with changes: so many of each. A value of None stands for a metric that is not there."""
    made = [{**HEALTHY, **changes} for count, changes in steps for _ in range(count)]
    return [{name: value for name, value in row.items() if value is not None} for row in made]


def fired(steps: Steps, rewards: Any = EXACT, end: bool = False, **fields: Any) -> list[tuple[int, str, str]]:
    """Step, guard and action of what fires, also at the run's end if `end`; a stop is the last and raises."""
    found: list[tuple[int, str, str]] = []
    watching = guards(
        rewards, lambda step, name, action, message: found.append((step, name, action)), **fields
    )
    try:
        for step, row in enumerate(rows(*steps), start=1):
            watching.on_log(step, row)
        if end:
            watching.on_train_end(step)
    except GuardStop:
        assert found[-1][2] == "stop"
    else:
        assert all(action == "warn" for _, _, action in found)
    return found


def flat(value: float = 0.5) -> dict[str, Any]:
    return {"reward": value, "reward_min": value, "reward_max": value, "advantages/frac_zero": 1.0}


def entropy(nats: float | None, reward: float | None = 0.4) -> dict[str, Any]:
    return {"completions/mean_logprob": None if nats is None else -nats, "reward": reward}


def tools(calls: float, failing: float = 0.0) -> dict[str, Any]:
    return {"tools/call_frequency": calls, "tools/failure_frequency": failing}


CUT = {"completions/clipped_ratio": 1.0}
LEFT_OUT = {"algorithm": {"mask_truncated_completions": True}}
EMPTY = {
    "frac_reward_none": 1.0, "advantages/frac_zero": 1.0, "rewards/exact_match/mean": None,
    "reward": None, "reward_min": None, "reward_max": None,
}  # fmt: skip
GATED = [
    "exact_match",
    {"name": "length", "only_if": "exact_match", "max_length": 9},
    {"name": "format", "weight": 0},
]
BOTH = ["exact_match", {"name": "length", "max_length": 9}]
DROPPED, SOME = {"sampling/masked_ratio": 1.0}, {"sampling/masked_ratio": 0.9}
PHANTOM = {"advantages/phantom_share": 0.5}
STILL = {"kl": 0.0}
START = [(1, entropy(0.5)), (1, entropy(0.3)), (3, entropy(0.4))]  # 0.4 on average


def sight(
    *measured: tuple[float, float],
    low: float = 0.0,
    high: float = 1.0,
    per_token: float | None = None,
    stderr: float | None = None,
) -> Steps:
    """A step for each (reward, nats per completion); completions have two tokens unless `per_token` says otherwise."""
    return [
        (1, {
            "reward": reward, "reward_min": low, "reward_max": high, "sight/reward": reward, "sight/nats": nats,
            "sight/nats_per_token": nats / 2 if per_token is None else per_token, "sight/nats_stderr": stderr,
        }) for reward, nats in measured
    ]  # fmt: skip


# the shapes demo, seed 0, measured at every step from 1 to 24
DEMO = sight(
    (0.258, 0.039), (0.281, 0.009), (0.266, 0.014), (0.312, 0.028), (0.258, -0.023), (0.227, 0.023), (0.297, -0.052),
    (0.336, 0.003), (0.312, 0.006), (0.344, 0.041), (0.344, 0.034), (0.391, 0.159), (0.367, 0.078), (0.414, 0.001),
    (0.523, 0.191), (0.453, 0.136), (0.578, 0.480), (0.555, 1.136), (0.617, 0.330), (0.711, 0.764), (0.750, 1.704),
    (0.766, 1.597), (0.695, 0.809), (0.781, 1.595),
)  # fmt: skip
# the same base on rows of which four in five have one answer, with the images of other rows, at every tenth
SWAPPED = sight(
    (0.180, 0.293), (0.367, -0.008), (0.469, 0.039), (0.641, 0.114), (0.750, 0.070), (0.836, -0.003), (0.719, -0.001),
)  # fmt: skip
BEGAN = [(0.3, 4.7)] * 3
BLIND = [(0.3, 0.01)] * 3 + [(0.6, 0.01)] * 3
LOST = "sight_lost"

CASES: dict[str, tuple[Steps, str, list[tuple[int, str]], dict[str, Any]]] = {
    "200 healthy steps": ([(200, OK)], "", [], {}),
    "constant rewards, 640 and 1280 completions": ([(30, flat())], "zero_std", [(10, "warn"), (20, "stop")], {}),
    "constant rewards, 24 completions a step": (
        [(45, flat())], "zero_std", [(21, "warn"), (42, "stop")], {"rollout": {"prompts_per_step": 3}},
    ),
    "spread that ends": ([(1, OK), (30, flat())], "zero_std", [(11, "warn")], {}),
    "spread that ends, just below it": ([(1, OK), (40, flat(0.89))], "zero_std", [(11, "warn")], {}),
    "spread comes back": ([(9, flat()), (1, OK)] * 4, "", [], {}),
    "no reward, 80 prompts and 104": ([(14, EMPTY)], "no_reward", [(10, "warn"), (13, "stop")], {}),
    "rewards that end": ([(1, OK), (40, EMPTY)], "no_reward", [(11, "warn")], {}),
    "one that never applied, in 504 prompts": ([(70, OK)], "no_reward", [(63, "warn")], {"rewards": BOTH}),
    "one that applied once": (
        [(5, OK), (1, {"rewards/length/mean": 0.0}), (70, OK)], "", [], {"rewards": BOTH},
    ),
    "one behind a gate, one without weight": ([(100, OK)], "", [], {"rewards": GATED}),
    "all are cut": ([(40, CUT)], "clipped_lengths", [(10, "warn")], {}),
    "all are cut, and left out": ([(40, CUT)], "clipped_lengths", [(10, "warn"), (20, "stop")], LEFT_OUT),
    "the entropy collapses": ([*START, (12, entropy(0.019))], "entropy_collapse", [(15, "warn")], {}),
    "sure and right": ([*START, (40, entropy(0.001, reward=0.95))], "", [], {}),
    "the correction drops nearly all": ([(40, SOME)], "masked_share", [(10, "warn")], {}),
    "it drops all": ([(40, DROPPED)], "masked_share", [(10, "warn"), (20, "stop")], {}),
    "it drops some": ([(40, {"sampling/masked_ratio": 0.89})], "", [], {}),
    "a KL of 0 after an update": ([(15, STILL)], "zero_kl", [(11, "warn")], {}),
    "without beta": ([(40, STILL)], "", [], {"algorithm": {"beta": 0.0}}),
    "a KL in the reward": ([(40, STILL)], "", [], {"algorithm": {"kl_in_reward": True}}),
    "every call fails": ([(6, tools(2.0, 1.0))], "tools_failing", [(5, "warn")], {}),
    "a call works": ([(4, tools(2.0, 1.0)), (1, tools(2.0, 0.99))] * 4, "", [], {}),
    "steps without calls between": (
        [(4, tools(2.0, 1.0)), (9, tools(0.0)), (1, tools(2.0, 1.0))], "tools_failing", [(14, "warn")], {},
    ),
    "no call": ([(40, tools(0.0))], "tools_unused", [(10, "warn")], {}),
    "a call in ten": ([(9, tools(0.0)), (1, tools(0.1))] * 4, "", [], {}),
    "other rewards alone differ": ([(40, PHANTOM)], "phantom_advantage", [(30, "warn")], {}),
    "they do until the format is learned": ([(29, PHANTOM), (60, {"advantages/phantom_share": 0.4})], "", [], {}),
    "the demo sees": (DEMO, "", [], {}),
    "swapped images, measured at every tenth step": (
        [step for one in SWAPPED for step in ((9, OK), one)], LOST, [(60, "warn")], {},
    ),
    "to 18 % a completion, and not a token": (
        [*sight(*[(0.3, 5.0)] * 3), *sight(*[(0.9, 0.9)] * 3, per_token=2.5)], "", [], {},
    ),
    # two errors of a window of three are 2 / sqrt(3) of one: 0.01 +- 0.07 is near zero, 0.01 +- 0.12 may not be
    "near zero, surely": (sight(*BLIND, stderr=0.06), LOST, [(6, "warn")], {}),
    # a fifth of 4.7 - 0.6 is 0.82, and what is left 0.15 +- 0.6; one of 4.7 - 0.8 is 0.78, less than 0.15 + 0.8
    "it fell, or noise": (sight(*BEGAN, *[(0.9, 0.15)] * 6, stderr=0.7), "", [], {}),
    "no rise": (sight(*BEGAN, *[(0.35, 0.0)] * 6), "", [], {}),
    "a rise without sight": (sight(*BLIND), LOST, [(6, "warn")], {}),
    "a rise that 16 completions make by chance": (
        sight(*BLIND), "", [], {"rollout": {"prompts_per_step": 2}},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("steps", "guard", "expected", "settings"), CASES.values(), ids=CASES)
@pytest.mark.field_bug("masked-to-nothing", "collapse", "phantom-advantages", "flat-groups", "text-alone")
def test_a_guard_fires_as_its_row_says(
    steps: Steps, guard: str, expected: list[tuple[int, str]], settings: dict[str, Any]
) -> None:
    assert fired(steps, **settings) == [(step, guard, action) for step, action in expected]


def test_the_config_names_every_guard_and_no_other() -> None:
    of_one_moment = {"duplicate_completions", "logp_gap", "update_happens", "unread_images"}
    config = GRPOConfig.from_dict({"model": {"path": "m"}, "algorithm": {"beta": 0.1}})
    rows = {row.name for row in guard_rows(config)}
    assert rows | of_one_moment | {"sight_lost", "no_update"} == set(get_args(GuardName))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"learner/updates": 0, "learner/overflows": 1}, "model.dtype"),
        ({"learner/updates": 2, "learning_rate": 0.0}, "learning rate was 0 in all 4 updates"),
        ({"learner/updates": 0, **EMPTY}, "data.columns"),
        ({"learner/updates": 0, "advantages/frac_zero": 1.0}, "mm-grpo check"),
        ({"learner/updates": 1}, "clip_ratio/region_mean"),
    ],
)
def test_a_run_without_an_update_is_stopped_at_its_end(changes: dict[str, Any], names: str) -> None:
    watching = guards()
    for step, row in enumerate(rows((2, {"learner/update_norm": 0.0, **changes})), start=1):
        watching.on_log(step, row)
    with pytest.raises(GuardStop, match="guard no_update: ") as stopped:
        watching.on_train_end(2)
    assert names in str(stopped.value)
    watching.on_log(3, HEALTHY)
    watching.on_train_end(3)


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ([(9, flat())], []),
        ([(10, flat())], [(10, "zero_std", "stop")]),
        ([(9, EMPTY)], [(9, "no_reward", "warn")]),
        ([(10, EMPTY)], [(10, "no_reward", "warn"), (10, "no_reward", "stop")]),
    ],
)
def test_a_run_whose_rewards_are_alike_fails(steps: Steps, found: list[tuple[int, str, str]]) -> None:
    """8 completions a step: too few for `zero_std` to stop it sooner."""
    assert fired(steps, end=True, rollout={"prompts_per_step": 2, "num_generations": 4}) == found


@pytest.mark.parametrize(("value", "advised"), [(-0.5, True), (0.0, True), (0.1, False)])
@pytest.mark.parametrize(("moved", "rewarded"), [(0.1, True), (0.0, True), (0.1, False)])
@pytest.mark.field_bug("form-never-seen")
def test_warm_is_advised_where_no_reward_was_above_0(
    value: float, advised: bool, moved: float, rewarded: bool
) -> None:
    """In each message of a run whose rewards are alike, also at its end; where there are none, in no message."""
    messages: list[str] = []
    watching = guards(log=lambda step, name, action, message: messages.append(message))
    moved_row = {**(flat(value) if rewarded else EMPTY), "learner/update_norm": moved}
    for step, row in enumerate(rows((12, moved_row)), 1):
        watching.on_log(step, row)
    with pytest.raises(GuardStop):
        watching.on_train_end(12)
    assert len(messages) == 2
    assert ["mm-grpo warm" in message for message in messages] == [advised and rewarded] * 2


def test_a_warning_comes_again_after_50_steps() -> None:
    assert [step for step, *_ in fired([(120, CUT)])] == [10, 60, 110]


@pytest.mark.parametrize(("action", "found"), [("stop", ["stop"]), ("warn", ["warn"]), ("off", [])])
def test_the_config_decides_over_the_guards_own_choice(action: str, found: list[str]) -> None:
    for own in (CUT, flat()):
        name = "clipped_lengths" if own is CUT else "zero_std"
        events = fired([(30, own)], run={"guards": {name: action}})
        assert [kind for _, _, kind in events] == found


def test_a_resumed_run_warns_and_stops_where_the_whole_one_would(caplog: pytest.LogCaptureFixture) -> None:
    events: list[tuple[int, str]] = []
    for own, done, end in ((CUT, 30, 70), (flat(), 19, 21)):
        resumed = guards(log=lambda step, name, action, message: events.append((step, action)))
        before = [
            {"step": 0, "eval/accuracy": 0.3},
            *({"step": n, **HEALTHY, **own} for n in range(1, done + 1)),
        ]
        resumed.replay(before)
        try:
            for step in range(done + 1, end):
                resumed.on_log(step, {**HEALTHY, **own})
        except GuardStop:
            pass
    assert events == [(60, "warn"), (20, "stop")]  # after the warning of step 10, which it did not see itself
    assert "for 60 steps" in caplog.text
