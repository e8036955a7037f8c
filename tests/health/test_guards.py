"""Guards speak when they should, stay silent when they should, and say why."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from mm_grpo.errors import GuardStop
from mm_grpo.health import apply_guard
from mm_grpo.health.duplicate_completions import copies_chance, duplicate_completions, unique_ratio
from mm_grpo.health.update_happens import update_happens
from mm_grpo.types import Completion, EnginePrompt, Group, Prompt, Sample, UpdateRecord


def completion(tokens: tuple[int, ...], logp: float, seed: int) -> Completion:
    return Completion(tokens, (logp / len(tokens),) * len(tokens), f"text {tokens}", "stop", seed)


def group(*completions: Completion) -> Group:
    prompt = Prompt(Sample("train:3", []), (1,), EnginePrompt((1,), ()), torch.zeros(3, 1), {})
    n = len(completions)
    return Group(0, prompt, completions, (0.0,) * n, (0.0,) * n)


def test_chance_of_copies_by_hand() -> None:
    half = completion((5,), math.log(0.5), 0)
    assert copies_chance(half, 1, 4) == pytest.approx(1.0)
    assert copies_chance(half, 4, 4) == pytest.approx(1 / 8)
    assert copies_chance(half, 3, 4) == pytest.approx(1 / 8 + 3 / 8)


def test_a_sure_policy_may_repeat_itself() -> None:
    sure = [completion((5, 6), math.log(0.9), s) for s in range(8)]
    assert duplicate_completions([group(*sure)]) is None
    assert unique_ratio([group(*sure)]) == 1 / 8


def test_long_improbable_copies_are_a_fault_with_row_and_seeds() -> None:
    # three completions twice each: what a shared generator gives
    batch = [completion(tuple(range(k, k + 30)), -40.0, seed) for k in range(3) for seed in (k, k + 3)]
    message = duplicate_completions([group(*batch)])
    assert message is not None
    assert "train:3: 2 of 6 completions" in message and "Seeds of the copies: [0, 3]" in message
    assert "generator" in message


def test_one_constant_seed_is_a_fault_and_distinct_ones_are_not() -> None:
    same = [completion((7, 8, 9), -6.0, 1) for _ in range(8)]
    assert duplicate_completions([group(*same)]) is not None
    different = [completion((7, 8, k), -6.0, k) for k in range(8)]
    assert duplicate_completions([group(*different)]) is None
    assert unique_ratio([group(*different)]) == 1.0


HEALTHY = UpdateRecord(1e-4, 0.5, 1e-3, live_tokens=10, trainable_parameters=100)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"trainable_parameters": 0, "grad_norm": 0.0, "update_norm": 0.0}, "no trainable parameter"),
        ({"grad_norm": math.inf, "update_norm": 0.0, "stepped": False}, "overflow"),
        ({"grad_norm": 0.0, "update_norm": 0.0}, "detached"),
        ({"grad_norm": 0.0, "update_norm": 0.0, "live_tokens": 1}, "although 1 tokens"),
        ({"grad_norm": 0.0, "update_norm": 0.0}, "gives every token probability 1"),
        ({"update_norm": 0.0}, "holds other tensors"),
        ({"update_norm": math.inf}, "moved the weights by inf at learning rate 0.0001"),
        (
            {"update_norm": 0.0, "grad_norm": 0.0, "boundaries": 0},
            "0 backward passes of this update were marked",
        ),
        ({"boundaries": 4}, "only the packs after the last but one count"),
    ],
)
def test_an_update_that_does_not_happen_is_reported_with_its_cause(
    change: dict[str, float], words: str
) -> None:
    message = update_happens(UpdateRecord(**{**HEALTHY.__dict__, **change}))
    assert message is not None and words in message


@pytest.mark.parametrize(
    "record",
    [
        HEALTHY,
        UpdateRecord(0.0, 0.5, 0.0, live_tokens=10, trainable_parameters=100),  # warm-up
        UpdateRecord(1e-4, 0.0, 0.0, live_tokens=0, trainable_parameters=100),  # all clipped
        UpdateRecord(1e-4, 0.0, 0.0, live_tokens=0, trainable_parameters=100, stepped=False),  # no spread
    ],
)
def test_healthy_zeros_pass(record: UpdateRecord) -> None:
    assert update_happens(record) is None


def test_actions(caplog: pytest.LogCaptureFixture) -> None:
    assert apply_guard("update_happens", None, {}) is False
    with pytest.raises(GuardStop, match=r"guard update_happens: broken \(run.guards.update_happens=stop\)"):
        apply_guard("update_happens", "broken", {})
    assert apply_guard("update_happens", "broken", {"update_happens": "off"}) is False
    with caplog.at_level(logging.WARNING, logger="mm_grpo"):
        assert apply_guard("update_happens", "broken", {"update_happens": "warn"}) is True
    assert "broken" in caplog.text
