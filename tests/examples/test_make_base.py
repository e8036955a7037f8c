"""The base of the shapes demo: its tokenizer, and a tiny run of the script."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from mm_grpo.data.shapes import COLOURS, NUMBERS, SHAPES, SIDES

RECIPE = Path(__file__).parents[2] / "examples" / "shapes"
TINY = ["--hidden", "64", "--layers", "1", "--vision-hidden", "32", "--vision-layers", "1"]


def test_every_answer_is_one_token_at_the_start_and_inside_a_sentence(make_base: ModuleType) -> None:
    tokenizer = make_base.make_processor().tokenizer
    for word in (*COLOURS, *SHAPES, *NUMBERS, *SIDES):
        assert len(tokenizer.encode(word)) == 1
        assert len(tokenizer.encode(" " + word)) == 1
    special = make_base.small_bases.SPECIAL
    assert sorted(tokenizer.convert_tokens_to_ids(token) for token in special) == list(range(8))
    assert tokenizer.eos_token == "<|im_end|>"
    odd = "\u00dcber \u56fe 12\n"
    assert tokenizer.decode(tokenizer.encode(odd)) == odd  # bytes: nothing is unknown


def test_a_tiny_run_saves_a_folder_that_loads(
    make_base: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    out = tmp_path / "a"
    make_base.main(["--out", str(out), "--steps", "2", "--batch", "4", "--check-rows", "6", *TINY])
    processor = AutoProcessor.from_pretrained(out)
    model = AutoModelForImageTextToText.from_pretrained(out)
    assert type(processor).__name__ == "Qwen2_5_VLProcessor"
    assert processor.chat_template == make_base.small_bases.CHAT_TEMPLATE
    assert model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == processor.tokenizer.eos_token_id
    printed = capsys.readouterr().out
    assert re.search(r"eyes: \d\.\d{3} of held-out objects", printed)
    assert re.search(r"position: in form \d\.\d{3}  spread \d\.\d{3}  right \d\.\d{3}", printed)
    base = RECIPE / "base"
    assert {file.name for file in base.iterdir()} >= {file.name for file in out.iterdir()}
    assert sum(file.stat().st_size for file in base.glob("*.safetensors")) <= 8_000_000
