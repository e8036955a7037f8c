"""Layouts of rows: the same conversation in six of them, sets as they are published, and rows that are wrong."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import numpy
import pytest
import torch
from helpers import tiny

from mm_grpo.config import GRPOConfig
from mm_grpo.data.layouts import LAYOUTS
from mm_grpo.data.rows import read_row
from mm_grpo.data.sources import load_train
from mm_grpo.errors import ConfigError, DataError, UserError

IMAGE = {"type": "image"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def config(**data: Any) -> GRPOConfig:
    return GRPOConfig.from_dict({"model": {"path": "m"}, "data": data})


def refusal(rows: Any, **data: Any) -> str:
    with pytest.raises(DataError) as caught:
        load_train(config(**data), rows if isinstance(rows, list) else [rows])
    return str(caught.value)


@cache
def png(seed: int) -> bytes:
    file = BytesIO()
    tiny.picture(seed, 56 + 28 * (seed % 3), 84).save(file, "PNG")
    return file.getvalue()


# Twelve conversations: the text, in which {0} stands for a picture, the pictures, the answer.
CONVERSATIONS: list[tuple[str, tuple[int, ...], str]] = [
    ("{0}Find x.", (1,), "12"),
    ("{0}\nHow many red cubes are there?", (2,), "3"),
    ("How long is the side? {0}", (3,), "5 \\sqrt { 2 }"),
    ("Is {0} like {1}?", (1, 2), "yes"),
    ("{0}{1}Which is larger?", (3, 1), "the second"),
    ("{0}\n{1}\n{2}\nSort them.", (1, 2, 3), "2, 1, 3"),
    ("{0}Was steht hier: \u201egr\u00fcn\u201c?", (4,), "\u7eff\u8272"),
    ("{0} <b>Bold</b> & \"quoted\" text?", (5,), "no"),
    ("{0}  two  spaces\t", (6,), "  "[:0] + "2"),
    ("Look: {0}, then say {{x}} or {{y}}.", (7,), "x"),
    ("{0}\nA. one\nB. two\nAnswer with the letter.", (8,), "B"),
    ("{0}The same picture twice: {1}", (9, 9), "yes"),
]  # fmt: skip


def tagged(text: str, count: int) -> str:
    return text.format(*["<image>"] * count)


def parts(text: str, images: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The text as parts, with `images` in their places."""
    pieces: list[dict[str, Any]] = []
    for at, piece in enumerate(tagged(text, len(images)).split("<image>")):
        pieces += [images[at - 1]] if at else []
        pieces += [{"type": "text", "text": piece}] if piece else []
    return pieces


def data_url(seed: int) -> str:
    return "data:image/png;base64," + base64.b64encode(png(seed)).decode()


def trl(text: str, seeds: tuple[int, ...], answer: str) -> dict[str, Any]:
    content = parts(text, [dict(IMAGE) for _ in seeds])
    images = [tiny.picture(s, 56 + 28 * (s % 3), 84) for s in seeds]
    return {"prompt": [{"role": "user", "content": content}], "images": images, "answer": answer}


def openai(text: str, seeds: tuple[int, ...], answer: str) -> dict[str, Any]:
    images = [{"type": "image_url", "image_url": {"url": data_url(seed), "detail": "low"}} for seed in seeds]
    reply = {"role": "assistant", "content": answer}
    return {"messages": [{"role": "user", "content": parts(text, images)}, reply]}


def verl(text: str, seeds: tuple[int, ...], answer: str) -> dict[str, Any]:
    return {
        "data_source": "drawn/figures",
        "prompt": [{"role": "user", "content": tagged(text, len(seeds))}],
        "images": [{"bytes": png(seed), "path": None} for seed in seeds],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": "train", "index": 0},
    }


def ms_swift(text: str, seeds: tuple[int, ...], answer: str) -> dict[str, Any]:
    reply = {"role": "assistant", "content": answer}
    return {
        "messages": [{"role": "user", "content": tagged(text, len(seeds))}, reply],
        "images": [f"{s}.png" for s in seeds],
    }


