"""Optimizers of two processes on two GPUs: NCCL, reductions that overlap the backward pass, several packs an update."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import processes

SCRIPT = Path(__file__).parents[1] / "learner" / "overflows.py"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it takes two GPUs")
def test_sharded_updates_are_those_of_a_whole_state(tmp_path: Path) -> None:
    """After a first update without work, with a gradient that is infinite, and with one that is no number."""
    codes = processes.launch(SCRIPT, 2, (tmp_path, "cuda"), tmp_path / "output")
    assert codes == [0, 0], processes.outputs(tmp_path / "output", 2)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        for (kind, dtype, factor), made in found.items():
            whole = found["whole", dtype, factor]
            distance = float((made["weights"] - whole["weights"]).norm() / whole["weights"].norm())
            assert distance <= (1e-5 if dtype == "float32" else 1e-2), (kind, dtype, factor)
            assert [r["stepped"] for r in made["records"]] == [False, True, True], (kind, dtype, factor)
