"""The parts of what is sampled ahead: gaps at equal versions."""

from __future__ import annotations

import torch

from mm_grpo.distributed.ranks import Ranks
from mm_grpo.learner.step_report import gap_metrics


def test_gaps_are_those_of_the_oldest_version_of_a_completion() -> None:
    engine = [(-1.0, -2.0), (-1.0,), (-3.0, -3.0), (-9.0,)]
    learned = {0: torch.tensor([-1.0, -2.5]), 1: torch.tensor([-4.0]), 2: torch.tensor([-3.0, -3.25])}
    learned[3] = torch.tensor([-1.0])
    metrics, found = gap_metrics(engine, learned, [(2,), (1,), (2,), (1, 2)], Ranks())
    assert metrics["sampling/sampling_logp_difference/mean"] == (3.0 + 8.0 + 0.5 + 0.25) / 6
    assert (found[1].mean, found[1].max) == ((3.0 + 8.0) / 2, 8.0)
    assert (found[2].mean, found[2].max) == ((0.5 + 0.25) / 4, 0.5)
