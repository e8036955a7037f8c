"""Sight: how much completions depend on their images, in nats.

    sight = log p(completion | prompt, its images) - log p(completion | prompt, images of another row)

The completions were sampled with their own images, so the mean over them estimates the KL divergence between the
answers to the two. It is 0 if the model answers from the text alone. The learner's packs compute it without gradients,
under the weights and the distribution that were sampled from.

The other row is the next one in the step, in the order of slots, that differs in every image and has another answer
(`ANSWERS`); if none has another answer, one that differs in every image. Which row lends does not depend on the process
that holds it. The k-th placeholder of a row's text gets the k-th image of the other row, from its first again if these
are fewer. They keep their size, so the prompt may have another length. Rows without images, without such another row,
or that would no longer fit a pack are not measured. In conversations of several turns the images of observations stay.

Axes: [T] tokens of a completion, [G] completions of a group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from mm_grpo.distributed.ranks import Ranks
from mm_grpo.learner.alternate_prompts import AlternatePrompts, moved_tail
from mm_grpo.learner.learner import Learner
from mm_grpo.processors.base import Processor
from mm_grpo.types import Completion, Group, Prompt

if TYPE_CHECKING:
    from PIL.Image import Image

GROUPS = 4
"""Groups of a step that are measured: with G = 8 the mean of 32 completions, which vary by a few nats, has an error
below one. Each costs two forwards of its row."""
ANSWERS = ("solution", "answer")
"""Columns with a row's right answer, the first that it has."""
Row = tuple[tuple[str, ...], str | None]
"""Digests of a row's images, and its right answer as text if it has one."""

T = TypeVar("T")


@dataclass(frozen=True)
class GroupSight:
    """Sight of a group."""

    slot: int
    attempt: int
    lender: str
    """Uid of the row that lent its images."""
    tokens: tuple[tuple[float, ...], ...]
    """[G][T], in nats."""
    pieces: tuple[tuple[str, ...], ...]

    @property
    def nats(self) -> tuple[float, ...]:
        """Sight of each completion [G], the sum over its tokens."""
        return tuple(map(sum, self.tokens))


def measure(groups: Sequence[Group], learner: Learner, max_tokens: int, ranks: Ranks) -> list[GroupSight]:
    """Return the sight of some of this process's `groups`. Collective.

    `max_tokens` bounds one prompt with one completion (`optim.max_tokens_per_pack`).
    """
    controls = _other_prompts(groups, learner.processor, max_tokens, ranks)
    rows: list[tuple[Prompt, Sequence[Completion]]] = [(g.prompt, g.completions) for g, _, _ in controls]
    for g, _, prompt in controls:
        rows.append((prompt, [replace(c, tail=moved_tail(c.tail, g.prompt, prompt)) for c in g.completions]))
    logprobs = learner.current_logprobs(rows)
    half = len(controls)
    sights = []
    for (group, uid, _), image, control in zip(controls, logprobs[:half], logprobs[half:], strict=True):
        tokens = (
            tuple(a - b for a, b in zip(*pair, strict=True)) for pair in zip(image, control, strict=True)
        )
        pieces = (pieces_of(learner.processor, c.token_ids) for c in group.completions)
        sights.append(GroupSight(group.slot, group.attempt, uid, tuple(tokens), tuple(pieces)))
    return sights


def pieces_of(processor: Processor, token_ids: Sequence[int]) -> tuple[str, ...]:
    """Return the text that each token adds [T], "" for a special one; a character of several tokens is at its last."""
    # the tokens from `start` to `end` are decoded before a token, because the first token of a text may lose a space
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


# which rows lend their images ----------------------------------------------------------------


def _other_prompts(
    groups: Sequence[Group], processor: Processor, max_tokens: int, ranks: Ranks
) -> list[tuple[Group, str, Prompt]]:
    """Return some of this process's `groups`, in the order of slots, with the uid of the row that lends its images and
    the prompt with these images. Collective."""
    with ranks.fail_together("other images"):
        rows = {g.slot: _row(g.prompt) for g in groups if g.prompt.vision}
    shares = ranks.all_gather(rows, "digests of images")
    pairs = pairs_of({slot: row for share in shares for slot, row in share.items()})
    rank_of = {slot: rank for rank, share in enumerate(shares) for slot in share}
    by_slot = {g.slot: g for g in groups}
    parcels: list[list[tuple[int, str, tuple[Image, ...]]]] = [[] for _ in shares]
    for slot, lender_slot in pairs:
        if lender_slot in by_slot:
            lender = by_slot[lender_slot].prompt
            parcels[rank_of[slot]].append((slot, lender.uid, lender.engine_prompt.images))
    parcels_received = ranks.all_to_all(parcels, "images")
    lent = {slot: (uid, images) for parcel in parcels_received for slot, uid, images in parcel}
    ordered = [by_slot[slot] for slot in sorted(lent)]
    alternates = AlternatePrompts(
        ordered, lambda group: with_images(processor, group.prompt, lent[group.slot][1]), max_tokens
    )
    with ranks.fail_together("other images"):
        prompts = [(group, alternates.of(number)) for number, group in enumerate(ordered)]
    return [(group, lent[group.slot][0], prompt) for group, prompt in prompts if prompt is not None]


def pairs_of(rows: Mapping[int, Row], count: int = GROUPS) -> list[tuple[int, int]]:
    """Return slots to measure, at most `count` and spread evenly, each with the slot of the row that lends.

    A slot is left out if no other row differs in every image.

    >>> pairs_of({0: (("a",), "x"), 2: (("b",), "x"), 3: (("c",), "y")})
    [(0, 3), (2, 3), (3, 0)]
    """
    slots = sorted(rows)
    pairs = []
    for place, slot in enumerate(slots):
        images, answer = rows[slot]
        after = (*slots[place + 1 :], *slots[:place])
        candidates = [c for c in after if _differs(images, rows[c][0])]
        unlike = (c for c in candidates if None not in (answer, rows[c][1]) and answer != rows[c][1])
        if candidates:
            pairs.append((slot, next(unlike, candidates[0])))
    few = min(count, len(pairs))
    return [pairs[i * len(pairs) // few] for i in range(few)]


def replacing(images: Sequence[T], count: int) -> tuple[T, ...]:
    """Return `count` of the images, in order and from the first again."""
    return tuple(images[k % len(images)] for k in range(count))


def with_images(processor: Processor, prompt: Prompt, images: Sequence[Image]) -> Prompt:
    """Return the prompt of the same row with other images."""
    count = len(prompt.engine_prompt.images)
    return processor.prompt(replace(prompt.sample, images=replacing(images, count)))


def _differs(images: Sequence[str], others: Sequence[str]) -> bool:
    return all(a != b for a, b in zip(images, replacing(others, len(images)), strict=True))


def _row(prompt: Prompt) -> Row:
    columns = prompt.sample.columns
    answers = (str(columns[name]) for name in ANSWERS if columns.get(name) is not None)
    return tuple(map(_digest, prompt.engine_prompt.images)), next(answers, None)


def _digest(image: Image) -> str:
    return hashlib.sha256(f"{image.mode} {image.size}".encode() + image.tobytes()).hexdigest()[:32]
