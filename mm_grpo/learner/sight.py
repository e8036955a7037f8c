"""Sight: how much completions depend on their images, in nats.

    sight = log p(completion | prompt, its images) - log p(completion | prompt, images of another row)

The completions were sampled with their own images, so the mean over them estimates the KL divergence between the
answers to the two, and is 0 where the model answers from the text alone. The learner's own packs compute it without
gradients, under the weights and the distribution that were sampled from.

The other row has another answer where the step has such a one (controls.py); which rows are measured does not depend on
the process that holds them.

Axes: [T] tokens of a completion, [G] completions of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mm_grpo.distributed.ranks import Ranks
from mm_grpo.learner.controls import lent_controls, moved
from mm_grpo.learner.learner import Learner
from mm_grpo.processors.base import Processor
from mm_grpo.types import Completion, Group, Prompt

GROUPS = 4
"""Groups of a step that are measured: with G = 8 the mean of 32 completions, which vary by a few nats, has an error
below one. Each costs two forwards of its row."""


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
    controls = lent_controls(groups, learner.processor, max_tokens, ranks, count=GROUPS)
    asked: list[tuple[Prompt, Sequence[Completion]]] = [(g.prompt, g.completions) for g, _, _ in controls]
    for g, _, other in controls:
        asked.append((other, [replace(c, tail=moved(c.tail, g.prompt, other)) for c in g.completions]))
    found = learner.current_logprobs(asked)
    half = len(controls)
    sights = []
    for (group, uid, _), seen, unseen in zip(controls, found[:half], found[half:], strict=True):
        tokens = (tuple(a - b for a, b in zip(*both, strict=True)) for both in zip(seen, unseen, strict=True))
        pieces = (pieces_of(learner.processor, c.token_ids) for c in group.completions)
        sights.append(GroupSight(group.slot, group.attempt, uid, tuple(tokens), tuple(pieces)))
    return sights


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
