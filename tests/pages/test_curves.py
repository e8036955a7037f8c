"""The points of a run's curves: exact while they are few, lowest and highest of a stretch when they are many."""

from __future__ import annotations

import pytest

from mm_grpo.pages.curves import CURVES, MAX_STRETCHES, Curves, thin_out


def place(title: str) -> int:
    return next(i for i, curve in enumerate(CURVES) if curve.title == title)


@pytest.mark.parametrize("rows", [MAX_STRETCHES, MAX_STRETCHES + 1, 10_000])
def test_many_points_keep_their_spikes_and_means(rows: int) -> None:
    values = [float(i % 10) for i in range(rows)]
    values[rows // 3], values[rows // 2] = 99.0, -99.0
    found = thin_out([*enumerate(values), (rows, None)] if rows > MAX_STRETCHES else [*enumerate(values)])
    points = found["points"]
    assert len(points) <= 2 * MAX_STRETCHES
    assert (rows // 3, 99.0) in points and (rows // 2, -99.0) in points
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    if rows == MAX_STRETCHES:
        assert found == {"points": [*enumerate(values)]}
        return
    assert found["width"] * len(found["means"]) >= rows and points[-1][0] <= found["means"][-1][0] == rows
    if found["width"] == 2:
        assert found["means"][0] == (1, (values[0] + values[1]) / 2)


def test_metrics_find_their_curves() -> None:
    rows = [
        {"step": step, "reward": step / 2, "rewards/iou/mean": 0.5, "time/rollout": 1.0, "step_time": 4.0,
         "num_tokens": 400 * step, "sampling/sampling_logp_difference/max": 0.1, "other": 3, "entropy": None,
         "completions/clipped_ratio": True, "eval/a/score": step}
        for step in (1, 2)
    ]  # fmt: skip
    curves = Curves(rows)
    assert curves.lines[place("Reward")]["reward"] == [(1, 0.5), (2, 1.0)]
    assert list(curves.lines[place("Reward parts")]) == ["iou"]
    assert set(curves.lines[place("Step time by phase")]) == {"rollout", "whole step"}
    assert curves.lines[place("Tokens per second")]["tokens per second"] == [(1, 100.0), (2, 100.0)]
    assert curves.lines[place("Log-prob gap")]["max"] == [(1, 0.1), (2, 0.1)]
    assert curves.lines[place("Entropy")]["entropy"] == [(1, None), (2, None)]
    assert curves.lines[place("Cut completions")]["cut completions"] == [(1, None), (2, None)]
    assert curves.numbers() == {
        "last_step": 2, "reward": 0.75, "reward_steps": 2, "first_reward": 0.5, "step_seconds": 4.0,
        "first_evaluation": {"eval/a/score": 1, "step": 1}, "last_evaluation": {"eval/a/score": 2, "step": 2},
    }  # fmt: skip
