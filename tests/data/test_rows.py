"""Row layouts: where images end up in the messages, what becomes a column, and every refusal."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from mm_grpo.data.columns import check_columns, rename
from mm_grpo.data.rows import read_row
from mm_grpo.errors import DataError

IMAGE = {"type": "image"}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def refusal(row: Any, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        read_row(row, row_name="row 3", **options)
    return str(caught.value)


def contents(row: dict[str, Any], **options: Any) -> list[Any]:
    return [message["content"] for message in read_row(row, row_name="row 3", **options).messages]


def test_a_text_only_row() -> None:
    fields = read_row(
        {"prompt": [user("2 + 2?")], "answer": 4, "image": None, "images": []}, row_name="row 3"
    )
    assert fields.messages == (user("2 + 2?"),)
    assert fields.images == ()
    assert fields.columns == {"answer": 4}


def test_a_string_is_one_user_message() -> None:
    assert read_row({"prompt": "2 + 2?"}, row_name="row 3").messages == (user("2 + 2?"),)


def test_images_without_a_place_go_to_the_start_of_the_first_user_message() -> None:
    row = {
        "prompt": [{"role": "system", "content": "Be brief."}, user("Compare."), user("Well?")],
        "images": ["a.png", "b.png"],
    }
    fields = read_row(row, row_name="row 3")
    assert [m["content"] for m in fields.messages] == ["Be brief.", [IMAGE, IMAGE, text("Compare.")], "Well?"]
    assert fields.images == ("a.png", "b.png")
    assert fields.columns == {}
    assert contents({"prompt": "What?", "image": b"data"}) == [[IMAGE, text("What?")]]


def test_parts_keep_their_places() -> None:
    row = {"prompt": [user([text("A:"), IMAGE, text("B:"), IMAGE])], "images": ["a.png", "b.png"]}
    assert contents(row) == [[text("A:"), IMAGE, text("B:"), IMAGE]]


def test_parts_may_carry_their_own_images() -> None:
    picture = object()
    row = {
        "prompt": [
            user(
                [
                    {"type": "image", "image": picture},
                    IMAGE,
                    {"type": "image", "path": "c.png"},
                    {"type": "image_url", "image_url": {"url": "d.png"}},
                    {"type": "image_url", "image_url": "e.png"},
                    "plain",
                ]
            )
        ],
        "images": ["b.png"],
    }
    fields = read_row(row, row_name="row 3")
    assert fields.images == (picture, "b.png", "c.png", "d.png", "e.png")
    assert fields.messages == (user([IMAGE] * 5 + [text("plain")]),)


def test_tags_in_a_string_are_places() -> None:
    assert contents({"prompt": "<image>\nWhich?", "image": "a.png"}) == [[IMAGE, text("\nWhich?")]]
    row = {"prompt": [user("Is <image> like <image>?"), user("Why?")], "images": ["a.png", "b.png"]}
    assert contents(row) == [[text("Is "), IMAGE, text(" like "), IMAGE, text("?")], "Why?"]
    # With image parts, a tag is only text.
    assert contents({"prompt": [user([IMAGE, text("<image>")])], "image": "a.png"}) == [
        [IMAGE, text("<image>")]
    ]


def test_keys_that_arrow_fills_with_null_are_not_there() -> None:
    row = {
        "prompt": [
            {
                "role": "user",
                "name": None,
                "content": [{"type": "image", "text": None, "image": None}, text("?")],
            },
            {"role": "tool", "name": "ruler", "content": "3 cm"},
        ],
        "image": "a.png",
    }
    assert read_row(row, row_name="row 3").messages == (
        user([IMAGE, text("?")]),
        {"role": "tool", "name": "ruler", "content": "3 cm"},
    )


def test_the_row_is_not_changed() -> None:
    row = {"prompt": [user("What?")], "images": ["a.png"], "answer": [1]}
    before = copy.deepcopy(row)
    read_row(row, row_name="row 3", system_prompt="Be brief.")
    assert row == before


def test_the_system_prompt_is_for_rows_without_one() -> None:
    brief = {"role": "system", "content": "Be brief."}
    assert read_row({"prompt": "What?"}, row_name="row 3", system_prompt="Be brief.").messages == (
        brief,
        user("What?"),
    )
    own = [{"role": "system", "content": "Be long."}, user("What?")]
    assert read_row({"prompt": own}, row_name="row 3", system_prompt="Be brief.").messages == tuple(own)


def test_counts_of_images_and_places_must_agree() -> None:
    assert refusal({"prompt": [user([IMAGE, text("?")])], "images": ["a.png", "b.png"]}) == (
        "row 3: image parts in the prompt: 1; images in the row: 2. Write one for each image. "
        "Images are read from the column 'image' or 'images', or what data.columns.images names"
    )
    assert "image parts in the prompt: 1; images in the row: 0" in refusal({"prompt": [user([IMAGE])]})
    assert "image parts in the prompt: 0; images in the row: 1" in refusal(
        {"prompt": [user([text("?")])], "image": "a.png"}
    )
    assert "<image> tags in the prompt: 2; images in the row: 1" in refusal(
        {"prompt": "<image> <image>", "image": "a.png"}
    )
    assert "<image> tags in the prompt: 1; images in the row: 0" in refusal({"prompt": "<image>?"})


def test_columns_are_renamed() -> None:
    row = {"problem": "What?", "photo": "a.png", "solution": "x", "answer": "y", "id": 1}
    mapping = {"prompt": "problem", "image": "photo", "answer": "solution"}
    fields = read_row(row, row_name="row 3", columns=mapping)
    assert fields.messages == (user([IMAGE, text("What?")]),)
    assert fields.images == ("a.png",)
    assert fields.columns == {"answer": "x", "id": 1}  # the dataset's own `answer` gives way
    assert rename(["a", "b"], {"a": "b", "b": "a"}) == {"a": "b", "b": "a"}
    assert rename(["prompt"], {"prompt": "problem"}) == {}  # never another column than the one that was named


def test_a_mapping_to_an_absent_column_names_the_nearest() -> None:
    with pytest.raises(DataError, match=r"data\.columns\.prompt is 'qestion'.*'question'"):
        check_columns({"prompt": "qestion"}, ["question", "answer"], "the dataset 'train'")
    check_columns({"prompt": "question"}, ["question", "answer"], "the dataset 'train'")
    assert "data.columns.prompt" in refusal({"problem": 1}, columns={"prompt": "question"})
    assert "'videos'" in refusal({"prompt": "What?", "clips": ["a.mp4"]}, columns={"videos": "clips"})
    assert read_row({"prompt": "What?", "videos": [], "video": None}, row_name="row 3").columns == {}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (["prompt"], "a row is a mapping"),
        ({"prompt": {"role": ["user"]}}, "'prompt' is a dict"),
        ({"prompt": [user("?"), "!"]}, "'prompt' is a list"),
        ({"prompt": []}, "'prompt' has no message of role 'user'"),
        ({"prompt": [user("2 + 2?"), {"role": "assistant", "content": "4"}]}, "data.answer_from=last_turn"),
        ({"prompt": [{"role": "human", "content": "?"}]}, "prompt[0]: the role is 'human'"),
        ({"prompt": [user(None)]}, "prompt[0]: the content is a NoneType"),
        ({"prompt": [user([{"type": "audio"}])]}, "prompt[0].content[0]: a part of type 'audio'"),
        ({"prompt": [user([{"type": "text", "text": None}])]}, "prompt[0].content[0]: a text part"),
        ({"prompt": [user([{"type": "image_url"}])]}, "prompt[0].content[0]: an 'image_url' part"),
        ({"prompt": [user([text("?"), "\ude00"])]}, "prompt[0].content[1]: the text holds half a character"),
        ({"prompt": "?", "image": "a.png", "images": ["b.png"]}, "both 'image' and 'images'"),
        ({"prompt": "?", "images": ["a.png", None]}, "images[1] is null"),
        ({"prompt": None}, "'prompt' is null"),
        ({"question": "?"}, "no column 'prompt'"),
        ({"prompt": "What?", "videos": ["a.mp4"]}, "'videos' is set"),
        ({"prompt": [user([{"type": "video"}])]}, "prompt[0].content[0]: a part of type 'video'"),
    ],
)
def test_what_is_refused_is_named(row: Any, words: str) -> None:
    assert refusal(row).startswith("row 3: ") and words in refusal(row)


def test_an_earlier_answer_is_part_of_the_prompt() -> None:
    talk = [user("2 + 2?"), {"role": "assistant", "content": "4"}, user("Sure?")]
    assert read_row({"prompt": talk}, row_name="row 3").messages == tuple(talk)
