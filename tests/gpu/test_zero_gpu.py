"""DeepSpeed on GPUs: it starts without a CUDA toolkit, and with NCCL reductions overlap the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "learner" / "overflows.py"


@pytest.mark.parametrize("world", [1, 2])
def test_every_stage_updates_alike(world: int, tmp_path: Path, run_python: Callable[..., None]) -> None:
    """Of several packs, after a first update without work, with an infinite gradient, or with NaN."""
    if torch.cuda.device_count() < world:
        pytest.skip("it takes two GPUs")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", world)
    run_python(*launch, SCRIPT, tmp_path, "cuda")
    for rank in range(world):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        for (kind, dtype, factor), made in found.items():
            whole = found["whole", dtype, factor]
            distance = float((made["weights"] - whole["weights"]).norm() / whole["weights"].norm())
            assert distance <= (1e-5 if dtype == "float32" else 1e-2), (kind, dtype, factor)
            assert [r["stepped"] for r in made["records"]] == [False, True, True], (kind, dtype, factor)
