"""Limits of images and arguments of the chat template by row and by source."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import tiny
from reading import config, read, refusal

from mm_grpo.data import Mixture
from mm_grpo.data.sources import load_train, shared_rows
from mm_grpo.errors import DataError
from mm_grpo.messages import pixel_limits


def row(part: Any = (), **columns: Any) -> dict[str, Any]:
    content = [{"type": "image", **dict(part)}, {"type": "text", "text": "how many"}]
    return {"prompt": [{"role": "user", "content": content}], "image": tiny.picture(1), **columns}


def limits_of(rows: Any) -> list[dict[str, int]]:
    return pixel_limits(rows.sample(0).messages)


@pytest.mark.parametrize(
    ("part", "kwargs", "source", "expected"),
    [
        ({}, None, {}, {}),
        ({"max_pixels": 9, "min_pixels": None}, None, {}, {"max_pixels": 9}),
        ({"max_pixels": 9.0}, None, {}, {"max_pixels": 9}),  # as pandas makes whole numbers beside null
        ({"resized_height": 4, "resized_width": 8}, None, {}, {"resized_height": 4, "resized_width": 8}),
        ({}, None, {"max_pixels": 50}, {"max_pixels": 50}),
        ({"max_pixels": 90}, None, {"max_pixels": 50}, {"max_pixels": 50}),
        ({"max_pixels": 20}, None, {"max_pixels": 50}, {"max_pixels": 20}),
        ({"min_pixels": 90}, None, {"max_pixels": 50}, {"min_pixels": 50, "max_pixels": 50}),
        ({"max_pixels": 3}, None, {"min_pixels": 5}, {"min_pixels": 5, "max_pixels": 5}),
        ({}, {"max_pixels": 70}, {"max_pixels": 50}, {"max_pixels": 50}),
        ({"max_pixels": 80}, {"max_pixels": 30}, {"max_pixels": 50}, {"max_pixels": 30}),
    ],
)
def test_the_narrowest_limits_hold(part: Any, kwargs: Any, source: Any, expected: Any) -> None:
    rows = load_train(config(), Mixture([{"path": [row(part, chat_template_kwargs=kwargs)], **source}]))
    assert limits_of(rows) == [expected]


def test_images_at_tags_and_in_front_have_the_limits_of_their_source() -> None:
    images = [tiny.picture(n) for n in range(2)]
    for prompt in ("<image> or <image>?", "which?"):
        source = {"path": [{"prompt": prompt, "images": images}], "max_pixels": 50}
        rows = load_train(config(), Mixture([source]))
        assert limits_of(rows) == [{"max_pixels": 50}] * 2


@pytest.mark.parametrize(
    "part",
    [
        {"max_pixels": "9"}, {"max_pixels": 0}, {"min_pixels": 1.5}, {"max_pixels": True}, {"max_pixels": float("nan")},
        {"min_pixels": 9, "max_pixels": 8}, {"resized_height": 9},
    ],
)  # fmt: skip
def test_wrong_limits_name_row_and_part(part: Any) -> None:
    message = refusal([row(), row(part)])
    assert message.startswith("train row 1: prompt[0].content[0]: ") and str(next(iter(part))) in message
    assert refusal([row(chat_template_kwargs=part)]).startswith("train row 0: chat_template_kwargs")


@pytest.mark.parametrize(
    ("data", "entry", "works"),
    [
        ({}, {"max_pixels": 9}, True),
        ({"min_pixels": 5, "max_pixels": 9}, {"min_pixels": 5, "max_pixels": 9}, True),
        ({"max_pixels": 8}, {"max_pixels": 9}, False),
        ({"max_pixels": 8}, {"min_pixels": 9}, False),
        ({"min_pixels": 5}, {"max_pixels": 4}, False),
        ({"min_pixels": 5}, {"min_pixels": 4}, False),
        ({}, {"min_pixels": 5, "max_pixels": 4}, False),
    ],
)
def test_limits_of_a_source_lie_in_the_runs(data: Any, entry: Any, works: bool) -> None:
    mixture = Mixture([{"path": [row()], **entry}])
    if works:
        assert limits_of(load_train(config(**data), mixture)) == [entry]
    else:
        with pytest.raises(DataError, match=r"^train/source-1: .*data\.max_pixels"):
            load_train(config(**data), mixture)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, {}),
        ({}, {}),
        ({"enable_thinking": False, "style": None}, {"enable_thinking": False}),
        ('{"enable_thinking": true}', {"enable_thinking": True}),
        ({"max_pixels": 9, "n": 0}, {"n": 0}),
    ],
)
def test_template_arguments_of_a_row(value: Any, expected: Any) -> None:
    sample = read([row(chat_template_kwargs=value)]).sample(0)
    assert sample.chat_template_kwargs == expected
    assert sample.columns["chat_template_kwargs"] == value  # rewards get what the dataset holds


@pytest.mark.parametrize("value", ["enable_thinking", "[1]", 3, ["a"], {"f": print}])
def test_what_is_no_mapping_is_refused(value: Any) -> None:
    message = refusal([row(), row(chat_template_kwargs=value)])
    assert message.startswith("train row 1: chat_template_kwargs is ")


def test_settings_count_in_the_fingerprint_but_not_when_rows_are_compared() -> None:
    data = "data:image/png;base64,iVBORw0KGgo="
    changes: tuple[Any, ...] = ((), {"max_pixels": 9}, {"max_pixels": 8})
    rows = [read([row(part) | {"image": data}]) for part in changes]
    kwargs = read([row(chat_template_kwargs={"a": 1}) | {"image": data}])
    limited = load_train(config(), Mixture([{"path": [row() | {"image": data}], "max_pixels": 9}])).sources[0]
    assert len({r.fingerprint()["digests"] for r in (*rows, kwargs, limited)}) == 4
    assert shared_rows(rows[0].row_keys(), {"eval": [*rows[1].row_keys()]})


def test_other_images_get_the_limits_of_their_place() -> None:
    rows = [row({"max_pixels": n}) | {"image": tiny.picture(n)} for n in (8, 9)]
    shuffled = read(rows).control("shuffled")
    limits = [pixel_limits(shuffled.sample(i).messages) for i in range(2)]
    assert limits == [[{"max_pixels": 8}], [{"max_pixels": 9}]]
    assert pixel_limits(read(rows).control("removed").sample(0).messages) == []
