"""Layouts of rows: one conversation in six of them, sets as they are published, and rows of no layout."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from helpers import tiny
from reading import IMAGE, config, encoded
from reading import fields_of as read
from reading import rows_refusal as refusal

from mm_grpo.data.sources import load_train
from mm_grpo.errors import DataError

ASKED = {"role": "user", "content": "What?"}
TALK = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


# Three conversations: the text, in which {0} stands for a picture, the pictures, the answer.
CONVERSATIONS: list[tuple[str, tuple[int, ...], str]] = [
    ("How long is the side? {0}", (3,), "5 \\sqrt { 2 }"),
    ("{0}\n{1}\n{2}\nSort them, {{x}} first.", (1, 2, 1), "2, 1, 3"),
    ("{0}Was steht hier: \u201egr\u00fcn\u201c?  ", (4,), "\u7eff\u8272"),
]


@cache
def png(seed: int) -> bytes:
    return encoded(tiny.picture(seed, 56 + 28 * (seed % 3), 84))


def data_url(seed: int) -> str:
    return "data:image/png;base64," + base64.b64encode(png(seed)).decode()


def tagged(text: str, count: int) -> str:
    return text.format(*["<image>"] * count)


def parts(text: str, images: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The text as parts, with `images` in their places."""
    pieces: list[dict[str, Any]] = []
    for at, piece in enumerate(tagged(text, len(images)).split("<image>")):
        pieces += [images[at - 1]] if at else []
        pieces += [{"type": "text", "text": piece}] if piece else []
    return pieces


def trl(text: str, seeds: tuple[int, ...], answer: str) -> dict[str, Any]:
    content = parts(text, [dict(IMAGE) for _ in seeds])
    images = [tiny.picture(s, 56 + 28 * (s % 3), 84) for s in seeds]
    return {"prompt": [{"role": "user", "content": content}], "images": images, "answer": answer}


def openai(text: str, seeds: tuple[int, ...], answer: str) -> dict[str, Any]:
    images = [{"type": "image_url", "image_url": {"url": data_url(seed), "detail": "high"}} for seed in seeds]
    reply = {"role": "assistant", "content": answer}
    return {"messages": [{"role": "user", "content": parts(text, images)}, reply]}


def verl(text: str, seeds: tuple[int, ...], answer: str) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": tagged(text, len(seeds))}],
        "images": [{"bytes": png(seed), "path": None} for seed in seeds],
        "reward_model": {"style": "rule", "ground_truth": answer},
    }


def ms_swift(text: str, seeds: tuple[int, ...], answer: str) -> dict[str, Any]:
    talk = [{"role": "user", "content": tagged(text, len(seeds))}, {"role": "assistant", "content": answer}]
    return {"messages": talk, "images": [f"{s}.png" for s in seeds]}


def sharegpt(text: str, seeds: tuple[int, ...], answer: str) -> dict[str, Any]:
    names = [f"{s}.png" for s in seeds]
    talk = [{"from": "human", "value": tagged(text, len(seeds))}, {"from": "gpt", "value": answer}]
    return {"image": names[0] if len(names) == 1 else names, "conversations": talk}


def r1v(text: str, seeds: tuple[int, ...], answer: str) -> dict[str, Any]:
    first = len(seeds) == 1 and text.startswith("{0}")  # R1-V puts its one picture first by itself
    problem = text.format("") if first else tagged(text, len(seeds))
    image = {"image": png(seeds[0])} if first else {"images": [png(seed) for seed in seeds]}
    return {**image, "problem": problem, "solution": f"<answer> {answer} </answer>"}


WRITERS: tuple[Callable[..., dict[str, Any]], ...] = (trl, openai, verl, ms_swift, sharegpt, r1v)


