"""Success by the headline or the heaviest reward, and the advantages of groups without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from helpers.configs import small_config

from mm_grpo.rewards.resolve import resolve_entries
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
def test_success_is_a_score_of_the_first_reward_that_decides(
    headline: str | None, parts: Any, share: float | None
) -> None:
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
