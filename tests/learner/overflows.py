"""Three updates by every optimizer, with and without a first gradient that is not finite: a script of two ranks.

    overflows.py FOLDER [cuda]

Writes FOLDER/RANK.pt: by case, the records and the weights after the updates that count.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch
from helpers.steps import config_for
from torch import nn

from mm_grpo.distributed import ranks as distributed
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.learner.optimizer import BaseOptimizer, Optimizer
from mm_grpo.learner.zero import ZeroOptimizer

KINDS = {
    "whole": {"zero_stage": 0},
    "stage-1": {"zero_stage": 1},
    "stage-2": {"zero_stage": 2},
    "offloaded-1": {"zero_stage": 1, "offload_optimizer": True},
    "offloaded-2": {"zero_stage": 2, "offload_optimizer": True},
}
DTYPES = ("float32", "bfloat16")
FACTORS = (None, float("inf"), float("nan"))
PACKS = 2


def updates(kind: str, dtype: str, factor: float | None, ranks: Ranks, device: str) -> dict[str, Any]:
    """Update 1 skipped (None) or with a loss times `factor` in the last rank's first pack; then updates 2 and 3."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).to(device, getattr(torch, dtype))
    config = config_for("x", optim={"learning_rate": 1e-2, **KINDS[kind]}).optim
    made: BaseOptimizer = (Optimizer if kind == "whole" else ZeroOptimizer)(module, config, 10, ranks)
    records = [] if factor is not None else [made.skip()]
    for update in range(len(records), 3):
        for pack in range(PACKS):
            torch.manual_seed(100 * update + 10 * pack + ranks.rank)
            inputs = torch.randn(5, 8).to(device, getattr(torch, dtype))
            loss = made.forward(inputs).float().square().sum()
            spoilt = update == 0 and pack == 0 and ranks.rank == ranks.world - 1 and factor is not None
            made.backward(loss * factor if spoilt else loss, last=pack == PACKS - 1)
        records.append(made.apply(1))
    weights = torch.cat([p.detach().float().cpu().flatten() for p in module.parameters()])
    found = {"records": [r.__dict__ for r in records], "weights": weights, "adam_steps": made.adam_steps}
    if isinstance(made, ZeroOptimizer):
        made.engine.destroy()
    return found


def main(folder: str, device: str = "cpu") -> None:
    ranks = distributed.start(device, deadline=60.0)
    cases = product(KINDS, DTYPES, FACTORS)
    found = {
        (kind, dtype, str(factor)): updates(kind, dtype, factor, ranks, device)
        for kind, dtype, factor in cases
    }
    torch.save(found, Path(folder) / f"{ranks.rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
