"""Parity: do engine and learner see the same tokens, images and weights?

Pure comparisons for the check at the start of a run, the verified weight sync and `mm-grpo doctor`. Two log-prob gaps
are kept apart:

- `score`: the engine re-scores a given completion, the learner does too, both over the whole vocabulary
  at temperature 1. Weights and images show here, sampling does not.
- `sampled`: the log-probs that the engine reported while sampling against the learner's under the same
  media mask and temperature. Temperature, mask and the engine's caches show here too.

Each engine checks in `generate` that prompt ids are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import DataError
from mm_grpo.health import apply_guard
from mm_grpo.health.checks import LogprobGap, limit_for, logp_gap
from mm_grpo.learner.learner import Learner
from mm_grpo.rollout.engine import (
    Replica,
    ReplicaLost,
    RolloutEngine,
    Sampling,
    requests_for,
    require_answers,
)
from mm_grpo.types import Completion, Prompt

T = TypeVar("T")

START_TOKENS = 32
"""Largest length of a completion in the check at the start of a run."""


@dataclass(frozen=True)
class PromptParity:
    """Gaps of one prompt and its completions."""

    uid: str
    prompt_tokens: int
    media: int
    """Images and videos of the prompt."""
    completions: int
    distinct: int
    """Number of different completions."""
    seeds: tuple[int, ...]
    score: LogprobGap
    sampled: LogprobGap


def gap_of(engine: Iterable[Sequence[float]], learner: Iterable[Sequence[float]]) -> LogprobGap:
    """Return the gap between two lists of completions' log-probs. A NaN on either side makes it NaN.

    >>> gap_of([[-1.0, -2.0]], [[-1.5, -2.0]])
    LogprobGap(mean=0.25, max=0.5, tokens=2)
    """
    pairs = zip(engine, learner, strict=True)
    differences = [a - b for completion_pair in pairs for a, b in zip(*completion_pair, strict=True)]
    return LogprobGap.of(torch.tensor(differences, dtype=torch.float64))


def compare(
    engine: RolloutEngine | Replica,
    learner: Learner,
    prompt: Prompt,
    completions: Sequence[Completion],
    scored: Sequence[Sequence[int]] | None = None,
) -> PromptParity:
    """Return both gaps of a prompt. `scored` are the token ids to re-score, those of `completions` by default."""
    sampled = [c.token_ids for c in completions]
    scored = sampled if scored is None else scored
    return PromptParity(
        uid=prompt.uid,
        prompt_tokens=len(prompt.token_ids),
        media=len(prompt.engine_prompt.media),
        completions=len(completions),
        distinct=len(set(sampled)),
        seeds=tuple(c.seed for c in completions),
        score=gap_of([engine.score(prompt, ids) for ids in scored], learner.score(prompt, scored)),
        sampled=gap_of([c.logprobs for c in completions], learner.score(prompt, sampled, as_sampled=True)),
    )


def past_limit(parity: PromptParity, limit: float) -> list[str]:
    """Return a message for each gap of a prompt that is past `limit` nats."""
    messages = (
        logp_gap(parity.score, limit, f"given completions of {parity.uid}"),
        logp_gap(parity.sampled, limit, f"the tokens that it sampled for {parity.uid}"),
    )
    return [message for message in messages if message]


def first_with_media(places: Iterable[tuple[int, int, Prompt]]) -> tuple[int, int, Prompt]:
    """Return the first (step, slot, prompt) with an image or a video in the prompt, else the first of all.

    Raises DataError if there are no places.
    """
    first = None
    for place in places:
        if place[2].engine_prompt.media:
            return place
        first = first or place
    if first is None:
        raise DataError(
            "data.train: no row is left, because all prompts are longer than the limit and data.on_overlong = drop "
            "leaves them out; raise data.max_prompt_length, or lower data.max_pixels, data.video_max_frames or "
            "rollout.max_completion_length"
        )
    return first


def check_start(
    engine: RolloutEngine,
    learner: Learner,
    config: GRPOConfig,
    prompt: Prompt,
    seeds: Sequence[int],
    version: int,
) -> PromptParity:
    """Check one prompt at the start of a run: short completions, the longest of them re-scored.

    Checks each server of an engine over several. Raises GuardStop as `run.guards.logp_gap` says.
    """
    sampling = Sampling(min(START_TOKENS, config.rollout.max_completion_length), config.rollout.temperature)
    requests, limit = requests_for([prompt], [seeds], sampling), limit_for(str(learner.model.dtype))

    def check(server: RolloutEngine | Replica) -> PromptParity:
        completions = server.generate(requests)
        require_answers(requests, completions, version)
        longest = max((c.token_ids for c in completions), key=len)
        parity = compare(server, learner, prompt, completions, scored=[longest])
        for message in past_limit(parity, limit):
            apply_guard("logp_gap", f"before the first step, {message}", config.run.guards)
        return parity

    return [parity for _, parity in on_each(engine, check)][-1]


def on_each(engine: RolloutEngine, check: Callable[[Any], T]) -> Iterator[tuple[str, T]]:
    """Yield (name, result) of `check` on each server of an engine, or ("", result) for a single engine.

    Leaves out servers that are lost meanwhile; if all are, checks the engine itself.
    """
    answered = False
    for replica in engine.replicas:
        try:
            result = check(replica)
        except ReplicaLost:
            continue
        answered = True
        yield replica.name, result
    if not answered:
        yield "", check(engine)
