"""Reward calls that start while other completions are still being sampled.

Isolated and async functions that take `completion` are streamed, unless they wait for a gate (`only_if`) or are called
one after the other in the order of rows (`max_concurrency: 1`). A function of `completions` needs the whole step, and a
plain one would run in the thread that samples.

Streaming changes no score. Calls start in the order in which completions end. An error that stops the run is raised
when all have been sampled. A time-out counts from then on; a call of an isolated reward may not take longer than it.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence
from typing import TYPE_CHECKING, cast

from mm_grpo.rewards.call import calls_of

if TYPE_CHECKING:
    from mm_grpo.rewards.async_runner import AsyncRunner
    from mm_grpo.rewards.batch import Batch
    from mm_grpo.rewards.call import RewardCalls
    from mm_grpo.rewards.spec import RewardSpec
    from mm_grpo.types import Completion, Prompt


def is_streamed(spec: RewardSpec) -> bool:
    """Return True if a reward may be called for a completion before the step's others are sampled."""
    options = spec.options
    waits = options.only_if or options.max_concurrency == 1
    return spec.kind == "completion" and spec.on_loop and not waits


class StreamedCalls:
    """Calls of one step that start before its batch is complete. Made by `Scorer.begin`, ended by `Scorer.score`."""

    def __init__(
        self, batch: Batch, rewards: Mapping[str, RewardCalls], runners: dict[str, AsyncRunner]
    ) -> None:
        self.batch, self.rewards, self.runners = batch, rewards, runners  # rewards and runners by reward name
        self.over = False

    def add(self, row: int, prompt: Prompt, completion: Completion) -> None:
        """Start the calls for the completion of a row."""
        cast("MutableSequence[Prompt]", self.batch.prompts)[row] = prompt
        cast("MutableSequence[Completion]", self.batch.completions)[row] = completion
        for name, reward in self.rewards.items():
            if is_streamed(reward.spec):
                self.runners[name].add(reward, calls_of(self.batch, reward.spec, [row]))

    def abandon(self) -> None:
        """Cancel the calls that still run."""
        if self.over:
            return
        self.over = True
        for runner in {*self.runners.values()}:
            runner.abandon()
