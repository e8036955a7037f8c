"""Six conversations, written as rows of six layouts."""

from __future__ import annotations

import base64
from collections.abc import Callable
from functools import cache
from io import BytesIO
from typing import Any

import pytest
from helpers import tiny
from reading import config

from mm_grpo.data.sources import load_train
from mm_grpo.errors import DataError

IMAGE = {"type": "image"}


def refusal(rows: Any, **data: Any) -> str:
    with pytest.raises(DataError) as caught:
        load_train(config(**data), rows if isinstance(rows, list) else [rows])
    return str(caught.value)


@cache
def png(seed: int) -> bytes:
    file = BytesIO()
    tiny.picture(seed, 56 + 28 * (seed % 3), 84).save(file, "PNG")
    return file.getvalue()


# Six conversations: the text, in which {0} stands for a picture, the pictures, the answer.
CONVERSATIONS: list[tuple[str, tuple[int, ...], str]] = [
    ("How long is the side? {0}", (3,), "5 \\sqrt { 2 }"),
    ("{0}{1}Which is larger?", (3, 1), "the second"),
    ("{0}\n{1}\n{2}\nSort them.", (1, 2, 3), "2, 1, 3"),
    ("{0}Was steht hier: \u201egr\u00fcn\u201c?  ", (4,), "\u7eff\u8272"),
    ("{0}Look: <b>bold</b>, then say {{x}} or {{y}}.\t", (7,), "x"),
    ("{0}The same picture twice: {1}", (9, 9), "yes"),
]


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
