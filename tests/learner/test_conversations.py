"""Conversations of several turns in packs: log-probs and gradients are those of the plain forward of each one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.conversations import cases, items_of, plain
from helpers.families import assert_same
from helpers.passes import backward_of, forward_of, gradients
from torch import Tensor
from transformers import AutoModelForImageTextToText

from mm_grpo.learner.pack import Pack, pictured_of, plan
from mm_grpo.processors.base import load_processor
from mm_grpo.processors.tool_calls import answer_messages, knows_tools
from mm_grpo.rollout.conversation import Conversation
from mm_grpo.types import Completion, Medium, Sample, Video


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "checkpointing"),
    [("qwen2_5_vl", False), ("qwen3_vl", False), ("internvl", False), (tiny.HYBRID, True)],
)
@pytest.mark.field_bug("tool-image")
def test_packs_equal_the_plain_forward(family: str, checkpointing: bool, models: dict[str, Any]) -> None:
    model = AutoModelForImageTextToText.from_pretrained(models[family], dtype=torch.float32).train()
    processor = load_processor(str(models[family]))
    reference = copy.deepcopy(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    conversations, groups = cases(processor, seed=3)
    pictures = [picture for c in conversations if (tail := c.tail()) for picture in tail.pictures]
    assert len(pictures) > 8
    has_videos = processor.video_token_id is not None  # type: ignore[attr-defined]
    assert any(isinstance(picture.medium, Video) for picture in pictures) == has_videos  # type: ignore[attr-defined]
    items = items_of(conversations, groups)
    weights = [torch.linspace(-1, 2, len(i.token_ids)) * (1 + i.index % 3) for i in items]
    expected = [plain(reference, processor, c) for c in conversations]
    sum((w * logp).sum() for w, logp in zip(weights, expected, strict=True)).backward()

    module = forward_of(model, processor)
    longest = max(len(item.prompt.token_ids) + item.run_length for item in items)
    packs = plan(items, max_tokens=longest * 4 // 3, apart=True)  # of which none holds a group
    assert len(packs) > 3

    def loss(pack: Pack, logp: Tensor, _: Tensor) -> Tensor:
        own = list(dict.fromkeys(pack.completion_index.tolist()))
        assert (logp - torch.cat([expected[i] for i in own])).abs().max() <= 1e-5
        return (torch.cat([weights[i] for i in own]) * logp).sum()

    work = backward_of(module, packs, processor.media_token_ids, loss)
    assert work.prompts == 3
    assert all(p.grad is not None for m in (model, reference) for p in m.parameters())
    assert_same(gradients(model), gradients(reference))
    # an image of a prompt is encoded once, and one of an observation once in each pack
    prompts = {id(i.prompt): i.prompt for i in items}
    seen = [{id(one): one for row in rows for one in pictured_of(row)} for rows in packs]
    observed = [one for pack in seen for number, one in pack.items() if number not in prompts]
    count = processor.family.count
    assert work.images == sum(count(one.vision) for one in [*prompts.values(), *observed])


@pytest.mark.parametrize("family", tiny.ALL)
def test_an_observation_is_laid_out_as_in_one_long_prompt(family: str, models: dict[str, Any]) -> None:
    """Where the model's turn is what a tokenizer would make of its text."""
    processor: Any = load_processor(str(models[family]))
    media: list[Medium] = [tiny.picture(5 + i, 84, 84) for i in range(3)]
    if processor.video_token_id is not None:
        media[1] = tiny.video(6, 7, 84, 84)
    pictures = [processor.picture(medium, row="a") for medium in media]
    asked = tiny.sample("a", "what", (tiny.picture(1, 84, 84),))
    parts = [[pictures[0].medium, "one", pictures[1].medium, pictures[2].medium], ["two"]]
    answered = answer_messages(parts, as_tool=knows_tools(processor.template))
    messages = [*asked.messages, {"role": "assistant", "content": "ab"}, *answered]
    images = (*asked.images, *(medium for medium in media if not isinstance(medium, Video)))
    videos = tuple(medium for medium in media if isinstance(medium, Video))
    whole, start = processor.prompt(Sample("a", messages, images, videos)), processor.prompt(asked)
    after = whole.token_ids[len(start.token_ids) :]
    end = after.index(processor.tokenizer.eos_token_id)
    said = after[: end + 1]  # in some templates with a space before it
    made = Conversation(start, processor)
    made.add_answer(Completion(said, (0.0,) * len(said), "ab", "stop", 0))
    made.add_observation(processor.observation(parts, start.sample), pictures)
    assert made.prompt.token_ids == whole.token_ids
    assert torch.equal(made.prompt.position_ids, whole.position_ids)
    assert made.prompt.vision.keys() == whole.vision.keys()
    assert all(torch.equal(tensor, whole.vision[key]) for key, tensor in made.prompt.vision.items())
