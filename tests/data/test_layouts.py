"""Layouts of rows: the same conversation in six of them, and sets as they are published."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from layout_rows import (
    CONVERSATIONS,
    IMAGE,
    WRITERS,
    config,
    png,
    refusal,
)

from mm_grpo.data.layouts import LAYOUTS
from mm_grpo.data.rows import read_row
from mm_grpo.data.sources import load_train
from mm_grpo.errors import DataError

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize("named", [True, False])
def test_twelve_conversations_in_six_layouts_are_equal_prompts(
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
        assert [set_of.fields(i).layout for i in range(12)] == [name] * 12
        assert "answer" in set_of.columns
        prompts[name] = [processor.prompt(set_of.sample(i)) for i in range(12)]
    first = prompts["trl"]
    assert len({prompt.token_ids for prompt in first}) == 12
    for name, of_layout in prompts.items():
        for want, got, (_, seeds, answer) in zip(first, of_layout, CONVERSATIONS, strict=True):
            assert got.token_ids == want.token_ids, name
            assert got.engine_prompt.token_ids == want.engine_prompt.token_ids, name
            assert [i.tobytes() for i in got.engine_prompt.images] == [
                i.tobytes() for i in want.engine_prompt.images
            ]
            assert len(got.engine_prompt.images) == len(seeds)
            assert got.vision.keys() == want.vision.keys()
            assert all(torch.equal(got.vision[key], want.vision[key]) for key in want.vision)
            assert got.sample.columns["answer"] == answer


def test_turns_and_a_system_message_in_the_layouts_that_have_them() -> None:
    turns = [("user", "<image>What is it?"), ("assistant", "A cat."), ("user", "What colour?")]
    system, reply = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "black"}
    messages = [{"role": role, "content": text} for role, text in turns]
    said = [
        {"from": {"user": "human", "assistant": "gpt"}[role], "value": text}
        for role, text in [*turns, ("assistant", "black")]
    ]
    image = {"image": "a.png"}
    rows = {
        "trl": {"messages": [system, *messages], "answer": "black", **image},
        "verl": {
            "prompt": [system, *messages],
            "data_source": "x",
            "reward_model": {"ground_truth": "black"},
            **image,
        },
        "ms_swift": {"messages": [system, *messages, reply], **image},
        "sharegpt": {"conversations": said, "system": "Be brief.", **image},
    }
    read = {name: read_row(row, row_name="row 0") for name, row in rows.items()}
    for name, fields in read.items():
        assert fields.messages == read["verl"].messages, name
        assert fields.messages[0] == system
        assert fields.messages[1]["content"] == [IMAGE, {"type": "text", "text": "What is it?"}]
        assert fields.columns["answer"] == "black"
    assert [fields.layout for fields in read.values()] == ["ms_swift", "verl", "ms_swift", "sharegpt"]
    assert read["sharegpt"].columns == {"answer": "black"}


# Sets as they are published: their columns and forms, with pictures and texts of our own


def bytes_of(seed: int) -> dict[str, Any]:
    return {"bytes": png(seed), "path": None}


def geometry3k(folder: Path) -> Any:
    rows = {
        "images": [[bytes_of(1)], [bytes_of(2)]],
        "problem": ["<image>What is the length of AB?", "<image>Find y."],
        "answer": ["7", "3 \\sqrt { 5 }"],
    }
    return datasets.Dataset.from_dict(
        rows,
        features=datasets.Features(
            images=datasets.List(datasets.Image()),
            problem=datasets.Value("string"),
            answer=datasets.Value("string"),
        ),
    )


def clevr_counting(folder: Path) -> Any:
    rows = {
        "image": [bytes_of(1), bytes_of(2)],
        "problem": ["How many items are there in the described scene?", "How many balls do you see?"],
        "solution": ["<answer> 4 </answer>", "<answer> 9 </answer>"],
    }
    features = datasets.Features(
        image=datasets.Image(), problem=datasets.Value("string"), solution=datasets.Value("string")
    )
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(folder / "train.parquet"))
    return folder / "train.parquet"


def llava_instruct(folder: Path) -> Any:
    (folder / "000000000001.jpg").write_bytes(png(1))
    turns = ["What stands on the table?\n<image>", "A vase.", "Is it full?", "No, it is empty."]
    row = {
        "id": "000000000001",
        "image": "000000000001.jpg",
        "conversations": [
            {"from": "human" if at % 2 == 0 else "gpt", "value": t} for at, t in enumerate(turns)
        ],
    }
    (folder / "instruct.json").write_text(json.dumps([row, row]))
    return folder / "instruct.json"


def swift_grounding(folder: Path) -> Any:
    (folder / "a.jpg").write_bytes(png(1))
    talk = [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": "<image>Find the <ref-object> in the picture"},
        {"role": "assistant", "content": "<bbox><bbox>"},
    ]
    objects = {"ref": ["grey square"], "bbox": [[4.5, 8, 20, 31], [30, 40, 50.25, 60]]}
    row = {"messages": talk, "images": ["a.jpg"], "objects": objects}
    (folder / "grounding.jsonl").write_text(json.dumps(row) + "\n")
    return folder / "grounding.jsonl"


def verl_geo3k(folder: Path) -> Any:
    task = "<image>What is the length of AB? Think first, then answer in a box."
    row = {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": task}],
        "images": [bytes_of(1)],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {"split": "train", "index": 0, "answer": "7", "question": "<image>What?"},
    }
    set_of = datasets.Dataset.from_list([row, row]).cast_column("images", datasets.List(datasets.Image()))
    set_of.to_parquet(str(folder / "train.parquet"))
    return folder / "train.parquet"


@pytest.mark.parametrize(
    ("publish", "layout", "asked", "answer", "columns"),
    [
        (geometry3k, "verl", [IMAGE, "What is the length of AB?"], "7", {"answer"}),
        (
            clevr_counting,
            "r1v",
            [IMAGE, "How many items are there in the described scene?"],
            "4",
            {"solution", "answer"},
        ),
        (llava_instruct, "sharegpt", "Is it full?", "No, it is empty.", {"id", "answer"}),
        (
            swift_grounding,
            "ms_swift",
            [IMAGE, "Find the grey square in the picture"],
            "[4.5, 8, 20, 31][30, 40, 50.25, 60]",
            {"objects", "answer"},
        ),
        (
            verl_geo3k,
            "verl",
            [IMAGE, "What is the length of AB? Think first, then answer in a box."],
            "7",
            {"data_source", "ability", "reward_model", "extra_info", "answer"},
        ),
    ],
)
def test_published_sets_load_without_a_column_map(
    publish: Callable[[Path], Any], layout: str, asked: Any, answer: str, columns: set[str], tmp_path: Path
) -> None:
    set_of = load_train(config(), publish(tmp_path))
    sample = set_of.sample(0)
    if isinstance(asked, list):
        asked = [{"type": "text", "text": part} if isinstance(part, str) else part for part in asked]
    assert set_of.fields(0).layout == layout
    assert sample.messages[-1] == {"role": "user", "content": asked}
    assert sample.columns["answer"] == answer
    assert [image.size for image in sample.images] == [(84, 84)]
    assert set(set_of.columns) == columns == set(sample.columns)


def test_dotted_columns_reach_into_mappings_and_lists() -> None:
    row = {
        "question": "Where?",
        "image": "a.png",
        "meta": {"gold": {"text": "left"}, "boxes": [[1, 2, 3, 4]]},
        "a.b": 5,
    }
    names = {"prompt": "question", "answer": "meta.gold.text", "box": "meta.boxes.0", "n": "a.b"}
    set_of = load_train(config(columns=names), [row, {**row, "meta": None}])
    assert set_of.sample
    assert set_of.fields(0).columns == {"answer": "left", "box": [1, 2, 3, 4], "n": 5, "meta": row["meta"]}
    assert set_of.fields(1).columns == {"answer": None, "box": None, "n": 5, "meta": None}
    stored = datasets.Dataset.from_list([row, row])
    assert load_train(config(columns=names), stored).fields(1).columns["box"] == [1, 2, 3, 4]
    message = refusal(row, columns={"prompt": "question", "answer": "meta.gold.txt"})
    assert "data.columns.answer is 'meta.gold.txt'" in message and "did you mean 'meta.gold.text'?" in message
    message = refusal([row, {**row, "meta": "left"}], columns=names)
    assert message == (
        "train row 1: data.columns.answer is 'meta.gold.text', and 'meta' is a str in this row, which has no 'gold'; "
        "legal is a mapping with that key, or null"
    )


def test_images_below_a_dot_stay_encoded() -> None:
    features = datasets.Features(
        prompt=datasets.Value("string"), shown={"photo": datasets.Image(), "by": datasets.Value("string")}
    )
    broken = {"photo": {"bytes": b"no image", "path": None}, "by": "us"}
    rows = {"prompt": ["?"] * 2, "shown": [{"photo": bytes_of(1), "by": "us"}, broken]}
    stored = datasets.Dataset.from_dict(rows, features=features)
    set_of = load_train(config(columns={"image": "shown.photo"}), stored)
    assert set_of.sample(0).images[0].size == (84, 84)
    assert set_of.fields(1).images == ({"bytes": b"no image", "path": None},)


def test_answer_from() -> None:
    talk = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    asked = ({"role": "user", "content": "2 + 2?"},)

    def read(row: dict[str, Any], **options: Any) -> Any:
        return read_row(row, row_name="row 3", **options)

    assert read({"messages": talk}).columns == {"answer": "4"}
    assert read({"messages": talk}, answer_from="column").columns == {}
    assert read({"messages": talk, "answer": "four"}, answer_from="column").columns == {"answer": "four"}
    assert read({"messages": talk, "answer": "four"}, answer_from="last_turn").columns == {"answer": "4"}
    assert read({"messages": talk, "answer": 4}).columns == {"answer": "4"}
    for row in ({"prompt": talk}, {"messages": talk}):
        for answer_from in ("column", "last_turn"):
            assert read(row, answer_from=answer_from).messages == asked
    for row, options, told in [
        ({"prompt": talk}, {}, "row 3: 'prompt' ends with a message of role 'assistant'"),
        ({"messages": talk}, {"layout": "trl"}, "row 3: 'messages' ends with a message of role 'assistant'"),
        (
            {"messages": talk, "answer": "four"},
            {},
            "row 3: the row has the column 'answer', and 'messages' ends with a reply, which is the answer in the "
            "layout ms_swift. Set data.answer_from=column or data.answer_from=last_turn",
        ),
        (
            {"prompt": "2 + 2?"},
            {"answer_from": "last_turn"},
            "row 3: data.answer_from is last_turn, and 'prompt' does not end with a turn of the assistant (the prompt "
            "is a string)",
        ),
    ]:
        with pytest.raises(DataError) as caught:
            read(row, **options)
        assert str(caught.value).startswith(told)


def test_two_layouts_that_give_different_prompts_are_refused() -> None:
    asked = [{"role": "user", "content": "What?"}]
    row = {"prompt": "Think. What?", "problem": "What?", "image": "a.png", "solution": "<answer>1</answer>"}
    message = refusal(row)
    assert message == (
        "train row 0: the columns 'prompt' (layout trl) and 'problem' (layout r1v) give different prompts. "
        "Set data.layout=trl or data.layout=r1v (or data.columns.prompt=prompt or data.columns.prompt=problem)"
    )

    def read(row: dict[str, Any], **data: Any) -> Any:
        return load_train(config(**data), [row]).fields(0)

    assert read(row, layout="trl").columns == {"problem": "What?", "solution": "<answer>1</answer>"}
    assert read(row, layout="r1v").messages[0]["content"][1]["text"] == "What?"
    assert read(row, columns={"prompt": "prompt"}).messages[0]["content"][1]["text"] == "Think. What?"
    assert read(row, columns={"prompt": "problem"}).messages[0]["content"][1]["text"] == "What?"
    both = {"prompt": "Think. What?", "messages": asked, "image": "a.png"}
    assert refusal(both).endswith("Set data.columns.prompt=prompt or data.columns.prompt=messages")
    other = {"messages": asked, "conversations": [{"from": "human", "value": "Why?"}], "image": "a.png"}
    assert "'messages' (layout trl) and 'conversations' (layout sharegpt)" in refusal(other)
    same = {"prompt": "What?", "messages": [*asked, {"role": "assistant", "content": "1"}], "image": "a.png"}
    assert read(same).layout == "trl"
    number = {"prompt": "What?", "problem": 17, "image": "a.png"}
    assert read(number).columns == {"problem": 17}


def test_objects_of_ms_swift() -> None:
    def row(question: str, reply: str | None, **objects: Any) -> dict[str, Any]:
        talk = [{"role": "user", "content": question}]
        talk += [] if reply is None else [{"role": "assistant", "content": reply}]
        return {"messages": talk, "image": "a.png", "objects": objects}

    fields = read_row(
        row("What is in <bbox>?", "A <ref-object>.", ref=["dog"], bbox=[[1.0, 2.0, 3.0, 4.5]]), row_name="r"
    )
    assert fields.messages[0]["content"][1]["text"] == "What is in [1, 2, 3, 4.5]?"
    assert (fields.columns["answer"], fields.boxes) == ("A dog.", True)
    click = read_row(row("Open it", "click(<bbox>)", ref=[], bbox=[[615, 226]]), row_name="r")
    assert (click.columns["answer"], click.boxes) == ("click([615, 226])", False)
    asked = read_row(row("Find the <ref-object>", None, ref=["dog"], bbox=[[1, 2, 3, 4]] * 2), row_name="r")
    assert (asked.layout, asked.columns.get("answer")) == ("ms_swift", None)
    coco = {"bbox": [[1, 2, 3, 4]], "category": [3]}  # another set's objects, for a reward
    plain = {"messages": [{"role": "user", "content": "Find it"}], "image": "a.png", "objects": coco}
    assert read_row(plain, row_name="r").layout == "trl"


def test_boxes_in_the_prompt_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    talk = [{"role": "user", "content": "What is in <bbox>?"}, {"role": "assistant", "content": "A dog."}]
    row = {"messages": talk, "image": "a.png", "objects": {"bbox": [[1, 2, 3, 4]]}}
    load_train(config(), [row, row])
    assert [r.getMessage() for r in caplog.records] == [
        "train row 0: the prompt's boxes (<bbox>) are written with the numbers of 'objects'; a model that counts "
        "pixels of the resized image, or thousandths, reads others: write them as the model counts"
    ]