def test_conversations_in_six_layouts_are_equal_prompts(models: dict[str, Path], tmp_path: Path) -> None:
    from mm_grpo.processors.base import load_processor

    for seed in range(1, 5):
        (tmp_path / f"{seed}.png").write_bytes(png(seed))
    processor = load_processor(str(models["qwen2_5_vl"]))
    first: list[Any] = []
    for write in WRITERS:
        rows = [write(*conversation) for conversation in CONVERSATIONS]
        set_of = load_train(config(image_dir=str(tmp_path)), rows)
        prompts = [processor.prompt(set_of.sample(i)) for i in range(len(rows))]
        first = first or prompts
        for want, got, (_, _, answer) in zip(first, prompts, CONVERSATIONS, strict=True):
            assert got.token_ids == want.token_ids, write
            assert got.engine_prompt.token_ids == want.engine_prompt.token_ids, write
            assert all(torch.equal(got.vision[key], want.vision[key]) for key in want.vision)
            assert got.sample.columns["answer"] == answer


def test_turns_and_a_system_message_in_the_layouts_that_have_them() -> None:
    turns = [("user", "<image>What is it?"), ("assistant", "A cat."), ("user", "What colour?")]
    system, reply = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "black"}
    messages = [{"role": role, "content": text} for role, text in turns]
    speakers = {"user": "human", "assistant": "gpt"}
    said = [{"from": speakers[role], "value": text} for role, text in [*turns, ("assistant", "black")]]
    for row in (
        {"messages": [system, *messages], "answer": "black"},
        {"prompt": [system, *messages], "reward_model": {"ground_truth": "black"}},
        {"messages": [*messages, reply], "system": "Be brief."},
        {"conversations": said, "system": "Be brief."},
    ):
        fields = read({**row, "image": "a.png"})
        assert [m["role"] for m in fields.messages] == ["system", "user", "assistant", "user"]
        assert fields.messages[0] == system and fields.columns["answer"] == "black"
        assert fields.messages[1]["content"] == [IMAGE, {"type": "text", "text": "What is it?"}]


