"""Rows that no layout makes sense of, and what is missing in a set: one message each."""

from __future__ import annotations

import base64
from typing import Any

import numpy
import pytest
from layout_rows import (
    CONVERSATIONS,
    config,
    data_url,
    ms_swift,
    openai,
    png,
    r1v,
    refusal,
    sharegpt,
    trl,
    verl,
)

from mm_grpo.data.sources import load_train
from mm_grpo.errors import ConfigError, DataError, UserError

pytestmark = pytest.mark.usefixtures("own_cache")


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
