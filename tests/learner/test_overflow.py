"""A gradient that is not finite changes no weight, and nothing of it is left in the updates that follow."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import processes

SCRIPT = Path(__file__).with_name("overflows.py")
KINDS = ("whole", "stage-1", "stage-2", "offloaded-1", "offloaded-2")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What both ranks of overflows.py found, in one launch for all cases."""
    folder = tmp_path_factory.mktemp("overflows")
    codes = processes.launch(SCRIPT, 2, (folder,), folder / "output")
    assert codes == [0, 0], processes.outputs(folder / "output", 2)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("factor", ["inf", "nan"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_leaves_later_updates_alone(kind: str, dtype: str, factor: str, found: list[Any]) -> None:
    """Against a run whose first update had no work: Adam's bias correction counts two updates in both."""
    for cases in found:
        spoilt, clean = cases[kind, dtype, factor], cases[kind, dtype, "None"]
        first, *others = spoilt["records"]
        assert not first["stepped"] and not math.isfinite(first["grad_norm"]) and first["update_norm"] == 0.0
        assert others == clean["records"][1:] and all(r["stepped"] for r in others)
        assert others[0]["update_norm"] > 0.01
        assert torch.equal(spoilt["weights"], clean["weights"])
        assert spoilt["adam_steps"] == clean["adam_steps"] == 2
