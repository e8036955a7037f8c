"""Sight: how much completions depend on their images, in nats.

    sight = log p(completion | prompt, its images) - log p(completion | prompt, images of another row)

The completions were sampled with their own images, so the mean over them estimates the KL divergence between the
answers to the two, and is 0 where the model answers from the text alone. The learner's own packs compute it without
gradients, under the weights and the distribution that were sampled from.

The other row is the next one in the step, in the order of slots, that differs in every image; which rows are measured
does not depend on the process that holds them. The k-th placeholder of a row's text is given the k-th image of the
other row, from its first again where these are fewer. They keep their size, so the prompt may have another length.
Rows without images, without such another row, or that would no longer fit a pack are left out. In conversations of
several turns the images of observations stay.

Axes: [T] tokens of a completion, [G] completions of a group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from mm_grpo.distributed.ranks import Ranks
from mm_grpo.learner.learner import Learner
from mm_grpo.processors.base import Processor
from mm_grpo.types import Completion, Group, Prompt

if TYPE_CHECKING:
    from PIL.Image import Image

GROUPS = 4
"""Groups of a step that are measured: with G = 8 the mean of 32 completions, which vary by a few nats, has an error
below one. Each costs two forwards of its row."""

T = TypeVar("T")


@dataclass(frozen=True)
class GroupSight:
    """Sight of a group: `tokens` [G][T] in nats with their texts `pieces`; `other` is the row that lent its images."""

    slot: int
    attempt: int
    other: str
    tokens: tuple[tuple[float, ...], ...]
    pieces: tuple[tuple[str, ...], ...]

    @property
    def nats(self) -> tuple[float, ...]:
        """Sight of each completion [G], the sum over its tokens."""
        return tuple(map(sum, self.tokens))


def measure(groups: Sequence[Group], learner: Learner, max_tokens: int, ranks: Ranks) -> list[GroupSight]:
    """Sight of some of this process's `groups`. Collective.

    `max_tokens` are those that one prompt with one completion may have (`optim.max_tokens_per_pack`).
    """
    with ranks.fail_together("sight"):
        digests = {
            g.slot: tuple(map(_digest, g.prompt.engine_prompt.images)) for g in groups if g.prompt.vision
        }
    shares = ranks.all_gather(digests, "digests of images")
    pairs = pairs_of({slot: found for share in shares for slot, found in share.items()}, GROUPS)
    rank_of = {slot: rank for rank, share in enumerate(shares) for slot in share}
    own = {g.slot: g for g in groups}
    parcels: list[list[tuple[int, str, tuple[Image, ...]]]] = [[] for _ in shares]
    for slot, other in pairs:
        if other in own:
            lender = own[other].prompt
            parcels[rank_of[slot]].append((slot, lender.uid, lender.engine_prompt.images))
    received = [one for parcel in ranks.all_to_all(parcels, "images") for one in parcel]
    chosen: list[tuple[Group, str, Prompt]] = []
    with ranks.fail_together("sight"):
        for slot, uid, images in sorted(received, key=lambda one: one[0]):
            group = own[slot]
            prompt = with_images(learner.processor, group.prompt, images)
            longest = max(c.run_length for c in group.completions)
            if len(prompt.token_ids) + longest <= max_tokens:
                chosen.append((group, uid, prompt))
    asked: list[tuple[Prompt, Sequence[Completion]]] = [(g.prompt, g.completions) for g, _, _ in chosen]
    asked += [(prompt, _moved(g.completions, g.prompt, prompt)) for g, _, prompt in chosen]
    found = learner.current_logprobs(asked)
    sights = []
    for (group, uid, _), seen, unseen in zip(chosen, found[: len(chosen)], found[len(chosen) :], strict=True):
        tokens = (tuple(a - b for a, b in zip(*both, strict=True)) for both in zip(seen, unseen, strict=True))
        pieces = (pieces_of(learner.processor, c.token_ids) for c in group.completions)
        sights.append(GroupSight(group.slot, group.attempt, uid, tuple(tokens), tuple(pieces)))
    return sights


def pairs_of(digests: Mapping[int, Sequence[str]], count: int) -> list[tuple[int, int]]:
    """Slots to be measured, `count` at most and spread evenly, each with the slot of the other row.

    `digests` are those of each slot's images. A slot without another row that differs in every image is passed over.

    >>> pairs_of({0: ["a"], 2: ["a"], 3: ["b"], 5: ["c", "a"]}, 9)
    [(0, 3), (2, 3), (3, 5), (5, 0)]
    >>> pairs_of({0: ["a"], 2: ["a"]}, 9)
    []
    """
    slots = sorted(digests)
    pairs = []
    for place, slot in enumerate(slots):
        for other in (*slots[place + 1 :], *slots[:place]):
            lent = replacing(digests[other], len(digests[slot]))
            if all(mine != theirs for mine, theirs in zip(digests[slot], lent, strict=True)):
                pairs.append((slot, other))
                break
    few = min(count, len(pairs))
    return [pairs[i * len(pairs) // few] for i in range(few)]


def replacing(images: Sequence[T], count: int) -> tuple[T, ...]:
    """As many images as are to be replaced, in order and from the first again."""
    return tuple(images[k % len(images)] for k in range(count))


def with_images(processor: Processor, prompt: Prompt, images: Sequence[Image]) -> Prompt:
    """The prompt of the same row with other images, laid out anew."""
    given = replacing(images, len(prompt.engine_prompt.images))
    return processor.prompt(replace(prompt.sample, images=given))


def pieces_of(processor: Processor, token_ids: Sequence[int]) -> tuple[str, ...]:
    """The text that each token adds [T], "" for a special one; a character of several tokens stands at its last."""
    # what stands between `start` and `end` is decoded before a token: a first one may lose a space
    pieces, start, end = list[str](), 0, 0
    for place in range(len(token_ids)):
        before = processor.decode(token_ids[start:end])
        text = processor.decode(token_ids[start : place + 1])
        if text.endswith("\ufffd") and place + 1 < len(token_ids):
            pieces.append("")
            continue
        pieces.append(text[len(before) :])
        start, end = end, place + 1
    return tuple(pieces)


def _digest(image: Image) -> str:
    return hashlib.sha256(f"{image.mode} {image.size}".encode() + image.tobytes()).hexdigest()[:32]


def _moved(completions: Sequence[Completion], old: Prompt, new: Prompt) -> list[Completion]:
    """The completions after another prompt: positions of a conversation go on from where that one ends."""
    shift = new.next_position - old.next_position
    return [
        c if c.tail is None else replace(c, tail=replace(c.tail, position_ids=c.tail.position_ids + shift))
        for c in completions
    ]
