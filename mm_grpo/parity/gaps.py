"""Parity: do engine and learner see the same tokens, images and weights?

Pure comparisons, shared by the check at the start of a run, by the verified weight sync and by
`mm-grpo doctor`. Two log-prob gaps are kept apart:

- `score`: the engine re-scores a given completion, the learner does too, both over the whole vocabulary
  at temperature 1. Weights and images show here, sampling does not.
- `sampled`: the log-probs that the engine reported while sampling against the learner's under the same
  media mask and temperature. Temperature, mask and the engine's caches show here too.

That prompt ids are equal is checked by each engine in `generate`, which stops when they are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import DataError
from mm_grpo.health import apply_guard
from mm_grpo.health.checks import limit_for, logp_gap
from mm_grpo.learner.learner import Learner
from mm_grpo.rollout.engine import (
    Replica,
    ReplicaLost,
    RolloutEngine,
    Sampling,
    requests_for,
    require_answers,
    versions_of,
)
from mm_grpo.types import Completion, Prompt

T = TypeVar("T")

START_TOKENS = 32
"""Completions of the check at the start of a run are at most this long."""


@dataclass(frozen=True)
class Gap:
    """|difference| of two log-probs per token, in nats, over `tokens` tokens."""

    mean: float
    max: float
    tokens: int


@dataclass(frozen=True)
class PromptParity:
    """Gaps of one prompt and its completions."""

    uid: str
    prompt_tokens: int
    images: int
    completions: int
    distinct: int
    seeds: tuple[int, ...]
    versions: tuple[int, ...]
    score: Gap
    sampled: Gap


def gap_of(ones: Iterable[Sequence[float]], others: Iterable[Sequence[float]]) -> Gap:
    """The gap between two lists of completions' log-probs. NaN on either side makes it NaN.

    >>> gap_of([[-1.0, -2.0]], [[-1.5, -2.0]])
    Gap(mean=0.25, max=0.5, tokens=2)
    """
    gaps = [
        abs(a - b) for one, other in zip(ones, others, strict=True) for a, b in zip(one, other, strict=True)
    ]
    if not gaps or any(math.isnan(g) for g in gaps):
        return Gap(math.nan, math.nan, len(gaps))
    return Gap(math.fsum(gaps) / len(gaps), max(gaps), len(gaps))


def compare(
    engine: RolloutEngine | Replica,
    learner: Learner,
    prompt: Prompt,
    completions: Sequence[Completion],
    scored: Sequence[Sequence[int]] | None = None,
) -> PromptParity:
    """Both gaps of one prompt. `scored` are the token ids to re-score, those of `completions` by default."""
    fixed = [c.token_ids for c in completions] if scored is None else scored
    return PromptParity(
        uid=prompt.uid,
        prompt_tokens=len(prompt.token_ids),
        images=len(prompt.engine_prompt.images),
        completions=len(completions),
        distinct=len({c.token_ids for c in completions}),
        seeds=tuple(c.seed for c in completions),
        versions=versions_of(*completions),
        score=gap_of([engine.score(prompt, ids) for ids in fixed], learner.score(prompt, fixed)),
        sampled=gap_of(
            [c.logprobs for c in completions],
            learner.score(prompt, [c.token_ids for c in completions], as_sampled=True),
        ),
    )


def past_limit(parity: PromptParity, limit: float) -> list[str]:
    """A message for each gap of a prompt that is past `limit`."""
    checks = (
        (parity.score, f"given completions of {parity.uid}"),
        (parity.sampled, f"the tokens that it sampled for {parity.uid}"),
    )
    found = (logp_gap(gap.mean, gap.max, limit, what) for gap, what in checks)
    return [message for message in found if message]


def first_with_image(places: Iterable[tuple[int, int, Prompt]]) -> tuple[int, int, Prompt]:
    """The first (step, slot, prompt) whose prompt has an image, else the first of all."""
    seen: list[tuple[int, int, Prompt]] = []
    for place in places:
        if place[2].engine_prompt.images:
            return place
        seen.append(place)
    if not seen:
        raise DataError(
            "data.train: no row is left, for all prompts are longer than the limit and data.on_overlong = drop leaves "
            "them out; raise data.max_prompt_length, or lower data.max_pixels or rollout.max_completion_length"
        )
    return seen[0]


def check_start(
    engine: RolloutEngine,
    learner: Learner,
    config: GRPOConfig,
    prompt: Prompt,
    seeds: Sequence[int],
    version: int,
) -> PromptParity:
    """The check of one prompt at the start of a run: short completions, the longest of them re-scored.

    Of an engine over several servers each one is checked. Raises GuardStop as `run.guards.logp_gap` says.
    """
    sampling = Sampling(min(START_TOKENS, config.rollout.max_completion_length), config.rollout.temperature)
    requests, limit = requests_for([prompt], [seeds], sampling), limit_for(str(learner.model.dtype))

    def check(one: RolloutEngine | Replica) -> PromptParity:
        completions = one.generate(requests)
        require_answers(requests, completions, version)
        longest = max((c.token_ids for c in completions), key=len)
        parity = compare(one, learner, prompt, completions, scored=[longest])
        for message in past_limit(parity, limit):
            apply_guard("logp_gap", f"before the first step, {message}", config.run.guards)
        return parity

    *_, (_, found) = on_each(engine, check)
    return found


def on_each(engine: RolloutEngine, check: Callable[[Any], T]) -> Iterator[tuple[str, T]]:
    """Check an engine, or each of its servers by name; one that is lost meanwhile is left out, unless all are."""
    answered = 0
    for replica in engine.replicas:
        try:
            found = check(replica)
        except ReplicaLost:
            continue
        answered += 1
        yield replica.name, found
    if not answered:
        yield "", check(engine)
