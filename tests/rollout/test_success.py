"""Success by the headline or the heaviest reward, and the advantages of groups without one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.configs import small_config
from helpers.small_runs import ROWS, config_for

from mm_grpo import GRPOTrainer
from mm_grpo.rewards.resolve import resolve_entries
from mm_grpo.rollout.collect import Rollout
from mm_grpo.rollout.pipeline import collect_step
from mm_grpo.rollout.success import Success
from mm_grpo.types import Group

REWARDS = [{"name": "format", "weight": 0.5}, "exact_match", {"name": "iou", "when": {"task": "box"}}]


def success(headline: str | None, rewards: Any = REWARDS) -> Success:
    config = small_config("m", run={"headline": headline})
    return Success.of(config, resolve_entries(rewards))


def group(advantages: tuple[float, ...] = (), turns: Any = (), **parts: Any) -> Group:
    anything: Any = SimpleNamespace()
    size = len(next(iter(parts.values())))
    given = {name: parts.get(name, [None] * size) for name in ("format", "exact_match", "iou")}
    return Group(0, anything, (anything,) * size, advantages=advantages, turn_advantages=turns, parts=given)


@pytest.mark.parametrize(
    ("headline", "parts", "share"),
    [
        ("iou >= 0.7", {"iou": [0.69, 0.7, 1.0, None], "exact_match": [1.0] * 4}, 2 / 3),
        ("iou mean", {"iou": [0.49, 0.5, 1.0, 0.0]}, 0.5),
        (None, {"format": [1.0, 1.0], "exact_match": [0.0, 1.0]}, 0.5),
        (None, {"format": [1.0, 1.0], "iou": [0.4, 0.2]}, 0.0),
        (None, {"format": [1.0, 0.0]}, 0.5),
        ("iou mean", {"format": [1.0, 0.0]}, None),
    ],
)
def test_the_first_deciding_reward_is_success(headline: str | None, parts: Any, share: float | None) -> None:
    assert success(headline).share(group(**parts)) == share


def test_advantages_are_phantom_where_no_completion_succeeds_and_others_alone_differ() -> None:
    right = group((1.5, -0.5), exact_match=[1.0, 0.0])
    wrong = group((1.0, -1.0), exact_match=[0.0, 0.0])
    near = group((3.0, -3.0), iou=[0.4, 0.1])
    unrated = group((2.0, -2.0), format=[None, None])
    found = success(None)
    assert found.phantom_share([right, wrong]) == 0.5
    assert found.phantom_share([right, wrong, near, unrated]) == 2 / 14
    assert found.phantom_share([group((0.0, 0.0), exact_match=[0.0, 0.0])]) is None
    turns = group((1.0, 0.0), ((1.0, 2.0), (-3.0,)), exact_match=[0.0, 0.0])
    assert found.phantom_share([turns, right]) == 6 / 8


def test_an_outcome_goes_before_the_headline_where_it_applies() -> None:
    rewards = [{"name": "exact_match", "outcome": 1, "when": {"task": "text"}}, "iou", "format"]
    both = group(exact_match=[0.9, 1.0, None], iou=[1.0, 0.0, 0.6], format=[1.0] * 3)
    assert success("iou >= 0.7", rewards).scores(both) == [(0.9, False), (1.0, True), (0.6, False)]
    assert success(None, rewards).scores(both)[2] == (0.6, True)


def test_a_run_that_learns_a_shape_has_phantom_advantages(models: dict[str, Path], tmp_path: Path) -> None:
    """Half of the answers to the first row are right, and none to the other five."""

    def right(completion_ids: list[int], sample: Any, completion: str) -> float:
        return float(sample.uid == "train:0" and sum(completion_ids) % 2 == 0)

    def shaped(completion_ids: list[int], completion: str) -> float:
        return float(sum(completion_ids) % 7)

    rollout = {"prompts_per_step": 6, "num_generations": 8, "max_completion_length": 2}
    config = config_for(models["qwen2_vl"], tmp_path / "r", rollout=rollout)
    for outcome in (False, True):
        rewards = [{"name": right, "outcome": outcome}, {"name": shaped, "weight": 0.1}]
        trainer = GRPOTrainer(config, train=ROWS, rewards=rewards)
        metrics = collect_step(trainer.collector, Rollout(1)).metrics
        assert (metrics["advantages/phantom_share"] > 0.5) is not outcome
        trainer.close()
