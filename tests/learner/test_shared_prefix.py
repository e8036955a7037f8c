"""Packs without an image, and of groups that differ by their image alone.

That packs give what the plain forward gives, for every family: tests/processors/test_families.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import tiny
from torch import Tensor
from transformers import AutoModelForImageTextToText

from mm_grpo.learner.forward import PackForward
from mm_grpo.learner.pack import Item, layout
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
