"""Prompts made of columns, and training rows in an evaluation set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from reading import config, png, read, refusal, write_rows

from mm_grpo.data.rows import IMAGE_TAG
from mm_grpo.data.sources import load_eval, load_train, warn_of_shared_rows
from mm_grpo.errors import ConfigError

ROWS = [{"category": "dog", "image": png(), "meta": {"n": 2, "of": ["a", "b"]}, "prompt": "Be brief."}]


def text_of(rows: Any, **data: Any) -> Any:
    (message,) = read(rows, **data).fields(0).messages
    return [part.get("text", IMAGE_TAG) for part in message["content"]]


def test_a_prompt_is_made_of_columns() -> None:
    assert text_of(ROWS, prompt_template="Where is the {category}?") == [IMAGE_TAG, "Where is the dog?"]
    nested = "{{{meta.n}}} <image> of {meta.of}, {meta.of.1}? {prompt}"
    assert text_of(ROWS, prompt_template=nested) == ["{2} ", IMAGE_TAG, ' of ["a", "b"], b? Be brief.']
    renamed = {"columns": {"prompt": "category"}, "prompt_template": "Where is the {prompt}?"}
    assert text_of(ROWS, **renamed) == [IMAGE_TAG, "Where is the dog?"]
    made = read(ROWS, prompt_template="Where is the {category}?")
    assert made.fields(0).other_columns == {"category": "dog", "meta": ROWS[0]["meta"]}
    entry = [{"path": ROWS, "prompt_template": "a {category}"}]
    assert "a dog" in str(load_train(config(), entry[0]).fields(0).messages)


@pytest.mark.parametrize("template", ["plain", "{", "{}", "{n:d}", "{n!r}"])
def test_what_is_no_template_is_refused(template: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.prompt_template"):
        config(prompt_template=template)


def test_a_column_that_is_not_there_is_named() -> None:
    message = refusal(ROWS, prompt_template="Where is the {categry}?")
    assert "'categry'" in message and "'category'" in message and "data.prompt_template" in message
    missing = [*ROWS, {"image": png(), "category": None}]
    assert refusal(missing, prompt_template="{category}").startswith("train row 1: data.prompt_template ")


def test_shared_rows_of_train_and_eval_warn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "b.png").write_bytes(png("blue"))
    rows = [{"prompt": p, "image": f"{name}.png", "answer": p} for p in ("?", "!") for name in ("a", "b")]
    parts = {"train": rows[:3], "clean": rows[3:], "mixed": rows[2:]}
    train, clean, mixed = (str(write_rows(tmp_path / f"{name}.jsonl", *part)) for name, part in parts.items())
    settings = config(train, eval={"clean": clean, "leaky": mixed})
    warn_of_shared_rows(load_train(settings), load_eval(settings))
    (warning,) = caplog.messages
    assert warning.startswith("leaky: 1 of 2 rows")
    assert "mixed.jsonl:1" in warning and "train.jsonl:3" in warning
