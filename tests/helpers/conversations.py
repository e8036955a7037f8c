"""Conversations of random turns and observations with images and videos, for every family, and transformers' forward of
them."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from helpers import tiny
from helpers.families import legal_tokens, media_inputs, transformers_ids, video_lengths
from helpers.positions import defined_positions
from mm_grpo.learner.pack import Item
from mm_grpo.rollout.conversation import Conversation
from mm_grpo.types import Completion, Picture, Prompt, Video

SIZES = [(84, 84), (56, 140), (112, 84)]


def conversation(
    start: Prompt, processor: Any, rng: random.Random, shown: list[Picture], turns: int
) -> Conversation:
    """Turns of random tokens, with observations of text and of 0 to 2 of the pictures `shown` between them, laid out by
    the chat template."""
    made, legal = Conversation(start, processor), legal_tokens(processor)
    for turn in range(turns):
        ids = tuple(rng.choices(legal, k=rng.randint(1, 6)))
        made.add_answer(Completion(ids, (0.0,) * len(ids), "", "stop", turn))
        if turn < turns - 1:
            pictures = rng.choices(shown, k=rng.choice([0, 1, 1, 2]))
            parts = ["seen " * rng.randrange(3), *(picture.medium for picture in pictures), "end"]
            made.add_observation(processor.observation([parts], start.sample), pictures)
    return made


def cases(processor: Any, seed: int, groups: int = 3, each: int = 4) -> tuple[list[Conversation], list[int]]:
    """Conversations of 1 to 4 turns after prompts with two images, one and none; they share some pictures. In
    families with videos the prompt with one image has a video too, and one of the pictures is a video."""
    rng = random.Random(seed)
    shown = [processor.picture(tiny.picture(50 + i, *size), row="a") for i, size in enumerate(SIZES)]
    images = [(tiny.picture(1, 84, 84), tiny.picture(2, 56, 140)), (tiny.picture(3, 112, 84),), ()]
    videos: list[tuple[Video, ...]] = [(), (), ()]
    if processor.video_token_id is not None:
        lengths = video_lengths(processor, 6, 7)
        videos[1] = (tiny.video(4, lengths[0], 56, 56),)
        shown[1] = processor.picture(tiny.video(5, lengths[1], 56, 84, fps=1.0), row="a")
    rows = zip(images, videos, strict=True)
    samples = [tiny.sample(str(g), "what is it", *media) for g, media in enumerate(rows)]
    starts = [processor.prompt(samples[g % 3]) for g in range(groups)]
    pairs = [(start, g) for g, start in enumerate(starts) for _ in range(each)]
    made = [conversation(start, processor, rng, shown, rng.randint(1, 4)) for start, _ in pairs]
    return made, [g for _, g in pairs]


def items_of(conversations: list[Conversation], groups: list[int]) -> list[Item]:
    return [
        Item(i, group, c.start, tuple(t for a in c.answers for t in a.token_ids), tail=c.tail())
        for i, (c, group) in enumerate(zip(conversations, groups, strict=True))
    ]


def plain(model: Any, processor: Any, c: Conversation) -> Tensor:
    """Log-probs [T] of what was sampled, by transformers' own processor and forward of the whole conversation. Its
    processor is given all media of the conversation at once, and no text but their placeholders. Positions after
    videos are those of the definition (helpers/positions.py)."""
    ids = torch.tensor([transformers_ids(processor, c.prompt.token_ids)])
    media = c.prompt.engine_prompt.media
    inputs: dict[str, Any] = {}
    if media:
        names = (
            processor.video_placeholder() if isinstance(m, Video) else processor.placeholder() for m in media
        )
        made = media_inputs(processor, "".join(names), media)
        inputs = {k: v for k, v in made.items() if k not in ("input_ids", "attention_mask")}
    if processor.family.position_axes and any(isinstance(m, Video) for m in media):
        inputs["position_ids"] = defined_positions(processor, c.prompt.token_ids, media)[:, None]
    kinds = (ids == model.config.image_token_id).long()
    kinds[ids == processor.video_token_id] = 2
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in inputs or processor.config.model_type.startswith("qwen") is (name == "mm_token_type_ids"):
            inputs[name] = kinds
    if processor.config.model_type != "gemma3":
        inputs.pop("token_type_ids", None)
    logits = model(input_ids=ids, **inputs, use_cache=False).logits[0]
    logits[:, sorted(processor.media_token_ids)] = -1e9
    logp = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    tail = c.tail()
    sampled = [True] * c.run_length if tail is None else list(tail.sampled)
    return logp[len(c.start.token_ids) - 1 :][torch.tensor(sampled)]
