"""The points of a run's curves: exact while they are few, lowest and highest of a bucket when they are many."""

from __future__ import annotations

import pytest

from mm_grpo.pages.curves import CURVES, MOST_BUCKETS, Curves, Trace


def place(title: str) -> int:
    return next(i for i, curve in enumerate(CURVES) if curve.title == title)


def test_few_points_are_exact() -> None:
    trace = Trace()
    for x, y in ((1, 0.5), (2, None), (3, 0.25)):
        trace.add(x, y)
    assert trace.points == [(1, 0.5), (2, None), (3, 0.25)] and trace.width == 1
    assert trace.means == [(1, 0.5), (2, None), (3, 0.25)]


@pytest.mark.parametrize("rows", [MOST_BUCKETS, MOST_BUCKETS + 1, 10_000])
def test_many_points_keep_their_spikes_and_means(rows: int) -> None:
    trace = Trace()
    values = [float(i % 10) for i in range(rows)]
    values[rows // 3], values[rows // 2] = 99.0, -99.0
    for i, y in enumerate(values):
        trace.add(i, y)
    points = trace.points
    assert len(trace.buckets) <= MOST_BUCKETS and len(points) <= 2 * MOST_BUCKETS
    assert (rows // 3, 99.0) in points and (rows // 2, -99.0) in points
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert sum(b.count for b in trace.buckets) == rows
    assert sum(b.total for b in trace.buckets) == sum(values)
    assert trace.means[-1][0] == rows - 1
    if rows == MOST_BUCKETS + 1:
        assert trace.width == 2 and trace.means[0] == (1, (values[0] + values[1]) / 2)


def test_metrics_find_their_curves() -> None:
    curves = Curves()
    for step in (1, 2):
        curves.take(
            {"step": step, "reward": step / 2, "rewards/iou/mean": 0.5, "time/rollout": 1.0, "step_time": 4.0,
             "num_tokens": 400 * step, "sampling/sampling_logp_difference/max": 0.1, "other": 3, "entropy": None,
             "completions/clipped_ratio": True}
        )  # fmt: skip
    assert curves.traces[place("Reward")]["reward"].points == [(1, 0.5), (2, 1.0)]
    assert list(curves.traces[place("Reward parts")]) == ["iou"]
    assert set(curves.traces[place("Step time by phase")]) == {"rollout", "whole step"}
    assert curves.traces[place("Tokens per second")]["tokens per second"].points == [(1, 100.0), (2, 100.0)]
    assert curves.traces[place("Log-prob gap")]["max"].points == [(1, 0.1), (2, 0.1)]
    assert curves.traces[place("Entropy")]["entropy"].points == [(1, None), (2, None)]
    assert curves.traces[place("Cut completions")]["cut completions"].points == [(1, None), (2, None)]
    assert (curves.last_step, curves.first_reward, list(curves.rewards)) == (2, 0.5, [0.5, 1.0])
    assert (curves.seconds, curves.timed) == (8.0, 2)
