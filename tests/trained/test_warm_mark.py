"""The mark of a warm start: written, read back, and the settings in which a run differs from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.configs import small_config

from mm_grpo.errors import ConfigError
from mm_grpo.trained.warm_mark import MARK, changes_of_form, read_mark, write_mark

TAUGHT: dict[str, Any] = {
    "gold_template": "<answer>{gold}</answer>",
    "system_prompt": "Be brief.",
    "chat_template_kwargs": {"enable_thinking": False},
    "max_pixels": 5000,
}


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({}, []),
        ({"shuffle": False, "max_prompt_length": 99}, []),
        ({"system_prompt": None}, ["data.system_prompt"]),
        (
            {"chat_template_kwargs": {}, "min_pixels": 9, "max_pixels": 6000},
            ["data.min_pixels", "data.max_pixels", "data.chat_template_kwargs"],
        ),
    ],
)
def test_a_mark_is_read_back_and_other_forms_are_named(
    changes: dict[str, Any], fields: list[str], tmp_path: Path
) -> None:
    write_mark(tmp_path, small_config("m", data=TAUGHT), base="b", answer="label", steps=40, nll=0.25)
    mark = read_mark(tmp_path)
    assert mark == {
        "base": "b", "answer": "label", "data.min_pixels": None, "steps": 40, "nll": 0.25,
        **{f"data.{name}": value for name, value in TAUGHT.items()},
    }  # fmt: skip
    sentences = changes_of_form(small_config("m", data={**TAUGHT, **changes}), mark)
    assert len(sentences) == len(fields)
    assert all(field in sentence for field, sentence in zip(fields, sentences, strict=True))


def test_models_without_a_mark_and_broken_ones(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file", tmp_path / "none", "owner/name"):
        assert read_mark(path) is None
    assert changes_of_form(small_config("m"), None) == []
    for text in ("[]", '{"base"', "[" * 10**5):
        (tmp_path / MARK).write_text(text)
        with pytest.raises(ConfigError, match=MARK) as error:
            read_mark(tmp_path)
        assert "\n" not in str(error.value)
    (tmp_path / MARK).write_text(json.dumps({"data.max_pixels": 7}))
    assert len(changes_of_form(small_config("m"), read_mark(tmp_path))) == 1
