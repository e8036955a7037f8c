"""Groups of a pack that differ by their image alone. Packs of every family: tests/processors/test_families.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.families import answers_of, plain_logprobs
from helpers.passes import forward_of
from helpers.steps import load

from mm_grpo.learner.pack import Item, layout
from mm_grpo.processors.base import load_processor


@pytest.mark.field_bug("swapped-images", "one-text-two-images")
def test_two_groups_with_one_text_see_their_own_image(models: dict[str, Any]) -> None:
    model, processor = load(models["qwen2_5_vl"]), load_processor(str(models["qwen2_5_vl"]))
    media = processor.media_token_ids
    module = forward_of(model, processor)
    answer = answers_of(processor, 3)[3]
    prompts = [processor.prompt(tiny.sample(f"r:{i}", images=(tiny.picture(i),))) for i in range(3)]
    with torch.no_grad():
        rows = [[Item(i, i, p, answer)] for i, p in enumerate(prompts)]
        logp = module(layout(rows, media)).logp.reshape(3, -1)
        for row, prompt in zip(logp, prompts, strict=True):
            assert torch.allclose(row, plain_logprobs(model, processor, prompt, answer)[0], atol=1e-5)
    assert (logp[0] - logp[1]).abs().max() > 1e-3