def sharegpt(text: str, seeds: tuple[int, ...], answer: str) -> dict[str, Any]:
    names = [f"{s}.png" for s in seeds]
    return {
        "id": "000001",
        "image": names[0] if len(names) == 1 else names,
        "conversations": [
            {"from": "human", "value": tagged(text, len(seeds))},
            {"from": "gpt", "value": answer},
        ],
    }


def r1v(text: str, seeds: tuple[int, ...], answer: str) -> dict[str, Any]:
    first = len(seeds) == 1 and text.startswith("{0}")  # R1-V puts its one picture first by itself
    problem = text.format("") if first else tagged(text, len(seeds))
    image = {"image": png(seeds[0])} if first else {"images": [png(seed) for seed in seeds]}
    return {**image, "problem": problem, "solution": f"<answer> {answer} </answer>"}


WRITERS: dict[str, Callable[..., dict[str, Any]]] = {
    "trl": trl, "openai": openai, "verl": verl, "ms_swift": ms_swift, "sharegpt": sharegpt, "r1v": r1v,
}  # fmt: skip


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


def said(*turns: Any) -> dict[str, Any]:
    return {"conversations": list(turns), "image": "a.png"}


def swift(reply: Any = "<bbox>", **row: Any) -> dict[str, Any]:
    talk = [{"role": "user", "content": "<image>Find it"}, {"role": "assistant", "content": reply}]
    return {"messages": talk, "images": ["a.png"], **row}


def openai_row(*content: Any, reply: Any = "4") -> dict[str, Any]:
    seen = {"type": "image_url", "image_url": {"url": "a.png"}}
    return {
        "messages": [
            {"role": "user", "content": [seen, *content]},
            {"role": "assistant", "content": reply},
        ]
    }


TWO_TAGS = "<image> tags in the prompt: 2; images in the row: 1"
ALONE = {"messages": [{"role": "assistant", "content": "A <image>"}], "images": ["a.png"]}
HUMAN = {"from": "human", "value": "<image>What?"}


