"""The log-prob gap guard: its limit by number format, and what it says."""

from __future__ import annotations

import math

import pytest

from mm_grpo.errors import GuardStop
from mm_grpo.health import apply_guard
from mm_grpo.health.logp_gap import SampledGap, limit_for, logp_gap, sampled_gap


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [
        ("float32", 1e-3),
        ("torch.float32", 1e-3),
        ("bfloat16", 0.1),
        ("torch.float16", 0.1),
    ],
)
def test_the_limit_of_each_number_format(dtype: str, limit: float) -> None:
    assert limit_for(dtype) == limit


def test_rounding_is_no_fault_and_a_gap_at_the_limit_passes() -> None:
    assert logp_gap(1e-6, 5e-6, 1e-3) is None
    assert logp_gap(1e-3, 4e-2, 1e-3) is None
    assert logp_gap(0.0, 0.0, 1e-3) is None


def test_the_message_names_values_causes_and_remedy() -> None:
    message = logp_gap(0.25, 1.5, 1e-3, "given completions of train:3")
    assert message is not None
    for words in (
        "log-probs of given completions of train:3",
        "by 0.25 per token on average, 1.5 at most; the limit is 0.001",
        "other weights", "another image", "another temperature", "another mask",
        "mm-grpo doctor CONFIG", "run.guards.logp_gap",
    ):  # fmt: skip
        assert words in message


def test_not_a_number_is_a_gap() -> None:
    assert "by nan per token" in str(logp_gap(math.nan, math.nan, 1e-3))


def test_the_guard_stops_warns_or_is_off(caplog: pytest.LogCaptureFixture) -> None:
    message = logp_gap(0.25, 1.5, 1e-3)
    with pytest.raises(GuardStop, match=r"guard logp_gap: the engine's log-probs .*run.guards.logp_gap=stop"):
        apply_guard("logp_gap", message, {})
    assert apply_guard("logp_gap", message, {"logp_gap": "warn"}) is True
    assert "the limit is 0.001" in caplog.text
    assert apply_guard("logp_gap", message, {"logp_gap": "off"}) is False


@pytest.mark.parametrize(
    ("gap", "moved", "stopped"),
    [
        (SampledGap(1e-3, 0.1, 1.5), 0.0, False),  # of the learner's own weights: the limit alone
        (SampledGap(1.1e-3, 0.1, 1.0), 0.0, True),
        (SampledGap(0.99, 2.0), 0.1, False),
        (SampledGap(1.01, 2.0), 0.1, True),
        (SampledGap(0.2, 2.0, 1.5, 7.9), 0.1, False),
        (SampledGap(0.2, 2.0, 1.09, 20.0), 0.1, False),
        (SampledGap(0.2, 2.0, 1.11, 8.1), 0.1, True),
        (SampledGap(0.2, 2.0, 0.89, -8.1), 0.1, True),
        (SampledGap(9.0, 9.0), math.inf, False),  # what the learner moved is not known
    ],
)
def test_stale_samples_may_be_as_far_as_the_learner_moved(
    gap: SampledGap, moved: float, stopped: bool
) -> None:
    assert (sampled_gap(gap, 1e-3, moved) is not None) == stopped
