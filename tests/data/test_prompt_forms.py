"""Forms of prompts that other programs write: tags of images, numbered columns, JSON text, history, keys of parts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from reading import IMAGE, text, user
from reading import fields_of as read
from reading import fields_refusal as refusal

ASKED = [{"role": "user", "content": "What?"}]
TAGS = (
    *("<ImageHere>", "<Image>", "<img>", "<img/>", "<image/>", "[IMG]", "[IMG_BREAK]", "<image_placeholder>"),
    *("<image-placeholder>", "<start_of_image>", "<|image|>", "<|image_pad|>", "<|vision_start|>", "<|media_pad|>"),
    *("<IMG_CONTEXT>", "<image_soft_token>", "<img><img_placeholder></img>", "<img>a/b c.png</img>"),
    *("<image>./</image>", "<im_patch>", "<video>", "<|video_pad|>", "<video_placeholder>", "<audio>", "<|AUDIO|>"),
)  # fmt: skip


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.field_bug("unread-tags")
def test_a_tag_that_is_not_read_is_refused_in_text_and_in_parts(tag: str) -> None:
    for prompt in (f"{tag}\nWhat?", f"Is it red?{tag}", user(IMAGE, text(f"Is {tag} red?"))):
        assert repr(tag) in refusal({"prompt": prompt, "image": "a.png"})
    spaced = f"{tag[0]} {tag[1:].replace('>', ' >').replace('<', '< ')}"  # what the message advises
    assert read({"prompt": spaced, "image": "a.png"}).messages[0]["content"] == [IMAGE, text(spaced)]


def test_the_tag_of_an_image_is_refused_beside_image_parts() -> None:
    for tag in ("<image>", "<image 1>"):
        assert repr(tag) in refusal({"prompt": user(IMAGE, text(f"{tag}?")), "image": "a.png"})
        assert repr(tag) in refusal({"prompt": user(text(f"{tag}?")), "image": "a.png"})
        assert "images in the row: 0" in refusal({"prompt": f"{tag}?"})


@pytest.mark.parametrize(
    "words",
    [
        "Is it <b>bold</b> or <i>italic</i>?",
        "What does <img src='a.png'> do, and <video controls src=x></video>?",
        "Is List<Image> or Array<Video> right?",
        "Answer in <think></think><answer></answer>, as <box>(1,2)</box> and <|box_start|>.",
        "[image] and (img), x < image > y, <imagine>, <image-map>, <video game>, vector<img_t>",
    ],
)
def test_text_in_angle_brackets_stays_text(words: str) -> None:
    assert read({"prompt": words, "image": "a.png"}).messages[0]["content"] == [IMAGE, text(words)]


@pytest.mark.parametrize("tag", ["<img>", "[IMG]", "<video>", "<audio>", "<Image>"])
def test_elements_are_text_in_rows_of_text_alone(tag: str) -> None:
    row = {"prompt": f"What is a {tag} placeholder?"}
    assert repr(tag) in refusal(row)
    assert read(row, text_only=True).messages[0]["content"] == row["prompt"]
    assert "'picture'" in refusal({**row, "picture": "a.png"}, text_only=True)
    assert repr("<ImageHere>") in refusal({"prompt": "<ImageHere>?"}, text_only=True)


@pytest.mark.parametrize(
    ("prompt", "content", "images"),
    [
        ("Is <image 1> in <image 2>?", [text("Is "), IMAGE, text(" in "), IMAGE, text("?")], "ab"),
        ("<image_2>, then <image_1>", [IMAGE, text(", then "), IMAGE], "ba"),
        ("<|image_1|>\n<|image_2|>?", [IMAGE, text("\n"), IMAGE, text("?")], "ab"),
        ("<image0><Image1>?", [IMAGE, IMAGE, text("?")], "ab"),
        ("<image 2>, <image 1>, <image 2>", [IMAGE, text(", "), IMAGE, text(", "), IMAGE], "bab"),
    ],
)
def test_tags_with_numbers_are_places_of_their_images(prompt: str, content: Any, images: str) -> None:
    fields = read({"prompt": prompt, "images": ["a", "b"]})
    assert fields.messages[0]["content"] == content and "".join(fields.images) == images


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("<image 1>", 2), ("<image 2>", 1), ("<image 1><image 3>", 2), ("<image 1><image>", 2)],
)
def test_tags_with_other_numbers_than_the_images_are_refused(prompt: str, count: int) -> None:
    assert f"images in the row: {count}" in refusal({"prompt": f"{prompt}?", "images": ["a.png"] * count})


def test_parts_number_their_images() -> None:
    first, second = ({"type": "image", "text": None, "index": number} for number in (0, 1.0))
    row = {"prompt": user(second, text("or"), first), "images": ["a", "b"]}
    assert read(row).images == ("b", "a") and read(row).messages[0]["content"] == [IMAGE, text("or"), IMAGE]
    assert "images in the row: 1" in refusal({"prompt": user(second), "images": ["a"]})
    assert "'index'" in refusal({"prompt": user({"type": "image", "index": "0"}), "images": ["a"]})


TEN = [f"{n}.png" for n in range(1, 11)]
STORED = {"bytes": None, "path": "b.png"}
MMMU = {"question": "Which of <image 1> is in <image 2>?", "options": "['left', '<image 3>']"}
MMMU |= {"image_4": None, "image_3": "c.png", "image_1": "a.png", "image_2": "b.png", "image_10": None}


@pytest.mark.parametrize(
    ("row", "images"),
    [
        ({"image_1": "a.png", "image_2": None}, ("a.png",)),
        (dict([("image_10", "10.png"), *((f"image_{n}", f"{n}.png") for n in range(1, 10))]), (*TEN,)),
        ({"image0": b"\x89PNG", "image1": STORED}, (b"\x89PNG", STORED)),
        ({"image": None, "images": [], "image_0": "a.png"}, ("a.png",)),
    ],
)  # fmt: skip
def test_numbered_columns_are_the_images_in_the_order_of_their_numbers(row: Any, images: Any) -> None:
    fields = read({"prompt": "What?", **row})
    content = [*[IMAGE] * len(images), text("What?")]
    assert fields.images == images and fields.messages[0]["content"] == content


@pytest.mark.field_bug("several-images")
def test_numbered_tags_take_the_numbered_columns() -> None:
    fields = read(MMMU, prompt_template="{question}\n{options}")
    assert fields.images == ("a.png", "b.png", "c.png")
    assert [part.get("text") for part in fields.messages[0]["content"]] == [
        "Which of ", None, " is in ", None, "?\n['left', '", None, "']",
    ]  # fmt: skip
    columns = {"images": "image_1"}
    assert "images in the row: 1" in refusal(MMMU, prompt_template="{question}\n{options}", columns=columns)


@pytest.mark.parametrize("names", [("image_1", "image_3"), ("image_0", "image_2"), ("image_1", "image1")])
def test_a_gap_in_numbered_columns_is_refused(names: tuple[str, ...]) -> None:
    row = {"prompt": "What?", "image_2": None, **dict.fromkeys(names, "a.png")}
    assert repr(names[1]) in refusal(row)


@pytest.mark.parametrize(
    "row",
    [
        {"image": "z.png", "image_1": "a.png"},
        {"image_1": 17, "image_2": 18},
        {"image_224": "a.png"},
        {"prompt": user({**IMAGE, "image": "z.png"}), "image_1": "a.png"},
    ],
)
def test_columns_that_are_not_the_images_of_the_row_are_left(row: Any) -> None:
    fields = read({"prompt": "What?", **row})
    assert [image for image in fields.images if image != "z.png"] == []


TURNS = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "A cat."}]


@pytest.mark.parametrize(
    ("row", "roles", "answer"),
    [
        ({"prompt": json.dumps(ASKED)}, ["user"], None),
        ({"messages": f" {json.dumps([*ASKED, {'role': 'assistant', 'content': 'x'}])}\n"}, ["user"], "x"),
        ({"conversations": json.dumps(TURNS)}, ["user"], "A cat."),
        ({"problem": json.dumps([{"id": 1, "role": "system", "content": "!"}, *ASKED])}, ["system", "user"], None),
    ],
)  # fmt: skip
def test_messages_kept_as_json_text_are_messages(row: Any, roles: list[str], answer: str | None) -> None:
    fields = read(row)
    assert [message["role"] for message in fields.messages] == roles and fields.conversational
    assert fields.messages[-1]["content"] == "What?" and fields.columns.get("answer") == answer


def test_parts_kept_as_json_text_are_parts() -> None:
    content = json.dumps([IMAGE, text("What?")])
    row = {"messages": [{"role": "user", "content": content}], "image": "a.png"}
    assert read(row).messages == ({"role": "user", "content": [IMAGE, text("What?")]},)


def test_a_wrong_message_keeps_its_number_behind_a_system_text() -> None:
    row = {"system": "Be short.", "messages": [{"human": "What?"}], "image": "a.png"}
    assert "messages[0]" in refusal(row)


@pytest.mark.parametrize(
    "prompt", [str(ASKED), json.dumps([*ASKED, {"role": "tool"}]), '[{"role": "user", "content": "What?"]']
)
def test_text_that_only_looks_like_messages_is_refused(prompt: str) -> None:
    assert "'problem'" in refusal({"problem": prompt})


@pytest.mark.parametrize(
    "prompt",
    ["[3, 4] + [5]", "[a] or [b]", '[{"x": 1}, {"x": 2}]', f"{ASKED} has which role?", '[{"role": "admin"}]'],
)
def test_text_that_begins_with_a_bracket_stays_text(prompt: str) -> None:
    fields = read({"prompt": prompt})
    assert fields.messages == ({"role": "user", "content": prompt},) and not fields.conversational


def test_history_and_system_stand_before_a_text_prompt() -> None:
    history = [["<image>2 + 2?", "4"], ["And 3?", "5"]]
    row = {"query": "Sure?", "history": history, "system": "Be brief.", "image": "a.png"}
    fields = read(row, columns={"prompt": "query"}, system_prompt="Be long.")
    roles = ["system", "user", "assistant", "user", "assistant", "user"]
    assert [m["role"] for m in fields.messages] == roles
    assert [m["content"] for m in fields.messages] == [
        "Be brief.", [IMAGE, text("2 + 2?")], "4", "And 3?", "5", "Sure?",
    ]  # fmt: skip
    assert not fields.conversational
    assert "'system' is 3" in refusal({"prompt": "What?", "system": 3})
    assert read({"prompt": "What?", "system": 3}, columns={"solar": "system"}).columns["solar"] == 3
    for nothing in (None, ""):
        assert read({"problem": "What?", "system": nothing}).messages == tuple(ASKED)
    templated = read(row, prompt_template="{system} {history.0.1} {query}")
    assert templated.messages[0]["content"] == [IMAGE, text("Be brief. 4 Sure?")]


@pytest.mark.parametrize(
    "history", [None, [], "French revolution", ["click", "type"], [["a", 1]], [["a", "b", "c"]]]
)
def test_other_columns_called_history_are_columns(history: Any) -> None:
    fields = read({"prompt": "What?", "history": history})
    assert fields.messages == tuple(ASKED) and fields.columns["history"] == history


URL = {"url": "a.png"}


@pytest.mark.parametrize(
    ("part", "key"),
    [
        ({"type": "image", "crop": [0, 0, 1, 1]}, "crop"),
        ({"type": "image", "image": "a.png", "bytes": b"x"}, "bytes"),
        ({"type": "image_url", "image_url": {**URL, "detail": "low"}}, "detail"),
        ({"type": "image_url", "image_url": {**URL, "fps": 2}}, "fps"),
        ({"type": "text", "text": "?", "cache_control": {"type": "ephemeral"}}, "cache_control"),
        ({"type": "text", "text": "?", "image": "a.png"}, "image"),
        ({"type": "image", "image": "a.png", "path": "b.png"}, "path"),
    ],
)
def test_a_key_of_a_part_that_nothing_reads_is_refused(part: Any, key: str) -> None:
    message = refusal({"prompt": user(part, text("?")), "image": None})
    assert "prompt[0].content[0]: " in message and repr(key) in message


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "a.png", "text": None, "index": None, "crop": None, "url": None},
        {"type": "image_url", "image_url": {**URL, "detail": "auto"}, "text": ""},
        {"type": "image", "image_url": URL, "annotations": []},
        {"type": "image_url", "image_url": "a.png", "detail": "high"},
    ],
)
def test_keys_of_a_part_without_a_value_are_not_there(part: Any) -> None:
    fields = read({"prompt": user(part, {**text("?"), "annotations": [], "cache_control": None})})
    assert fields.images == ("a.png",) and fields.messages[0]["content"] == [IMAGE, text("?")]