@pytest.mark.parametrize(
    ("layout", "row", "told"),
    [
        (None, said(HUMAN, {"from": "alien", "value": "x"}), "conversations[1]: 'from' is 'alien'; legal is one of"),
        (None, said(HUMAN, {"from": "gpt", "value": None}), "conversations[1]: 'value' is None; legal is text"),
        (None, said(HUMAN, {"from": None, "value": None}), "conversations[1]: 'from' is None"),
        (None, said(HUMAN, {"from": ["gpt"], "value": "x"}), "conversations[1]: 'from' is ['gpt']"),
        (None, said(HUMAN, "x"), "'conversations' is [{"),
        (None, said(), "'conversations' has no message of role 'user'"),
        (None, said({"from": "gpt", "value": "A cat."}), "'conversations' has no message of role 'user'"),
        (None, said(HUMAN, {"from": "gpt", "value": " "}), "conversations[1]: the reply at the end"),
        (None, said({"from": "human", "value": "<image><image>?"}), TWO_TAGS),
        (None, said(HUMAN) | {"system": 3}, "'system' is 3; legal is text, or null"),
        ("sharegpt", {"conversations": None, "image": "a.png"}, "'conversations' is null"),
        ("sharegpt", {"prompt": "?", "image": "a.png"}, "the row has no column 'conversations'"),
        ("sharegpt", {"conversations": {"from": "human"}, "image": "a.png"}, "'conversations' is {'from': 'human'}"),
        (None, swift(), "<ref-object> or <bbox>, and 'objects' is missing or null"),
        (None, swift(objects={"bbox": []}), "<bbox> tags in the messages: 1; entries of objects.bbox: 0"),
        (None, swift(objects={"bbox": [[1, 2, 3, 4]] * 2}), "<bbox> tags in the messages: 1; entries"),
        (None, swift(objects={"bbox": [[1, 2, 3]]}), "objects.bbox[0] is [1, 2, 3]; legal is a list of 4 numbers"),
        (None, swift(objects={"bbox": [None]}), "objects.bbox[0] is None"),
        (None, swift(objects={"bbox": [[1, 2, 3, None]]}), "objects.bbox[0] is [1, 2, 3, ...]"),
        (None, swift(objects={"bbox": [[1, 2, 3, 10**400]]}), "objects.bbox[0] is [1, 2, 3, ...]"),
        (None, swift(objects={"bbox": "all"}), "objects.bbox is 'all'; legal is a list"),
        (None, swift("<ref-object>", objects={"ref": [3]}), "objects.ref[0] is 3; legal is text"),
        (None, swift(objects={"bbox": [[1, 2, 3, 4]], "bbox_type": "norm1000"}), "objects.bbox_type is 'norm1000'"),
        (None, swift(objects="x"), "'objects' is 'x'; legal is a mapping"),
        (None, swift(None), "messages[1]: the content is a NoneType"),
        (None, swift("x", images=["a.png", "b.png"]), "<image> tags in the prompt: 1; images in the row: 2"),
        (None, swift("x", images=["a.png", None]), "images[1] is null"),
        (None, ALONE, "'messages' has no message of role 'user'"),
        ("ms_swift", {"messages": "What?", "images": ["a.png"]}, "data.layout"),
        ("ms_swift", {"messages": [None], "images": ["a.png"]}, "'messages' is a list; legal is"),
        (None, openai_row(reply=[{"type": "text", "text": None}]), "messages[1]: the reply at the end"),
        (None, openai_row({"type": "image_url", "image_url": {"url": None}}), "messages[0].content[1]: an 'image_url'"),
        (None, openai_row({"type": "image_url", "image_url": None}), "messages[0].content[1]: an 'image_url'"),
        (None, openai_row({"type": "input_audio"}), "messages[0].content[1]: a part of type 'input_audio'"),
        (None, openai_row(None), "messages[0].content[1]: a part of type 'NoneType'"),
        ("openai", {"messages": 3}, "'messages' is a int; legal is"),
        ("verl", {"prompt": "?", "image": "a.png", "reward_model": "rule"}, "'reward_model' is 'rule'; legal"),
        ("verl", {"prompt": None, "problem": None, "images": ["a.png"]}, "'prompt' is null"),
        (None, {"problem": 3, "images": ["a.png"]}, "'problem' is a int; legal is a string"),
        (None, {"problem": "<image> <image>", "image": "a.png"}, TWO_TAGS),
        (None, {"problem": "", "image": "a.png"}, "'problem' is empty"),
        ("r1v", {"problem": "?", "image": "a.png", "solution": {"a": None}}, "'solution' is {'a': None}; legal"),
        ("r1v", {"problem": None, "image": "a.png", "solution": "1"}, "'problem' is null"),
        ("trl", {"messages": [{"role": None, "content": None}], "image": "a.png"}, "messages[0]: the role is None"),
        ("trl", {"prompt": [{"role": "user", "content": None}], "image": "a.png"}, "prompt[0]: the content is a"),
    ],
)  # fmt: skip
def test_hostile_rows_are_one_message_with_row_and_field(layout: str | None, row: Any, told: str) -> None:
    good = {
        "trl": trl,
        "openai": openai,
        "verl": verl,
        "ms_swift": ms_swift,
        "sharegpt": sharegpt,
        "r1v": r1v,
    }
    first = good[layout or "trl"](*CONVERSATIONS[0])
    if told == "data.layout":  # a string is a legal prompt in every layout of messages
        assert load_train(config(layout=layout), [first, row]).fields(1).messages[0]["role"] == "user"
        return
    message = refusal([first, row], layout=layout)
    assert message.startswith("train row 1: ") and "\n" not in message
    assert told in message


@pytest.mark.parametrize("size", [0, 3])
def test_arrays_in_place_of_words_are_refused(size: int) -> None:
    """What rows given in Python may hold: a comparison of an array is an array, and has no truth."""
    array = numpy.arange(size)
    asked = {"role": "user", "content": "?"}
    for row, told in (
        ({"messages": [asked, {"role": array, "content": "x"}]}, "messages[1]: the role is "),
        ({"prompt": [{"role": "user", "content": [{"type": array}]}]}, "a part of type "),
        ({"messages": [{"role": "user", "content": [{"type": array}]}]}, "a part of type "),
        (said(HUMAN) | {"system": array}, "'system' is "),
        (said({"from": array, "value": "x"}), "conversations[0]: 'from' is "),
        ({"messages": [{"role": "system", "content": "x"}, {"role": array, "content": "<image>"}]}, "the role is "),
        ({"conversations": [{"from": "human", "value": "?"}], "system": "x", "images": array}, ""),
    ):  # fmt: skip
        with pytest.raises(DataError) as caught:
            load_train(config(), [row]).sample(0)
        assert told in str(caught.value)


