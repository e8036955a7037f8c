"""The shared-prefix law: packs give the log-probs and gradients of the plain forward, for every family."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import tiny
from torch import Tensor
from transformers import AutoModelForImageTextToText

from mm_grpo.learner.forward import PackForward
from mm_grpo.learner.pack import Item, layout, plan
from mm_grpo.processors.base import Processor, load_processor
from mm_grpo.types import Prompt

LENGTHS = (3, 7, 1, 12)


def plain(model: Any, processor: Processor, prompt: Prompt, answer: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Log-probs [T] and entropies [T] from transformers' own forward on prompt + answer, one row."""
    ids = torch.tensor([[*prompt.token_ids, *answer]])
    kinds = (ids == model.config.image_token_id).int()
    kinds[:, len(prompt.token_ids) :] = 0
    logits = model(input_ids=ids, mm_token_type_ids=kinds, **prompt.vision, use_cache=False).logits[0]
    logits = logits[len(prompt.token_ids) - 1 : -1].clone()
    logits[:, sorted(processor.media_token_ids)] = -1e9
    logp = logits.log_softmax(-1)
    entropy = -(logp.exp() * logp.clamp(min=-1e8)).sum(-1)
    return logp.gather(1, torch.tensor(answer)[:, None])[:, 0], entropy


def answers(seed: int, vocab: int, banned: frozenset[int]) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    legal = torch.tensor([t for t in range(vocab) if t not in banned])
    return [tuple(legal[torch.randint(len(legal), (n,), generator=generator)].tolist()) for n in LENGTHS]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("family", [*tiny.FAMILIES, tiny.HYBRID])
def test_packs_equal_the_plain_forward(family: str, checkpointing: bool, models: dict[str, Any]) -> None:
    model = AutoModelForImageTextToText.from_pretrained(models[family], dtype=torch.float32).train()
    processor = load_processor(str(models[family]))
    reference = copy.deepcopy(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    prompts = [
        processor.prompt(tiny.sample("a", "what is it", (tiny.picture(1, 84, 84), tiny.picture(2, 56, 140)))),
        processor.prompt(tiny.sample("b", "and that one there", (tiny.picture(3, 112, 84),))),
        processor.prompt(tiny.sample("c", "no picture at all")),
    ]
    items, expected = [], []
    for g, prompt in enumerate(prompts):
        for answer in answers(g, 270, processor.media_token_ids):
            items.append(Item(len(items), g, prompt, answer))
            expected.append(plain(reference, processor, prompt, answer))
    weight = [torch.linspace(-1, 2, len(i.token_ids)) * (1 + i.index % 3) for i in items]

    loss = sum((w * logp).sum() + 0.3 * (w * h).sum() for w, (logp, h) in zip(weight, expected, strict=True))
    loss.backward()

    module = PackForward(
        model,
        media_token_ids=processor.media_token_ids,
        family=processor.family,
        temperature=1.0,
        chunk_bytes=5000,
    )
    packs = plan(items, max_tokens=130)
    assert len(packs) > 1  # the budget makes several packs, so their sums are tested too
    for rows in packs:
        pack = layout(rows, processor.media_token_ids)
        logp, entropy = module(pack)
        want = torch.cat([expected[i.index][0] for row in rows for i in row])
        assert (logp - want).abs().max() <= 1e-5
        assert (entropy - torch.cat([expected[i.index][1] for row in rows for i in row])).abs().max() <= 1e-5
        w = torch.cat([weight[i.index] for row in rows for i in row])
        ((w * logp).sum() + 0.3 * (w * entropy).sum()).backward()

    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        want = theirs[name].grad
        assert want is not None and parameter.grad is not None, name
        assert (parameter.grad - want).norm() <= 1e-5 * want.norm(), name


@pytest.mark.parametrize("family", [*tiny.FAMILIES, tiny.HYBRID])
def test_a_pack_without_images_gives_every_parameter_a_gradient(family: str, models: dict[str, Any]) -> None:
    model = AutoModelForImageTextToText.from_pretrained(models[family], dtype=torch.float32).train()
    processor = load_processor(str(models[family]))
    prompt = processor.prompt(tiny.sample("c", "no picture at all"))
    answer = answers(0, 270, processor.media_token_ids)[1]
    module = PackForward(
        model, media_token_ids=processor.media_token_ids, family=processor.family, temperature=1.0
    )
    logp, _ = module(layout([[Item(0, 0, prompt, answer)]], processor.media_token_ids))
    assert torch.allclose(logp, plain(model, processor, prompt, answer)[0], atol=1e-5)
    logp.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.any()) == (".visual." not in name or None is parameter.grad), name


def test_two_groups_with_one_text_see_their_own_image(models: dict[str, Any]) -> None:
    model = AutoModelForImageTextToText.from_pretrained(models["qwen2_5_vl"], dtype=torch.float32)
    processor = load_processor(str(models["qwen2_5_vl"]))
    module = PackForward(
        model, media_token_ids=processor.media_token_ids, family=processor.family, temperature=1.0
    )
    answer = answers(3, 270, processor.media_token_ids)[3]
    prompts = [processor.prompt(tiny.sample(f"r:{i}", images=(tiny.picture(i),))) for i in range(3)]
    with torch.no_grad():
        pack = layout([[Item(i, i, p, answer)] for i, p in enumerate(prompts)], processor.media_token_ids)
        logp = module(pack)[0].reshape(3, -1)
        for row, prompt in zip(logp, prompts, strict=True):
            assert torch.allclose(row, plain(model, processor, prompt, answer)[0], atol=1e-5)
    assert (logp[0] - logp[1]).abs().max() > 1e-3
