"""Layouts of rows: one conversation in six of them, sets as they are published, and rows of no layout."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from layout_rows import CONVERSATIONS, IMAGE, WRITERS, data_url, png, refusal
from reading import config, write_rows

from mm_grpo.data.layouts import LAYOUTS
from mm_grpo.data.rows import read_row
from mm_grpo.data.sources import load_train
from mm_grpo.errors import DataError

ASKED = {"role": "user", "content": "What?"}
TALK = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


def read(row: dict[str, Any], **options: Any) -> Any:
    return read_row(row, row_name="row 3", **options)


@pytest.mark.parametrize("named", [True, False])
def test_conversations_in_six_layouts_are_equal_prompts(
    named: bool, models: dict[str, Path], tmp_path: Path
) -> None:
    from mm_grpo.processors.base import load_processor

    assert list(WRITERS) == list(LAYOUTS)
    for seed in range(1, 10):
        (tmp_path / f"{seed}.png").write_bytes(png(seed))
    processor = load_processor(str(models["qwen2_5_vl"]))
    prompts: dict[str, list[Any]] = {}
    for name, write in WRITERS.items():
        rows = [write(*conversation) for conversation in CONVERSATIONS]
        set_of = load_train(config(layout=name if named else None, image_dir=str(tmp_path)), rows)
        assert [set_of.fields(i).layout for i in range(6)] == [name] * 6
        prompts[name] = [processor.prompt(set_of.sample(i)) for i in range(6)]
    first = prompts["trl"]
    assert len({prompt.token_ids for prompt in first}) == 6
    for name, of_layout in prompts.items():
        for want, got, (_, seeds, answer) in zip(first, of_layout, CONVERSATIONS, strict=True):
            assert got.token_ids == want.token_ids, name
            assert got.engine_prompt.token_ids == want.engine_prompt.token_ids, name
            images = [image.tobytes() for image in got.engine_prompt.images]
            assert images == [image.tobytes() for image in want.engine_prompt.images] and len(images) == len(
                seeds
            )
            assert got.vision.keys() == want.vision.keys()
            assert all(torch.equal(got.vision[key], want.vision[key]) for key in want.vision)
            assert got.sample.columns["answer"] == answer


def test_turns_and_a_system_message_in_the_layouts_that_have_them() -> None:
    turns = [("user", "<image>What is it?"), ("assistant", "A cat."), ("user", "What colour?")]
    system, reply = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "black"}
    messages = [{"role": role, "content": text} for role, text in turns]
    speakers = {"user": "human", "assistant": "gpt"}
    said = [{"from": speakers[role], "value": text} for role, text in [*turns, ("assistant", "black")]]
    rows = {
        "trl": {"messages": [system, *messages], "answer": "black"},
        "verl": {"prompt": [system, *messages], "reward_model": {"ground_truth": "black"}},
        "ms_swift": {"messages": [system, *messages, reply]},
        "sharegpt": {"conversations": said, "system": "Be brief."},
    }
    found = {name: read({**row, "image": "a.png"}) for name, row in rows.items()}
    for name, fields in found.items():
        assert fields.messages == found["verl"].messages, name
        assert fields.messages[0] == system and fields.columns["answer"] == "black"
        assert fields.messages[1]["content"] == [IMAGE, {"type": "text", "text": "What is it?"}]
    assert [fields.layout for fields in found.values()] == ["ms_swift", "verl", "ms_swift", "sharegpt"]


# Sets as they are published: their columns and forms, with pictures and texts of our own

PNG = {"bytes": png(1), "path": None}
VERL_TASK = "<image>What is the length of AB? Think first, then answer in a box."
PUBLISHED: dict[str, tuple[str, dict[str, Any], str, Any, str]] = {
    # the file, a row, its layout, what is asked last, and the answer
    "hiyouga/geometry3k": (
        "data.parquet",
        {"images": [PNG], "problem": "<image>What is the length of AB?", "answer": "3 \\sqrt { 5 }"},
        "verl", [IMAGE, "What is the length of AB?"], "3 \\sqrt { 5 }",
    ),
    "leonardPKU/clevr_cogen_a_train": (
        "data.parquet",
        {"image": PNG, "problem": "How many items are there?", "solution": "<answer> 4 </answer>"},
        "r1v", [IMAGE, "How many items are there?"], "4",
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
        "sharegpt", "Is it full?", "No, it is empty.",
    ),
    "ms-swift's own grounding format": (
        "data.jsonl",
        {
            "messages": [
                {"role": "system", "content": "You help."},
                {"role": "user", "content": "<image>Find the <ref-object> in the picture"},
                {"role": "assistant", "content": "<bbox><bbox>"},
            ],
            "images": ["a.jpg"],
            "objects": {"ref": ["grey square"], "bbox": [[4.5, 8, 20, 31], [30, 40, 50.25, 60]]},
        },
        "ms_swift", [IMAGE, "Find the grey square in the picture"], "[4.5, 8, 20, 31][30, 40, 50.25, 60]",
    ),
    "verl's geo3k": (
        "data.parquet",
        {
            "data_source": "hiyouga/geometry3k",
            "prompt": [{"role": "user", "content": VERL_TASK}],
            "images": [PNG],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "7"},
            "extra_info": {"split": "train", "index": 0, "answer": "7", "question": "<image>What?"},
        },
        "verl", [IMAGE, VERL_TASK.removeprefix("<image>")], "7",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sets_load_without_a_column_map(name: str, tmp_path: Path) -> None:
    file, row, layout, asked, answer = PUBLISHED[name]
    (tmp_path / "a.jpg").write_bytes(png(1))
    if file.endswith("parquet"):
        datasets.Dataset.from_list([row, row]).to_parquet(str(tmp_path / file))
    elif file.endswith("jsonl"):
        write_rows(tmp_path / file, row)
    else:
        (tmp_path / file).write_text(json.dumps([row, row]))
    set_of = load_train(config(), tmp_path / file)
    sample = set_of.sample(0)
    if isinstance(asked, list):
        asked = [{"type": "text", "text": part} if isinstance(part, str) else part for part in asked]
    assert set_of.layouts == (layout,)
    assert sample.messages[-1] == {"role": "user", "content": asked}
    assert sample.columns["answer"] == answer
    assert [image.size for image in sample.images] == [(84, 84)]
    left = set(row) - {"prompt", "problem", "messages", "conversations", "image", "images"}
    assert set(set_of.columns) == {*left, "answer"} == set(sample.columns)


def test_dotted_columns_reach_into_mappings_and_lists() -> None:
    meta = {"gold": {"text": "left"}, "boxes": [[1, 2, 3, 4]]}
    row = {"question": "Where?", "image": "a.png", "meta": meta, "a.b": 5}
    names = {"prompt": "question", "answer": "meta.gold.text", "box": "meta.boxes.0", "n": "a.b"}
    set_of = load_train(config(columns=names), [row, {**row, "meta": None}])
    assert set_of.fields(0).columns == {"answer": "left", "box": [1, 2, 3, 4], "n": 5, "meta": meta}
    assert set_of.fields(1).columns == {"answer": None, "box": None, "n": 5, "meta": None}
    stored = datasets.Dataset.from_list([row, row])
    assert load_train(config(columns=names), stored).fields(1).columns["box"] == [1, 2, 3, 4]
    message = refusal(row, columns={"prompt": "question", "answer": "meta.gold.txt"})
    assert "data.columns.answer is 'meta.gold.txt'" in message and "'meta.gold.text'" in message
    message = refusal([row, {**row, "meta": "left"}], columns=names)
    assert message.startswith("train row 1: data.columns.answer is 'meta.gold.text', and 'meta' is a str")


def test_answer_from() -> None:
    asked = ({"role": "user", "content": "2 + 2?"},)
    assert read({"messages": TALK}).columns == {"answer": "4"}
    assert read({"messages": TALK}, answer_from="column").columns == {}
    assert read({"messages": TALK, "answer": "four"}, answer_from="column").columns == {"answer": "four"}
    assert read({"messages": TALK, "answer": "four"}, answer_from="last_turn").columns == {"answer": "4"}
    assert read({"messages": TALK, "answer": 4}).columns == {"answer": "4"}
    for row in ({"prompt": TALK}, {"messages": TALK}):
        for answer_from in ("column", "last_turn"):
            assert read(row, answer_from=answer_from).messages == asked


def test_two_layouts_that_give_different_prompts_are_refused() -> None:
    row = {"prompt": "Think. What?", "problem": "What?", "image": "a.png", "solution": "<answer>1</answer>"}
    message = refusal(row)
    assert "'prompt' (layout trl) and 'problem' (layout r1v)" in message
    assert "data.layout=trl or data.layout=r1v" in message and "data.columns.prompt=problem" in message
    assert read(row, layout="trl").columns == {"problem": "What?", "solution": "<answer>1</answer>"}
    assert read(row, layout="r1v").messages[0]["content"][1]["text"] == "What?"
    assert read(row, columns={"prompt": "prompt"}).messages[0]["content"][1]["text"] == "Think. What?"
    assert read(row, columns={"prompt": "problem"}).messages[0]["content"][1]["text"] == "What?"
    both = {"prompt": "Think. What?", "messages": [ASKED], "image": "a.png"}
    assert refusal(both).endswith("Set data.columns.prompt=prompt or data.columns.prompt=messages")
    same = {"prompt": "What?", "messages": [ASKED, {"role": "assistant", "content": "1"}], "image": "a.png"}
    assert read(same).layout == "trl"
    assert read({"prompt": "What?", "problem": 17, "image": "a.png"}).columns == {"problem": 17}


def swift(question: str, reply: Any, **objects: Any) -> dict[str, Any]:
    talk = [{"role": "user", "content": question}]
    talk += [] if reply is None else [{"role": "assistant", "content": reply}]
    return {"messages": talk, "image": "a.png", "objects": objects}


def test_objects_of_ms_swift(caplog: pytest.LogCaptureFixture) -> None:
    row = swift("What is in <bbox>?", "A <ref-object>.", ref=["dog"], bbox=[[1.0, 2.0, 3.0, 4.5]])
    assert read(row).messages[0]["content"][1]["text"] == "What is in [1, 2, 3, 4.5]?"
    assert (read(row).columns["answer"], read(row).boxes) == ("A dog.", True)
    load_train(config(), [row, row])
    assert ["<bbox>" in r.getMessage() for r in caplog.records] == [True]  # one warning of boxes in prompts
    click = read(swift("Open it", "click(<bbox>)", ref=[], bbox=[[615, 226]]))
    assert (click.columns["answer"], click.boxes) == ("click([615, 226])", False)
    asked = read(swift("Find the <ref-object>", None, ref=["dog"], bbox=[[1, 2, 3, 4]] * 2))
    assert (asked.layout, asked.columns.get("answer")) == ("ms_swift", None)
    coco = swift("Find it", None, bbox=[[1, 2, 3, 4]], category=[3])  # another set's objects, for a reward
    assert read(coco).layout == "trl"


def said(*turns: Any, **row: Any) -> dict[str, Any]:
    return {"conversations": list(turns), "image": "a.png", **row}


def replied(reply: Any, *content: Any) -> dict[str, Any]:
    seen = {"type": "image_url", "image_url": {"url": "a.png"}}
    talk = [{"role": "user", "content": [seen, *content]}, {"role": "assistant", "content": reply}]
    return {"messages": talk}


HUMAN = {"from": "human", "value": "<image>What?"}
BOX = [[1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("options", "row", "words"),
    [
        ({}, said(HUMAN, {"from": "gpt", "value": None}), ("conversations[1]", "None")),
        ({}, said(HUMAN, {"from": "gpt", "value": " "}), ("conversations[1]", "reply")),
        ({}, said(HUMAN, system=3), ("'system' is 3",)),
        ({"layout": "sharegpt"}, said() | {"conversations": None}, ("'conversations' is null",)),
        ({"layout": "sharegpt"}, {"prompt": "?", "image": "a.png"}, ("'conversations'", "data.layout")),
        ({}, {"messages": swift("?", "<bbox>")["messages"], "objects": None}, ("<bbox>", "'objects'")),
        ({}, swift("?", "<bbox>", bbox=BOX * 2), ("<bbox>", "objects.bbox: 2")),
        ({}, swift("?", "<bbox>", bbox=[[1, 2, 3]]), ("objects.bbox", "[1, 2, 3]")),
        ({}, swift("?", "<bbox>", bbox="all"), ("objects.bbox",)),
        ({}, swift("?", "<bbox>", bbox=BOX, bbox_type="norm1000"), ("'objects'", "'norm1000'")),
        ({}, replied([{"type": "text", "text": None}]), ("messages[1]", "reply")),
        ({}, replied("4", {"type": "image_url", "image_url": {"url": None}}), ("messages[0].content[1]", "url")),
        ({"layout": "trl"}, {"messages": TALK, "image": "a.png"}, ("'messages'", "data.answer_from=last_turn")),
        ({}, {"messages": TALK, "answer": "four", "image": "a.png"}, ("'answer'", "data.answer_from=column")),
        ({"answer_from": "last_turn"}, {"prompt": "2 + 2?", "image": "a.png"}, ("'prompt'", "data.answer_from")),
    ],
)  # fmt: skip
def test_a_row_of_no_layout_is_refused_by_its_field(options: Any, row: Any, words: tuple[str, ...]) -> None:
    message = refusal([row], **options)
    assert message.startswith("train row 0: ") and "\n" not in message
    assert all(word in message for word in words), message


def test_base64_is_never_printed() -> None:
    url, bare = data_url(1), base64.b64encode(png(1)).decode()
    text = {"type": "text", "text": {"url": url}}
    for row in (
        {"prompt": "?", "image": bare},
        {"prompt": "?", "image": url[:-40] + "@@@"},
        {"prompt": "?", "image": {"bytes": None, "path": bare}},
        {"prompt": [{"role": url, "content": "?"}], "image": "a.png"},
        {"prompt": [{"role": "user", "content": [text]}]},
        {"messages": [ASKED, {"role": "assistant", "content": [text]}]},
        said({"from": bare, "value": "x"}),
        swift("?", "<bbox>", bbox=[[1, 2, 3, url]]),
    ):
        with pytest.raises(DataError) as caught:
            load_train(config(), [row]).sample(0)
        assert bare[12:40] not in str(caught.value) and len(str(caught.value)) < 600
