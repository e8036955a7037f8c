"""The base of the zoom recipe: its tokenizer and template, its lessons, and what the shipped one sees and does."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.recipe_scripts import script

from mm_grpo.config import GRPOConfig
from mm_grpo.environments.builtins import Zoom
from mm_grpo.environments.toolbox import toolbox_of
from mm_grpo.processors.base import load_processor
from mm_grpo.processors.tool_calls import ToolCall, knows_tools, tool_calls
from mm_grpo.types import Sample

task: Any = script("zoom/patterns.py")
PATTERNS, QUESTION, bbox, place, scene = task.PATTERNS, task.QUESTION, task.bbox, task.place, task.scene
RECIPE = Path(__file__).parents[2] / "examples" / "zoom"
TINY = ["--hidden", "64", "--layers", "1", "--vision-hidden", "32", "--vision-layers", "1"]
QUICK = ["--steps", "2", "--box-steps", "1", "--batch", "4", "--check-rows", "9"]
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


def test_a_lesson_of_two_turns_is_the_conversation_that_a_run_makes(
    make_base: ModuleType, processor: Any, tmp_path: Path
) -> None:
    """The ids of a lesson are those of a prompt with its tools, a call, its observation and an answer."""
    make_base.make_model(processor.tokenizer, 0, make_base.SIZE).config.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    loaded: Any = load_processor(str(tmp_path), max_pixels=MAX_PIXELS)
    assert knows_tools(loaded.template)
    shown = scene(split="train", index=3)
    messages, tool, images = make_base.looked(shown, 7, MAX_PIXELS)
    assert tool and [image.size for image in images] == [(84, 84)] * 2
    config = GRPOConfig.from_yaml(RECIPE / "config.yaml")
    assert config.data.max_pixels == MAX_PIXELS == make_base.MAX_PIXELS
    toolbox = toolbox_of(config, None, None)
    assert toolbox is not None
    sample = toolbox.prepare(Sample("a", messages[:1], (make_base.render(shown),), columns={}))
    prompt = loaded.prompt(sample)
    cut = toolbox.episode(sample).call("zoom", {"bbox": bbox(7)}).images[0]
    toolbox.close()
    assert cut.tobytes() == images[1].tobytes()
    assert prompt.engine_prompt.images[0].tobytes() == images[0].tobytes()
    encode = loaded.tokenizer.encode
    for said, pictures in (
        (encode(make_base.call(7) + "<|im_end|>"), ()),
        (loaded.observation([[cut]], row="a"), [loaded.picture(cut, row="a")]),
        (encode(shown.cells[7].pattern + "<|im_end|>"), ()),
    ):
        prompt = loaded.extended(prompt, said, pictures)
    ids = prompt.token_ids
    batch = make_base.encode(processor, [(messages, tool, images)])
    assert batch["input_ids"][0].tolist() == [*ids, *encode("\n")]
    learned = batch["labels"][0]
    said = processor.tokenizer.decode(learned[learned >= 0])
    assert said == f"{make_base.call(7)}<|im_end|>{shown.cells[7].pattern}<|im_end|>"


def test_the_prompt_shows_the_tool_only_where_there_is_one(make_base: ModuleType, processor: Any) -> None:
    texts = [
        processor.apply_chat_template([make_base.asked()], tools=tools, add_generation_prompt=True)
        for tools in (None, [make_base.get_json_schema(Zoom().zoom)])
    ]
    asked = f"<|vision_start|><|image_pad|><|vision_end|>{QUESTION}"
    user = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    assert texts == [user, f"<|im_start|>system\nTools: zoom(bbox, image)<|im_end|>\n{user}"]


@pytest.mark.parametrize("boxes", [False, True])
def test_lessons_look_and_guess_blindly(
    boxes: bool, make_base: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls are at the framed cell, and answers right, as often as chance has it; what a cut shows is always right."""
    monkeypatch.setattr(make_base, "render", lambda scene: None)
    monkeypatch.setattr(make_base, "small", lambda image, max_pixels: None)
    monkeypatch.setattr(Zoom, "zoom", lambda self, bbox: None)
    monkeypatch.setattr(Zoom, "reset", lambda self, images: None)
    counts: Counter[str] = Counter()
    for index in range(4000):
        shown = scene(split="train", index=index)
        messages, tool, _ = make_base.lesson(index, 0, MAX_PIXELS, boxes=boxes)
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        asked = messages[0]["content"][1]["text"]
        if asked != QUESTION:
            assert asked == (make_base.WHERE if boxes else make_base.WHICH) and not tool
            box = ", ".join(map(str, bbox(shown.framed)))
            assert said == [box if boxes else place(shown.framed)]
        elif len(said) == 2:
            (cell,) = (n for n in range(9) if make_base.call(n) == said[0])
            assert tool and said[1] == shown.cells[cell].pattern
            counts["look"] += 1
            counts["framed"] += cell == shown.framed
        else:
            assert said[0] in PATTERNS
            counts["guess with" if tool else "guess without"] += 1
            counts["right"] += said[0] == shown.answer
    assert abs(counts["look"] - counts["guess with"]) < 4 * (2 * 0.35 * 4000) ** 0.5
    guesses = counts["guess with"] + counts["guess without"]
    for hits, of, chance in (
        (counts["framed"], counts["look"], 1 / 9),
        (counts["right"], guesses, 1 / 5),
    ):
        assert abs(hits / of - chance) < 4 * (chance * (1 - chance) / of) ** 0.5


@pytest.mark.slow
def test_a_tiny_run_saves_a_folder_that_loads(
    make_base: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    weights = []
    for out in (tmp_path / "a", tmp_path / "b"):
        make_base.main(["--out", str(out), *QUICK, *TINY])
        weights.append(AutoModelForImageTextToText.from_pretrained(out).state_dict())
    assert AutoProcessor.from_pretrained(tmp_path / "a").chat_template == make_base.CHAT_TEMPLATE
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    printed = capsys.readouterr().out
    assert "seen in a cut: 0." in printed and "calls at the frame: 0." in printed


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
