"""Gradients become ready in one order, whatever a pack holds: ZeRO-2 adds them up by their place in it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.families import TABLE, legal_tokens
from helpers.passes import forward_of, orders_of
from transformers import AutoModelForImageTextToText

from mm_grpo.learner.pack import Item, Pack, dummy_pack, layout
from mm_grpo.processors.base import Processor, load_processor

UNREAD = re.compile(r"vision_tower\.post_layernorm")
"""LLaVA-OneVision takes the states before it."""


def packs_of(processor: Processor) -> dict[str, Pack]:
    samples = {
        "image": tiny.sample("a", "x", (tiny.picture(1),)),
        "images": tiny.sample("b", "x", (tiny.picture(1), tiny.picture(2, 56, 112))),
        "text": tiny.sample("c", "xyz"),
    }
    if getattr(processor, "video_token_id", None) is not None:
        videos = tiny.video(3, 4, 56, 56), tiny.video(4, 2, 56, 56)
        samples["video"] = tiny.sample("d", "x", (), videos[:1])
        samples["images and videos"] = tiny.sample("e", "x", (tiny.picture(1), tiny.picture(2)), videos)
    legal = tuple(legal_tokens(processor)[20:28])
    items = {n: Item(i, i, processor.prompt(s), legal[:2]) for i, (n, s) in enumerate(samples.items())}
    more = [Item(5 + g, 2, items["text"].prompt, legal) for g in range(6)]
    rows = {
        **{name: [[item]] for name, item in items.items()},
        "mixed": [[items["images"]], [items["text"]]],
        "long": [[items["text"], *more]],
    }
    media = processor.media_token_ids
    packs = {name: layout(each, media) for name, each in rows.items()}
    return packs | {"dummy_pack": dummy_pack(legal[0], processor.family.position_axes)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tie", "checkpointing"),
    [*((family, False, False) for family in TABLE), ("qwen3_vl", True, False), ("qwen3_vl", True, True)],
)
@pytest.mark.field_bug("text-rank")
def test_every_pack_gives_every_gradient_in_one_order(
    family: str, tie: bool, checkpointing: bool, models: dict[str, Path], tmp_path: Path
) -> None:
    path = models[family] if tie else tiny.build(family, tmp_path, tie=False)
    model: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    processor = load_processor(str(path))
    module = forward_of(model, processor)
    order = orders_of(model)
    orders: dict[str, list[str]] = {}
    for name, pack in packs_of(processor).items():
        order.clear()
        logp, entropy, _ = module(pack)
        (logp + entropy).sum().backward()
        orders[name] = list(order)
    every = {n for n, _ in model.named_parameters()}
    assert set(orders["image"]) <= every and len(orders["image"]) == len(set(orders["image"]))
    assert all(UNREAD.search(name) for name in every - set(orders["image"]))
    assert orders == dict.fromkeys(orders, orders["image"])


def test_the_smallest_pack_has_no_weight() -> None:
    pack = dummy_pack(7, (3,))
    assert pack.input_ids.tolist() == [[7, 7]] and pack.segments.tolist() == [[0, 1]]
    assert (pack.sources.tolist(), pack.targets.tolist(), pack.pictured) == ([0], [7], ())
