"""The base of the zoom recipe: its tokenizer and template, its lessons, and what the shipped one sees and does."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.recipe_scripts import script

from mm_grpo.environments.builtins import Zoom
from mm_grpo.processors.tool_calls import ToolCall, tool_calls

task: Any = script("zoom/patterns.py")
PATTERNS, bbox, scene = task.PATTERNS, task.bbox, task.scene
RECIPE = Path(__file__).parents[2] / "examples" / "zoom"
MAX_PIXELS = 84 * 84


@pytest.fixture(scope="module")
def processor(make_base: ModuleType) -> Any:
    return make_base.make_processor()


def test_a_call_is_nine_tokens_and_reads_as_one(make_base: ModuleType, processor: Any) -> None:
    tokenizer, zoom = processor.tokenizer, Zoom()
    for cell in range(9):
        ids = tokenizer.encode(make_base.call(cell) + "<|im_end|>")
        assert len(ids) == 9 + 1
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert tool_calls(text) == [ToolCall("zoom", {"bbox": bbox(cell)})]
        picture = make_base.render(scene(split="train", index=cell))
        zoom.reset([picture])
        assert zoom.zoom(**tool_calls(text)[0].arguments).size == (84, 84)
    for word in PATTERNS:
        assert len(tokenizer.encode(word)) == 1
    odd = "Über 图 12,334\n"
    assert tokenizer.decode(tokenizer.encode(odd)) == odd


@pytest.mark.slow
def test_the_shipped_base_sees_but_looks_and_guesses_blindly(make_base: ModuleType) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    base = RECIPE / "base"
    assert sum(file.stat().st_size for file in base.glob("*.safetensors")) <= 8_000_000
    processor = AutoProcessor.from_pretrained(base)
    assert processor.chat_template == make_base.CHAT_TEMPLATE
    model = AutoModelForImageTextToText.from_pretrained(base).eval()
    found = make_base.figures(model, processor, rows=90, max_pixels=MAX_PIXELS)
    assert found["seen in a cut"] >= 0.97 and found["seen in the whole"] >= 0.97
    assert 0.4 <= found["calls"] <= 0.6 and 0.4 <= found["answers"] <= 0.6
    assert abs(found["calls at the frame"] - 1 / 9) < 0.04
    assert abs(found["answers that are right"] - 1 / 5) < 0.04