def test_base64_is_never_printed() -> None:
    url, bare = data_url(1), base64.b64encode(png(1)).decode()
    asked = {"role": "user", "content": "?"}
    for row in (
        {"prompt": "?", "image": bare},
        {"prompt": "?", "image": "data:image/png;base64" + bare},
        {"prompt": "?", "image": url[:-40] + "@@@"},
        {"prompt": "?", "image": {"bytes": None, "path": bare}},
        {"prompt": [{"role": url, "content": "?"}], "image": "a.png"},
        {"prompt": [{"role": "user", "content": [{"type": bare}]}], "image": "a.png"},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": {"url": url}}]}]},
        said({"from": bare, "value": "x"}),
        said({"from": "human", "value": [bare]}),
        {"messages": [asked, {"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": url}}]}]},
        {"prompt": "?", "image": "a.png", "data_source": "x", "reward_model": bare},
        swift(objects={"bbox": [bare]}),
        swift(objects={"bbox": [[1, 2, 3, url]]}),
    ):  # fmt: skip
        with pytest.raises(DataError) as caught:
            load_train(config(), [row]).sample(0)
        message = str(caught.value)
        assert bare[12:40] not in message and len(message) < 500
    with pytest.raises(DataError, match=rf"'iVBORw0KGgoA\.\.\.' \({len(bare)} characters\) is base64 alone"):
        load_train(config(), [{"prompt": "?", "image": bare}]).sample(0)


def test_the_layout_that_was_found_is_said(caplog: pytest.LogCaptureFixture) -> None:
    row = said(HUMAN, {"from": "gpt", "value": "A cat."})
    with caplog.at_level("INFO", logger="mm_grpo"):
        assert load_train(config(), [row]).layouts == ("sharegpt",)
        load_train(config(layout="sharegpt"), [row])
        load_train(config(), [{"prompt": "?", "image": "a.png"}])
    assert [r.getMessage() for r in caplog.records] == [
        "train: rows are read in the layout sharegpt (data.layout names one)"
    ]


def test_what_is_missing_is_told_in_one_message() -> None:
    from mm_grpo.rewards.scorer import Scorer

    def graded(completion: str, gold: str, box: list[int]) -> float:
        return 0.0

    scorer = Scorer([graded])
    rows = [{"question": "?", "picture": "a.png", "label": "x"}] * 3
    with pytest.raises(UserError) as caught:
        load_train(config(), rows, needs=scorer.check)
    message = str(caught.value)
    head, *lines = message.splitlines()
    assert head == "train: the rows lack 4 things. Their columns are 'question', 'picture', 'label'"
    assert [line[: line.index(":")] for line in lines] == [
        "- train row 0", "- train row 0", "- reward 'graded' asks for 'gold', which has no default and which no column "
        "supplies; the dataset's columns", "- reward 'graded' asks for 'box', which has no default and which no column "
        "supplies; the dataset's columns",
    ]  # fmt: skip
    assert "data.columns.prompt=question" in lines[0] and "data.columns.images=picture" in lines[1]
    with pytest.raises(UserError) as caught:
        load_train(config(), [{"question": "?", "image": "a.png"}], needs=scorer.check)
    assert "lack 3 things" in str(caught.value) and "no image" not in str(caught.value)
    names = {"prompt": "question", "images": "picture", "gold": "label"}
    with pytest.raises(UserError, match=r"^reward 'graded' asks for 'box'"):
        load_train(config(columns=names), rows, needs=scorer.check)
    with pytest.raises(
        UserError, match=r"^train: the rows lack 3 things(.|\n)*the column 'picture' looks like"
    ):
        load_train(config(columns={"prompt": "question"}), rows, needs=scorer.check)
    assert load_train(config(columns={**names, "box": "question"}), [{**r, "question": "?"} for r in rows])


def test_the_field_names_what_is_legal() -> None:
    with pytest.raises(ConfigError, match=r"^data\.layout = 'swift': must be one of .*ms_swift"):
        config(layout="swift")
