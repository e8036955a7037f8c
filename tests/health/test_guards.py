"""Guards of one moment: duplicates, updates that do not happen, log-prob gaps, images that nobody reads."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mm_grpo.errors import GuardStop
from mm_grpo.health import apply_guard
from mm_grpo.health.checks import (
    LogprobGap,
    copies_chance,
    duplicate_completions,
    finite_loss,
    is_due,
    limit_for,
    logp_gap,
    sampled_gap,
    unique_ratio,
    unread_images,
    update_happens,
    with_other_pixels,
)
from mm_grpo.types import Completion, EnginePrompt, Group, Prompt, Sample, UpdateRecord


def prompt(**vision: Tensor) -> Prompt:
    return Prompt(Sample("train:3", []), (1,), EnginePrompt((1,), ()), torch.zeros(3, 1), vision)


def completion(tokens: tuple[int, ...], logp: float, seed: int) -> Completion:
    return Completion(tokens, (logp / len(tokens),) * len(tokens), f"text {tokens}", "stop", seed)


def group(*completions: Completion) -> Group:
    n = len(completions)
    return Group(0, prompt(), completions, (0.0,) * n, (0.0,) * n)


def test_chance_of_copies_by_hand() -> None:
    half = completion((5,), math.log(0.5), 0)
    assert copies_chance(half, 1, 4) == pytest.approx(1.0)
    assert copies_chance(half, 4, 4) == pytest.approx(1 / 8)
    assert copies_chance(half, 3, 4) == pytest.approx(1 / 8 + 3 / 8)


def test_a_sure_policy_may_repeat_itself_and_an_unsure_one_may_not() -> None:
    sure = group(*(completion((5, 6), math.log(0.9), s) for s in range(8)))
    assert duplicate_completions([sure]) is None and unique_ratio([sure]) == 1 / 8
    different = group(*(completion((7, 8, k), -6.0, k) for k in range(8)))
    assert duplicate_completions([different]) is None and unique_ratio([different]) == 1.0
    copies = group(*(completion((7, 8, 9), -6.0, 1) for _ in range(8)))
    assert duplicate_completions([different, copies]) is not None
    # three completions twice each, as a shared generator gives
    shared = [completion(tuple(range(k, k + 30)), -40.0, seed) for k in range(3) for seed in (k, k + 3)]
    message = duplicate_completions([group(*shared)])
    assert message is not None and "train:3: 2 of 6" in message and "[0, 3]" in message


HEALTHY = UpdateRecord(1e-4, 0.5, 1e-3, live_tokens=10, trainable_parameters=100)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"trainable_parameters": 0, "grad_norm": 0.0, "update_norm": 0.0}, "model.freeze_vision"),
        ({"grad_norm": math.inf, "update_norm": 0.0, "stepped": False}, "overflow"),
        ({"grad_norm": 0.0, "update_norm": 0.0}, "detached"),
        ({"grad_norm": 0.0, "update_norm": 0.0, "live_tokens": 1}, "although 1 tokens"),
        ({"update_norm": 0.0}, "holds other tensors"),
        ({"update_norm": math.inf}, "by inf at learning rate 0.0001"),
        ({"update_norm": 0.0, "grad_norm": 0.0, "boundaries": 0}, "0 backward passes"),
        ({"boundaries": 4}, "4 backward passes"),
        ({}, None),
        ({"learning_rate": 0.0, "update_norm": 0.0}, None),  # warm-up
        ({"grad_norm": 0.0, "update_norm": 0.0, "live_tokens": 0}, None),  # all clipped
        ({"grad_norm": 0.0, "update_norm": 0.0, "live_tokens": 0, "stepped": False}, None),  # no spread
    ],
)
def test_an_update_that_does_not_happen_is_named(change: dict[str, float], names: str | None) -> None:
    message = update_happens(replace(HEALTHY, **change))  # type: ignore[arg-type]
    assert message is None if names is None else message is not None and names in message


def test_a_loss_is_a_number() -> None:
    assert finite_loss(-1.0) is None
    assert finite_loss(math.nan) is not None and finite_loss(math.inf) is not None


def test_the_limit_of_each_number_format() -> None:
    names = ("float32", "torch.float32", "bfloat16", "torch.float16")
    assert [limit_for(name) for name in names] == [1e-3, 1e-3, 0.1, 0.1]


def test_a_gap_past_the_limit_is_named_with_its_values() -> None:
    assert logp_gap(LogprobGap(1e-3, 4e-2, 8), 1e-3) is None
    message = str(logp_gap(LogprobGap(0.25, 1.5, 8), 1e-3, "given completions of train:3"))
    for value in ("given completions of train:3", "0.25", "1.5", "0.001", "run.guards.logp_gap"):
        assert value in message
    assert "nan" in str(logp_gap(LogprobGap(math.nan, math.nan, 8), 1e-3))


@pytest.mark.parametrize(
    ("gap", "moved", "stopped"),
    [
        (LogprobGap(1e-3, 0.1, 8), 0.0, False),  # of the learner's own weights: the limit alone
        (LogprobGap(1.1e-3, 0.1, 8), 0.0, True),
        (LogprobGap(0.99, 2.0, 8), 0.1, False),
        (LogprobGap(1.01, 2.0, 8), 0.1, True),
        (LogprobGap(9.0, 9.0, 8), math.inf, False),  # what the learner moved is not known
    ],
)
def test_stale_samples_may_be_as_far_as_the_learner(gap: LogprobGap, moved: float, stopped: bool) -> None:
    assert (sampled_gap(gap, 1e-3, moved) is not None) == stopped


def test_other_pixels_have_the_shape_of_the_first_and_leave_grids_alone() -> None:
    grid = torch.tensor([[1, 2, 2]])
    given = prompt(pixel_values=torch.tensor([[0.5, -0.5]]), image_grid_thw=grid)
    other = with_other_pixels(given)
    assert other is not None and other.uid == "train:3" and other.token_ids == (1,)
    assert other.vision["pixel_values"].tolist() == [[0.0, 0.0]]
    assert torch.equal(other.vision["image_grid_thw"], grid)
    assert given.vision["pixel_values"].tolist() == [[0.5, -0.5]]
    black = with_other_pixels(prompt(pixel_values=torch.zeros(1, 2)))
    assert black is not None and black.vision["pixel_values"].tolist() == [[1.0, 1.0]]
    assert with_other_pixels(prompt(image_grid_thw=grid)) is None


def test_images_are_unread_where_nothing_changes_at_all() -> None:
    assert "train:3" in str(unread_images(0.0, "train:3"))
    assert unread_images(1e-9, "train:3") is None
    assert unread_images(float("nan"), "train:3") is None  # the log-prob gap says that
    assert [step for step in range(1, 151) if is_due(step)] == [1, 50, 100, 150]


def test_actions(caplog: pytest.LogCaptureFixture) -> None:
    assert apply_guard("update_happens", None, {}) is False
    with pytest.raises(GuardStop, match=r"guard update_happens: broken \(run.guards.update_happens=stop\)"):
        apply_guard("update_happens", "broken", {})
    assert apply_guard("update_happens", "broken", {"update_happens": "off"}) is False
    with caplog.at_level(logging.WARNING, logger="mm_grpo"):
        assert apply_guard("update_happens", "broken", {"update_happens": "warn"}) is True
    assert "broken" in caplog.text
