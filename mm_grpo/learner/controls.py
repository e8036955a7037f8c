"""Controls: the prompts of rows with the images of other rows, which sight and credit by sight compare answers with.

The other row is the next one in the step, in the order of slots, that differs in every image and has another answer
(`ANSWERS`), or one that differs in every image where none has another answer. Which row lends does not depend on the
process that holds it. The k-th placeholder of a row's text is given the k-th image of the other row, from its first
again where these are fewer. They keep their size, so the prompt may have another length. Rows without images, without
such another row, or that would no longer fit a pack have no control. In conversations of several turns the images of
observations stay.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from mm_grpo.distributed.ranks import Ranks
from mm_grpo.processors.base import Processor
from mm_grpo.types import Group, Prompt, Sample, Tail

if TYPE_CHECKING:
    from PIL.Image import Image

ANSWERS = ("solution", "answer")
"""Columns with a row's right answer, the first that it has."""

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """Digests of a row's images, its right answer as text if it has one, and whether it wants a control."""

    images: tuple[str, ...]
    answer: str | None = None
    wants: bool = True


def lent_controls(
    groups: Sequence[Group],
    processor: Processor,
    max_tokens: int,
    ranks: Ranks,
    *,
    count: int | None = None,
    wants: Collection[int] | None = None,
) -> list[tuple[Group, str, Prompt]]:
    """Of this process's `groups`, in the order of slots: each with the uid of the row that lends and its prompt with
    those images. Collective.

    `wants` are the slots that want a control, None all, and `count` how many get one at most, over all processes.
    `max_tokens` are those that one prompt with one completion may have (`optim.max_tokens_per_pack`).
    """
    what = "controls"
    with ranks.fail_together(what):
        rows = {g.slot: _row(g.prompt, wants is None or g.slot in wants) for g in groups if g.prompt.vision}
    shares = ranks.all_gather(rows, "digests of images")
    pairs = pairs_of({slot: row for share in shares for slot, row in share.items()}, count)
    rank_of = {slot: rank for rank, share in enumerate(shares) for slot in share}
    own = {g.slot: g for g in groups}
    parcels: list[list[tuple[int, str, tuple[Image, ...]]]] = [[] for _ in shares]
    for slot, other in pairs:
        if other in own:
            lender = own[other].prompt
            parcels[rank_of[slot]].append((slot, lender.uid, lender.engine_prompt.images))
    received = [one for parcel in ranks.all_to_all(parcels, "images") for one in parcel]
    found = []
    with ranks.fail_together(what):
        for slot, uid, images in sorted(received, key=lambda one: one[0]):
            group = own[slot]
            prompt = with_images(processor, group.prompt, images)
            longest = max(c.run_length for c in group.completions)
            if len(prompt.token_ids) + longest <= max_tokens:
                found.append((group, uid, prompt))
    return found


def pairs_of(rows: Mapping[int, Row], count: int | None = None) -> list[tuple[int, int]]:
    """Slots that want a control, `count` at most and spread evenly, each with the slot of the row that lends.

    A slot without another row that differs in every image is passed over.

    >>> pairs_of({0: Row(("a",)), 2: Row(("a",)), 3: Row(("b",)), 5: Row(("c", "a"))})
    [(0, 3), (2, 3), (3, 5), (5, 0)]
    >>> pairs_of({0: Row(("a",), "x"), 2: Row(("b",), "x", wants=False), 3: Row(("c",), "y", wants=False)})
    [(0, 3)]
    """
    slots = sorted(rows)
    pairs = []
    for place, slot in enumerate(slots):
        mine = rows[slot]
        after = (*slots[place + 1 :], *slots[:place])
        others = [o for o in after if mine.wants and _differs(mine.images, rows[o].images)]
        unlike = (
            o for o in others if None not in (mine.answer, rows[o].answer) and mine.answer != rows[o].answer
        )
        if others:
            pairs.append((slot, next(unlike, others[0])))
    few = len(pairs) if count is None else min(count, len(pairs))
    return [pairs[i * len(pairs) // few] for i in range(few)]


def replacing(images: Sequence[T], count: int) -> tuple[T, ...]:
    """As many images as are to be replaced, in order and from the first again."""
    return tuple(images[k % len(images)] for k in range(count))


def with_images(processor: Processor, prompt: Prompt, images: Sequence[Image]) -> Prompt:
    """The prompt of the same row with other images, laid out anew."""
    given = replacing(images, len(prompt.engine_prompt.images))
    return processor.prompt(replace(prompt.sample, images=given))


def moved(tail: Tail | None, old: Prompt, new: Prompt) -> Tail | None:
    """What follows a prompt, after another one: positions of a conversation go on from where that one ends."""
    shift = new.next_position - old.next_position
    return None if tail is None else replace(tail, position_ids=tail.position_ids + shift)


def answer_of(sample: Sample) -> str | None:
    """The row's right answer as text; None where it has none."""
    found = (sample.columns[name] for name in ANSWERS if sample.columns.get(name) is not None)
    return next(map(str, found), None)


def _differs(images: Sequence[str], others: Sequence[str]) -> bool:
    return all(a != b for a, b in zip(images, replacing(others, len(images)), strict=True))


def _row(prompt: Prompt, wants: bool) -> Row:
    return Row(tuple(map(_digest, prompt.engine_prompt.images)), answer_of(prompt.sample), wants)


def _digest(image: Image) -> str:
    return hashlib.sha256(f"{image.mode} {image.size}".encode() + image.tobytes()).hexdigest()[:32]