PNG = {"bytes": png(1), "path": None}
PUBLISHED: dict[str, tuple[str, dict[str, Any], Any, str]] = {
    # columns and forms of published sets, with our pictures and texts: the file, a row, the last question, the answer
    "hiyouga/geometry3k": (
        "data.parquet",
        {"images": [PNG], "problem": "<image>What is the length of AB?", "answer": "3 \\sqrt { 5 }"},
        [IMAGE, "What is the length of AB?"], "3 \\sqrt { 5 }",
    ),
    "leonardPKU/clevr_cogen_a_train": (
        "data.parquet",
        {"image": PNG, "problem": "How many items are there?", "solution": "<answer> 4 </answer>"},
        [IMAGE, "How many items are there?"], "4",
    ),
    "liuhaotian/LLaVA-Instruct-150K": (
        "data.json",
        {
            "id": "000000000001",
            "image": "a.jpg",
            "conversations": [
                {"from": "human", "value": "What stands on the table?\n<image>"}, {"from": "gpt", "value": "A vase."},
                {"from": "human", "value": "Is it full?"}, {"from": "gpt", "value": "No, it is empty."},
            ],
        },
        "Is it full?", "No, it is empty.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sets_load_without_a_column_map(name: str, tmp_path: Path) -> None:
    file, row, asked, answer = PUBLISHED[name]
    (tmp_path / "a.jpg").write_bytes(png(1))
    if file.endswith("parquet"):
        datasets.Dataset.from_list([row, row]).to_parquet(str(tmp_path / file))
    else:
        (tmp_path / file).write_text(json.dumps([row, row]))
    set_of = load_train(config(), tmp_path / file)
    sample = set_of.sample(0)
    if isinstance(asked, list):
        asked = [{"type": "text", "text": part} if isinstance(part, str) else part for part in asked]
    assert sample.messages[-1] == {"role": "user", "content": asked}
    assert sample.columns["answer"] == answer
    assert [image.size for image in sample.images] == [(84, 84)]
    left = set(row) - {"prompt", "problem", "messages", "conversations", "image", "images"}
    assert set(set_of.columns) == {*row, "answer"} == set(sample.columns)
    assert set(sample.other_columns) == {*left, "answer"}


def test_dotted_columns_reach_into_mappings_and_lists(tmp_path: Path) -> None:
    meta = {"gold": {"text": "left"}, "boxes": [[1, 2, 3, 4]]}
    row = {"question": "Where?", "image": "a.png", "meta": meta, "a.b": 5}
    names = {"prompt": "question", "answer": "meta.gold.text", "box": "meta.boxes.0", "n": "a.b"}
    set_of = load_train(config(columns=names), [row, {**row, "meta": None}])
    assert set_of.fields(0).other_columns == {"answer": "left", "box": [1, 2, 3, 4], "n": 5, "meta": meta}
    assert set_of.fields(1).other_columns == {"answer": None, "box": None, "n": 5, "meta": None}
    message = refusal([row], columns={"prompt": "question", "answer": "meta.gold.txt"})
    assert "data.columns.answer is 'meta.gold.txt'" in message and "'meta.gold.text'" in message
    message = refusal([row, {**row, "meta": "left"}], columns=names)
    assert message.startswith("train row 1: data.columns.answer is 'meta.gold.text', and 'meta' is a str")


def test_a_reply_is_the_answer_unless_the_config_names_another() -> None:
    assert read({"messages": TALK}).other_columns == {"answer": "4"}
    assert read({"messages": TALK, "answer": 4}).other_columns == {"answer": "4"}
    named = read({"messages": TALK, "answer": "four"}, columns={"answer": "answer"})
    assert named.other_columns == {"answer": "four"} and named.messages == (TALK[0],)
    talk = {"talk": TALK}
    assert read(talk, columns={"messages": "talk"}).other_columns == {"answer": "4"}
    with pytest.raises(DataError, match=r"'prompt' ends with a message of role 'assistant'"):
        read(talk, columns={"prompt": "talk"})


def test_two_columns_that_may_be_the_prompt_are_refused() -> None:
    row = {"prompt": "Think. What?", "problem": "What?", "image": "a.png", "solution": "<answer>1</answer>"}
    message = refusal([row])
    assert "'prompt' and 'problem'" in message and "data.columns.prompt=problem" in message
    named = {name: read(row, columns={"prompt": name}) for name in ("prompt", "problem")}
    assert named["prompt"].messages[0]["content"][1]["text"] == "Think. What?"
    assert named["problem"].messages[0]["content"][1]["text"] == "What?"
    assert (named["problem"].columns["answer"], named["prompt"].columns.get("answer")) == ("1", None)
    assert read({"prompt": "What?", "problem": 17, "image": "a.png"}).other_columns == {"problem": 17}


def said(*turns: Any, **row: Any) -> dict[str, Any]:
    return {"conversations": list(turns), "image": "a.png", **row}


HUMAN = {"from": "human", "value": "<image>What?"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (said(HUMAN, {"from": "gpt", "value": None}), ("conversations[1]", "None")),
        (said(HUMAN, {"from": "gpt", "value": " "}), ("conversations", "reply")),
        (said(HUMAN, system=3), ("'system' is 3",)),
        (said() | {"conversations": None}, ("'conversations' is null",)),
        (said(HUMAN, {"from": "gpt", "value": "<bbox>"}, objects={"bbox": [[1, 2, 3, 4]]}), ("<bbox>", "'objects'")),
        ({"messages": TALK, "answer": "four", "image": "a.png"}, ("'answer'", "data.columns.answer")),
    ],
)  # fmt: skip
def test_a_row_of_no_layout_is_refused_by_its_field(row: Any, words: tuple[str, ...]) -> None:
    message = refusal([row])
    assert message.startswith("train row 0: ") and "\n" not in message
    assert all(word in message for word in words), message


def test_base64_is_never_printed() -> None:
    url, bare = data_url(1), base64.b64encode(png(1)).decode()
    text = {"type": "text", "text": {"url": url}}
    for row in (
        {"prompt": "?", "image": bare},
        {"prompt": "?", "image": url[:-40] + "@@@"},
        {"prompt": [{"role": "user", "content": [text]}]},
        {"messages": [ASKED, {"role": "assistant", "content": [text]}]},
        said({"from": bare, "value": "x"}),
    ):
        with pytest.raises(DataError) as caught:
            load_train(config(), [row]).sample(0)
        assert bare[12:40] not in str(caught.value) and len(str(caught.value)) < 600
