"""What the benchmarks reckon with: clocks, work, lines, gaps, tables and the chart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Script = Callable[[str], Any]
FOLDER = Path(__file__).parents[2] / "benchmarks"


def machine(common: Any) -> Any:
    return common.Machine(torch.device("cpu"), torch.float32)


def test_the_work_of_a_pack_by_hand(script: Script) -> None:
    common = script("common")
    model = common.make_model(common.load_shapes_processor(), "tiny", machine(common))
    # a layer: q and o 64 x 64, k and v 32 x 64, three of 64 x 128 make 36,864 weights; two layers
    dense = 2 * 2 * 36_864 * (10 + 2 * 3)
    pairs = 10 * 10 / 2 + 2 * 3 * (10 + 3 / 2)
    attention = 4 * 2 * pairs * 64
    head = 2 * (2 * 3) * 64 * 512
    assert common.flops(model, 10, 2, 3, []) == 3 * (dense + attention + head) == 8_440_320
    # 16 patches: two blocks of qkv 3 x 64 x 64, proj 64 x 64, three of 64 x 128; merger 256 x 256 and 64 x 256
    tower = 2 * 2 * (4 * 64 * 64 + 3 * 64 * 128) * 16 + 4 * (16**2 + 16 * 16) * 64
    merger = 2 * (256 * 256 + 64 * 256) * 16 / 4
    assert common.flops(model, 10, 2, 3, [16]) - 8_440_320 == 3 * (tower + merger)


def test_the_readme_holds_the_results(script: Script) -> None:
    readme = script("readme")
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    results = sorted(file.stem for file in readme.RESULTS.glob("*.json"))
    assert results == sorted(readme.TABLES)
    assert "not measured" not in page.split("## On a GPU")[0]
    assert readme.updated(page, readme.RESULTS) == page, "run benchmarks/readme.py"
    text = readme.FRONT.read_text(encoding="utf-8")
    assert readme.front(text, readme.RESULTS) == text and "| 5.7 to 8.5 |" in text
