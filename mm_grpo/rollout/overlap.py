"""Completions that are scored while others are still being sampled.

The engine hands each back when it is done (`RequestStream`), and those rewards that can begin with it do
(rewards/streaming_rewards.py). Only the first process scores, so with several it is its own completions that are scored
early; those of the others come when all have sampled. Where no reward can begin early the engine is asked for all at
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from mm_grpo.rollout.engine import answered, require_answers, stream_of

if TYPE_CHECKING:
    from mm_grpo.distributed.ranks import Ranks
    from mm_grpo.rewards.scorer import Scorer
    from mm_grpo.rewards.streaming_rewards import StreamedCalls
    from mm_grpo.rollout.engine import Request, RolloutEngine
    from mm_grpo.rollout.prompts import StepPrompts
    from mm_grpo.rollout.turns import Sampler
    from mm_grpo.types import Completion


@dataclass(frozen=True)
class Scoring:
    """The scores of one batch on their way. `rows` are the places of this process's completions among those of all.

    `early` is None on the other processes, and where other calls were on their way.
    """

    early: StreamedCalls | None
    rows: Sequence[int]

    def add(self, place: int, request: Request, completion: Completion) -> None:
        """Begin with the completion of the request at that place of this process's."""
        if self.early is not None:
            self.early.add(self.rows[place], request.prompt, completion)

    def abandon(self) -> None:
        """Give up what was begun."""
        if self.early is not None:
            self.early.abandon()


def begin_scoring(
    scorer: Scorer, asked: StepPrompts, generations: int, step: int, ranks: Ranks
) -> Scoring | None:
    """Get ready to score `generations` completions of each prompt, over all processes. Collective.

    None where no reward can begin before all completions are there.
    """
    if not scorer.streams:
        return None
    own = [(slot, tuple(p.sample.columns)) for slot, p in zip(asked.slots, asked.prompts, strict=True)]
    places = sorted(place for shard in ranks.all_gather(own, "slots") for place in shard)
    first = {slot: at * generations for at, (slot, _) in enumerate(places)}
    rows = [first[slot] + g for slot in asked.slots for g in range(generations)]
    columns = dict.fromkeys(name for _, names in places for name in names)
    with ranks.fail_together("rewards"):
        return Scoring(scorer.begin(len(places) * generations, columns, step) if ranks.first else None, rows)


def sample(
    engine: Sampler, requests: Sequence[Request], scoring: Scoring | None, version: int | None = None
) -> list[Completion]:
    """One completion per request, in order, each handed to `scoring` when it is done.

    Raises GuardStop where one was not sampled with its seed, or not under weights number `version`.
    """
    if scoring is None:
        completions = engine.generate(requests) if requests else []
    else:

        def done(place: int, completion: Completion) -> None:
            if version is not None:
                require_answers([requests[place]], [completion], version)
            scoring.add(place, requests[place], completion)

        try:
            with stream_of(cast("RolloutEngine", engine)) as stream:
                completions = answered(stream, requests, done)
        except BaseException:
            scoring.abandon()
            raise
    if version is not None:
        require_answers(requests, completions, version)
    return completions
