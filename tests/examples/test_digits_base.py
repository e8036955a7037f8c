"""The base of the digits recipe: what the shipped one sees, and the reward of sums."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import ModuleType

import pytest

RECIPE = Path(__file__).parents[2] / "examples" / "digits"


def test_the_shipped_base_reads_but_cannot_add(make_base: ModuleType) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn (extra digits) is not installed")
    from transformers import AutoModelForImageTextToText, AutoProcessor

    base = RECIPE / "base"
    assert sum(file.stat().st_size for file in base.glob("*.safetensors")) <= 8_000_000
    make_base.digits.cache_clear()
    model = AutoModelForImageTextToText.from_pretrained(base).eval()
    found = make_base.figures(model, AutoProcessor.from_pretrained(base), rows=19)
    assert found["pairs read"] >= 0.9 and found["in form"] >= 0.98 and found["spread"] >= 0.98
    assert abs(found["right"] - 1 / 19) < 0.02


def test_a_sum_that_is_nearly_right_is_worth_something() -> None:
    near = runpy.run_path(str(RECIPE / "near.py"))["near"]
    assert [near(f"1+2={n}", "3") for n in (3, 4, 2, 5, 6, 7)] == [1.0, 0.4, 0.4, 0.15, 0.15, 0.0]
    assert near("three", "3") == 0.0 and near("9" * 5000, 3) == 0.0
