"""Sight: how much completions depend on their images and videos, and on the order of a video's frames, in nats.

    sight = log p(completion | prompt, its media) - log p(completion | prompt, media of another row)
    order = log p(completion | prompt, its media) - log p(completion | prompt, its videos in another order)

The completions were sampled with their own media, so the mean over them estimates the KL divergence between the
answers to the two. It is 0 if the model answers from the text alone, or from frames without their order. The learner's
packs compute it without gradients, under the weights and the distribution that were sampled from.

The other row is the next one in the step, in the order of slots, that has media of the same kinds, differs in every one
and has another answer (`ANSWERS`); if none has another answer, one that differs in every one. Which row lends does not
depend on the process that holds it. The k-th image of a row's text becomes the k-th image of the other row, from its
first again if these are fewer, and so do videos. They keep their size, so the prompt may have another length. In
another order (`blind.reordered`, drawn from the row's uid) the frames of a video move and its times stay.

Rows without media, without such another row, or that would no longer fit a pack are not measured, nor is the order of
videos with fewer than three different frames. In conversations of several turns the media of observations stay.

Axes: [T] tokens of a completion, [G] completions of a group.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter, ne
from typing import NamedTuple, TypeVar

from mm_grpo.data.blind import has_order, media_key, with_frames
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.learner.alternate_prompts import fits, moved_tail
from mm_grpo.learner.learner import Learner
from mm_grpo.processors.base import Processor
from mm_grpo.types import Completion, Group, Medium, Prompt, Sample, split_media

GROUPS = 4
"""Groups of a step of which sight, and order, is measured: with G = 8 the mean of 32 completions, which vary by a few
nats, has an error below one. Each costs two forwards of its row, and three with both."""
ANSWERS = ("solution", "answer")
"""Columns with a row's right answer, the first that it has."""

T = TypeVar("T")


class Row(NamedTuple):
    """What decides whether a row is measured, and which row lends its media."""

    images: Sequence[Hashable]
    """Keys that are equal for equal images."""
    videos: Sequence[Hashable] = ()
    """The same, by all frames."""
    answer: str | None = None
    """The right answer as text, if the row has one."""
    has_order: bool = False

    def differs(self, other: Row) -> bool:
        """Return True if `other` has media of these kinds, and all differ in its place."""
        pairs = ((self.images, other.images), (self.videos, other.videos))
        return all(
            not mine or (bool(theirs) and all(map(ne, mine, replacing(theirs, len(mine)))))
            for mine, theirs in pairs
        )


@dataclass(frozen=True)
class GroupSight:
    """Sight of a group."""

    slot: int
    attempt: int
    lender: str | None
    """Uid of the row that lent its media; None if the row's own videos were in another order."""
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
    controls = _alternates(groups, learner.processor, max_tokens, ranks)
    by_slot = {group.slot: group for group, _, _ in controls}
    rows: list[tuple[Prompt, Sequence[Completion]]] = [(g.prompt, g.completions) for g in by_slot.values()]
    for g, _, prompt in controls:
        rows.append((prompt, [replace(c, tail=moved_tail(c.tail, g.prompt, prompt)) for c in g.completions]))
    logprobs = learner.current_logprobs(rows)
    whole = dict(zip(by_slot, logprobs, strict=False))
    sights = []
    for (group, uid, _), control in zip(controls, logprobs[len(by_slot) :], strict=True):
        tokens = (
            tuple(a - b for a, b in zip(*pair, strict=True))
            for pair in zip(whole[group.slot], control, strict=True)
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


# which rows lend their media -----------------------------------------------------------------


def _alternates(
    groups: Sequence[Group], processor: Processor, max_tokens: int, ranks: Ranks
) -> list[tuple[Group, str | None, Prompt]]:
    """Return alternate prompts of some of this process's `groups`: with the media of another row, and its uid, and then
    with videos in another order, and None; both in the order of slots. Collective."""
    with ranks.fail_together("other media"):
        rows = {g.slot: _row(g.prompt) for g in groups if g.prompt.vision}
    shares = ranks.all_gather(rows, "digests of media")
    all_rows = {slot: row for share in shares for slot, row in share.items()}
    rank_of = {slot: rank for rank, share in enumerate(shares) for slot in share}
    by_slot = {g.slot: g for g in groups}
    parcels: list[list[tuple[int, str, tuple[Medium, ...]]]] = [[] for _ in shares]
    for slot, lender_slot in pairs_of(all_rows):
        if lender_slot in by_slot:
            lender = by_slot[lender_slot].prompt
            parcels[rank_of[slot]].append((slot, lender.uid, lender.engine_prompt.media))
    lent = sorted((p for parcel in ranks.all_to_all(parcels, "media") for p in parcel), key=itemgetter(0))
    ordered = _few([slot for slot in sorted(all_rows) if all_rows[slot].has_order])
    samples: list[tuple[Group, str | None, Sample]] = [
        *((by_slot[slot], uid, with_media(by_slot[slot].prompt, media)) for slot, uid, media in lent),
        *((g, None, with_frames(g.prompt.sample, "frames")) for slot in ordered if (g := by_slot.get(slot))),
    ]
    with ranks.fail_together("other media"):
        controls = [(group, uid, processor.prompt(sample)) for group, uid, sample in samples]
    return [(group, uid, prompt) for group, uid, prompt in controls if fits(prompt, group, max_tokens)]


def pairs_of(rows: Mapping[int, Row], count: int = GROUPS) -> list[tuple[int, int]]:
    """Return slots to measure, at most `count` and spread evenly, each with the slot of the row that lends.

    A slot is left out if no other row has media of the same kinds that all differ.

    >>> pairs_of({0: Row("a", answer="x"), 2: Row("b", answer="x"), 3: Row("c", answer="y")})
    [(0, 3), (2, 3), (3, 0)]
    """
    slots = sorted(rows)
    pairs = []
    for place, slot in enumerate(slots):
        after = (*slots[place + 1 :], *slots[:place])
        candidates = [c for c in after if rows[slot].differs(rows[c])]
        answer = rows[slot].answer
        unlike = (c for c in candidates if None not in (answer, rows[c].answer) and answer != rows[c].answer)
        if candidates:
            pairs.append((slot, next(unlike, candidates[0])))
    return _few(pairs, count)


def replacing(media: Sequence[T], count: int) -> tuple[T, ...]:
    """Return `count` of the media, in order and from the first again."""
    return tuple(media[k % len(media)] for k in range(count))


def with_media(prompt: Prompt, media: Sequence[Medium]) -> Sample:
    """Return the sample of a prompt with other media."""
    images, videos = split_media(media)
    counts = len(prompt.engine_prompt.images), len(prompt.engine_prompt.videos)
    return replace(prompt.sample, images=replacing(images, counts[0]), videos=replacing(videos, counts[1]))


def _few(items: Sequence[T], count: int = GROUPS) -> list[T]:
    """Return at most `count` items, spread evenly."""
    few = min(count, len(items))
    return [items[i * len(items) // few] for i in range(few)]


def _row(prompt: Prompt) -> Row:
    columns, media = prompt.sample.columns, prompt.engine_prompt
    answers = (str(columns[name]) for name in ANSWERS if columns.get(name) is not None)
    ordered = any(has_order(video.frames) for video in media.videos)
    videos = [tuple(map(media_key, video.frames)) for video in media.videos]
    return Row([*map(media_key, media.images)], videos, next(answers, None), ordered)
