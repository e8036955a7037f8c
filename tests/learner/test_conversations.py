"""Conversations of several turns in packs: log-probs and gradients are those of the plain forward of each one."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from helpers import tiny
from torch import Tensor
from transformers import AutoModelForImageTextToText

from mm_grpo.learner.forward import PackForward
from mm_grpo.learner.image_features import SharedFeatures
from mm_grpo.learner.pack import Item, layout, pictured_of, plan
from mm_grpo.processors.base import Processor, load_processor
from mm_grpo.rollout.conversation import Conversation
from mm_grpo.types import Completion, Picture, Prompt

FAMILIES = [*tiny.FAMILIES, tiny.HYBRID]


def legal_ids(processor: Processor) -> list[int]:
    return [token for token in range(270) if token not in processor.media_token_ids]


def conversation(
    start: Prompt, processor: Processor, rng: random.Random, shown: list[Picture], turns: int
) -> Conversation:
    """Turns of random tokens, with observations of text and of 0 to 2 of the pictures `shown` between them."""
    made, legal = Conversation(start, processor), legal_ids(processor)
    config = processor.config  # type: ignore[attr-defined]
    image = (config.vision_start_token_id, config.image_token_id, config.vision_end_token_id)
    for turn in range(turns):
        ids = tuple(rng.choices(legal, k=rng.randint(1, 6)))
        made.answered(Completion(ids, (0.0,) * len(ids), "", "stop", turn))
        if turn < turns - 1:
            pictures = rng.choices(shown, k=rng.choice([0, 1, 1, 2]))
            made.observed([*rng.choices(legal, k=3), *image * len(pictures), rng.choice(legal)], pictures)
    return made


def items_of(conversations: list[Conversation], groups: list[int]) -> list[Item]:
    return [
        Item(i, group, c.start, tuple(t for a in c.answers for t in a.token_ids), tail=c.tail())
        for i, (c, group) in enumerate(zip(conversations, groups, strict=True))
    ]


def plain(model: Any, processor: Processor, c: Conversation) -> Tensor:
    """Log-probs [T] of what was sampled, by transformers' own forward of the whole conversation."""
    whole = c.prompt
    ids = torch.tensor([whole.token_ids])
    kinds = (ids == model.config.image_token_id).int()
    logits = model(input_ids=ids, mm_token_type_ids=kinds, **whole.vision, use_cache=False).logits[0]
    logits[:, sorted(processor.media_token_ids)] = -1e9
    logp = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    tail = c.tail()
    sampled = [True] * c.run_length if tail is None else list(tail.sampled)
    return logp[len(c.start.token_ids) - 1 :][torch.tensor(sampled)]


def cases(
    processor: Processor, seed: int, groups: int = 3, each: int = 4
) -> tuple[list[Conversation], list[int]]:
    """Conversations of 1 to 4 turns after prompts with two images, one and none; they share some pictures."""
    rng = random.Random(seed)
    sizes = [(84, 84), (56, 140), (112, 84)]
    shown = [processor.picture(tiny.picture(50 + i, *size), row="a") for i, size in enumerate(sizes)]
    images = [(tiny.picture(1, 84, 84), tiny.picture(2, 56, 140)), (tiny.picture(3, 112, 84),), ()]
    starts = [processor.prompt(tiny.sample(str(g), "what is it", images[g % 3])) for g in range(groups)]
    pairs = [(start, g) for g, start in enumerate(starts) for _ in range(each)]
    made = [conversation(start, processor, rng, shown, rng.randint(1, 4)) for start, _ in pairs]
    return made, [g for _, g in pairs]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packs_equal_the_plain_forward(family: str, checkpointing: bool, models: dict[str, Any]) -> None:
    model = AutoModelForImageTextToText.from_pretrained(models[family], dtype=torch.float32).train()
    processor = load_processor(str(models[family]))
    reference = copy.deepcopy(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    conversations, groups = cases(processor, seed=3)
    assert sum(len(c.tail().pictures) for c in conversations if c.tail()) > 8  # type: ignore[union-attr]
    items = items_of(conversations, groups)
    weights = [torch.linspace(-1, 2, len(i.token_ids)) * (1 + i.index % 3) for i in items]
    expected = [plain(reference, processor, c) for c in conversations]
    sum((w * logp).sum() for w, logp in zip(weights, expected, strict=True)).backward()

    module = PackForward(
        model, media_token_ids=processor.media_token_ids, family=processor.family, temperature=1.0
    )
    packs = plan(items, max_tokens=220)
    assert len(packs) > 1
    pictured = [[one for row in rows for one in pictured_of(row)] for rows in packs]
    module.features = shared = SharedFeatures(model, processor.family, pictured)
    for rows in packs:
        logp, _ = module(layout(rows, processor.media_token_ids))
        want = torch.cat([expected[i.index] for row in rows for i in row])
        assert (logp - want).abs().max() <= 1e-5
        (torch.cat([weights[i.index] for row in rows for i in row]) * logp).sum().backward()
    for (name, got), want in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert got.grad is not None and want.grad is not None
        gap = (got.grad - want.grad).norm() / want.grad.norm().clamp(min=1e-8)
        assert gap <= 1e-5, (name, gap)
    # with a trained tower an image is encoded once with gradients, and once without where packs share it
    distinct = {id(one) for pack in pictured for one in pack}
    sightings = sum(len({id(one) for one in pack}) for pack in pictured)
    images = sum(
        processor.family.count(one.vision) for one in {id(o): o for p in pictured for o in p}.values()
    )
    assert shared.encoded <= 2 * images and sightings > len(distinct)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_packs_round_no_more_than_the_plain_forward(family: str, models: dict[str, Any]) -> None:
    """Both against the plain forward in fp32, over weights that bfloat16 holds."""
    model = AutoModelForImageTextToText.from_pretrained(models[family], dtype=torch.bfloat16).train()
    processor = load_processor(str(models[family]))
    exact = copy.deepcopy(model).float()
    plainly = copy.deepcopy(model)
    conversations, groups = cases(processor, seed=4)
    module = PackForward(
        model, media_token_ids=processor.media_token_ids, family=processor.family, temperature=1.0
    )
    items, worst = items_of(conversations, groups), {"packs": 0.0, "plain": 0.0}
    with torch.no_grad():
        truth = [plain(exact, processor, c) for c in conversations]
        for c, want in zip(conversations, truth, strict=True):
            worst["plain"] = max(
                worst["plain"], float((plain(plainly, processor, c).float() - want).abs().max())
            )
        for rows in plan(items, max_tokens=220):
            logp, _ = module(layout(rows, processor.media_token_ids))
            want = torch.cat([truth[i.index] for row in rows for i in row])
            worst["packs"] = max(worst["packs"], float((logp.float() - want).abs().max()))
    assert 0 < worst["packs"] <= 1.5 * worst["plain"]
