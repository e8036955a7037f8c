"""Rows: where images end up in the messages, what becomes a column, and every refusal."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from reading import IMAGE, text
from reading import fields_of as read

from mm_grpo.data.columns import check_columns, rename
from mm_grpo.data.rows import read_row
from mm_grpo.errors import DataError


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def contents(row: dict[str, Any]) -> list[Any]:
    return [message["content"] for message in read(row).messages]


def test_a_row_without_images() -> None:
    empty = {"image": None, "images": [], "videos": [], "video": None}
    fields = read({"prompt": [user("2 + 2?")], "answer": 4, **empty})
    assert (fields.messages, fields.images, fields.other_columns) == ((user("2 + 2?"),), (), {"answer": 4})
    assert read({"prompt": "2 + 2?"}).messages == (user("2 + 2?"),)
    talk = [user("2 + 2?"), {"role": "assistant", "content": "4"}, user("Sure?")]
    assert read({"prompt": talk}).messages == tuple(talk)  # an earlier answer is part of the prompt


def test_images_without_a_place_go_to_the_start_of_the_first_user_message() -> None:
    system = {"role": "system", "content": "Be brief."}
    fields = read({"prompt": [system, user("Compare."), user("Well?")], "images": ["a.png", "b.png"]})
    assert [m["content"] for m in fields.messages] == ["Be brief.", [IMAGE, IMAGE, text("Compare.")], "Well?"]
    assert fields.images == ("a.png", "b.png") and fields.other_columns == {}
    assert contents({"prompt": "What?", "image": b"data", "images": []}) == [[IMAGE, text("What?")]]


def test_parts_keep_their_places_and_may_carry_their_own_images() -> None:
    picture = object()
    parts = [
        text("A:"),
        {"type": "image", "image": picture},
        IMAGE,
        {"type": "image", "path": "c.png"},
        {"type": "image_url", "image_url": {"url": "d.png"}},
        {"type": "image_url", "image_url": "e.png"},
        "plain",
    ]
    fields = read({"prompt": [user(parts)], "images": ["b.png"]})
    assert fields.images == (picture, "b.png", "c.png", "d.png", "e.png")
    assert fields.messages == (user([text("A:"), *[IMAGE] * 5, text("plain")]),)
    assert contents({"prompt": [user([IMAGE])], "image": "a.png"}) == [[IMAGE]]  # a picture alone may ask


def test_tags_in_a_string_are_places() -> None:
    assert contents({"prompt": "<image>\nWhich?", "image": "a.png"}) == [[IMAGE, text("\nWhich?")]]
    row = {"prompt": [user("Is <image> like <image>?"), user("Why?")], "images": ["a.png", "b.png"]}
    assert contents(row) == [[text("Is "), IMAGE, text(" like "), IMAGE, text("?")], "Why?"]


def test_keys_that_arrow_fills_with_null_are_not_there() -> None:
    content = [{"type": "image", "text": None, "image": None}, text("?")]
    tool = {"role": "tool", "name": "ruler", "content": "3 cm"}
    row = {"prompt": [{"role": "user", "name": None, "content": content}, tool], "image": "a.png"}
    assert read(row).messages == (user([IMAGE, text("?")]), tool)


def test_the_system_prompt_is_for_rows_without_one_and_the_row_is_not_changed() -> None:
    row = {"prompt": [user("What?")], "images": ["a.png"], "answer": [1]}
    before = copy.deepcopy(row)
    fields = read(row, system_prompt="Be brief.")
    assert fields.messages[0] == {"role": "system", "content": "Be brief."} and len(fields.messages) == 2
    assert row == before
    own = [{"role": "system", "content": "Be long."}, user("What?")]
    assert read({"prompt": own}, system_prompt="Be brief.").messages == tuple(own)


def test_columns_are_renamed() -> None:
    row = {"problem": "What?", "photo": "a.png", "solution": "x", "answer": "y", "id": 1}
    fields = read(row, columns={"prompt": "problem", "image": "photo", "answer": "solution"})
    assert fields.messages == (user([IMAGE, text("What?")]),) and fields.images == ("a.png",)
    assert fields.other_columns == {"answer": "x", "id": 1}  # the dataset's own `answer` gives way
    assert rename(["a", "b"], {"a": "b", "b": "a"}) == {"a": "b", "b": "a"}
    assert rename(["prompt"], {"prompt": "problem"}) == {}  # never another column than the one that was named
    with pytest.raises(DataError, match=r"data\.columns\.prompt is 'qestion'.*'question'"):
        check_columns({"prompt": "qestion"}, ["question", "answer"], "the dataset 'train'")
    check_columns({"prompt": "question"}, ["question", "answer"], "the dataset 'train'")


TURNS = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "x"}]
USED: list[tuple[dict[str, Any], dict[str, Any], dict[str, str]]] = [
    ({"prompt": "What?", "image": "a.png", "id": 1}, {}, {"prompt": "prompt", "image": "images"}),
    ({"problem": "What?", "solution": "<answer>x</answer>"}, {}, {"problem": "prompt", "solution": "answer"}),
    ({"problem": "What?", "system": "Be brief."}, {}, {"problem": "prompt", "system": "system"}),
    (
        {"prompt": "?", "reward_model": {"ground_truth": "x"}},
        {},
        {"prompt": "prompt", "reward_model": "answer"},
    ),
    ({"conversations": TURNS, "system": "Be brief."}, {}, {"conversations": "prompt", "system": "system"}),
    (
        {"prompt": "?", "left": "a.png", "right": "b.png"},
        {"columns": {"image_1": "left", "image_2": "right"}},
        {"prompt": "prompt", **dict.fromkeys(("image_1", "image_2", "left", "right"), "images")},
    ),
    (
        {"prompt": "?", "history": [["a", "b"]], "image_0": None},
        {},
        {"prompt": "prompt", "history": "prompt", "image_0": "images"},
    ),
    (
        {"q": "?", "system": "s"},
        {"prompt_template": "{system} {q}"},
        dict.fromkeys(("q", "system"), "prompt template"),
    ),
    ({"messages": [user("What?")], "images": ["a.png"]}, {}, {"messages": "prompt", "images": "images"}),
    (
        {"question": "What?", "meta": {"photo": "a.png"}, "answer": "x"},
        {"columns": {"prompt": "question", "images": "meta.photo"}},
        {"prompt": "prompt", "question": "prompt", "images": "images"},
    ),
    (
        {"category": "dog", "meta": {"n": 1}, "prompt": "no", "id": 1},
        {"prompt_template": "{category} {meta.n}?"},
        {"category": "prompt template", "meta": "prompt template", "prompt": "prompt"},
    ),
    ({"category": "dog"}, {"prompt_template": "{category}?"}, {"category": "prompt template"}),
]


@pytest.mark.parametrize(("row", "settings", "used"), USED)
def test_every_column_stays_and_says_what_it_was_used_for(
    row: dict[str, Any], settings: dict[str, Any], used: dict[str, str]
) -> None:
    fields = read_row(row, row_name="r", **settings)
    assert fields.used == used
    assert {name: fields.columns[name] for name in row} == row
    shown = {name for name, purpose in used.items() if purpose in ("prompt", "images", "system")}
    assert set(fields.other_columns) == set(fields.columns) - shown
    assert set(fields.columns) - set(row) <= {"answer", "prompt", "images", *settings.get("columns", ())}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": {"role": ["user"]}}, ("'prompt' is a dict",)),
        ({"prompt": [user(None)]}, ("prompt[0]", "NoneType")),
        ({"prompt": [user([{"type": "audio"}])]}, ("prompt[0].content[0]", "'audio'")),
        ({"prompt": [user(" "), {"role": "system", "content": "x"}]}, ("'prompt' is empty",)),
        ({"question": "?"}, ("'prompt'", "data.columns.prompt=question")),
        ({"prompt": "What?", "image": "a.png", "images": ["b.png"]}, ("'image' and 'images'",)),
        ({"prompt": [user([IMAGE, text("?")])], "images": ["a.png", "b.png"]}, ("image parts in the prompt: 1", ": 2")),
        ({"prompt": [user([text("?")])], "image": "a.png"}, ("image parts in the prompt: 0", "in the row: 1")),
        ({"prompt": "<image>?"}, ("<image> tags in the prompt: 1", "images in the row: 0")),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(row: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(DataError, match=r"^row 3: ") as caught:
        read(row)
    assert all(word in str(caught.value) for word in words), caught.value
