"""Rewards that are called while other completions are still being sampled.

These are isolated and async functions that take `completion`, unless they wait for a gate (`only_if`) or are called
one after the other (`max_concurrency: 1`), which goes by rows: a function of `completions` gets all of a step at once,
and a plain one runs in the thread that samples.

Scores do not depend on it. Calls begin in the order in which completions end. An error that stops the run is raised
when all have been sampled. A time-out counts from then on; a call of an isolated reward may not take longer than it.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence, Sequence
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Callable

    from mm_grpo.rewards.async_calls import AsyncCalls
    from mm_grpo.rewards.call import Batch, Call, RewardCalls
    from mm_grpo.rewards.spec import RewardSpec
    from mm_grpo.types import Completion, Prompt


def is_streamed(spec: RewardSpec) -> bool:
    """True when a reward may be called for a completion before the others of the step are there."""
    options = spec.options
    waits = options.only_if or options.max_concurrency == 1
    return spec.kind == "completion" and spec.on_loop and not waits


class StreamedCalls:
    """The calls of one batch that begin before it is complete. `Scorer.begin` makes it, and `Scorer.score` ends it.

    `results` are those of all rewards, by name; `calls` has, by name, the calls of every async or isolated reward that
    waits for no gate.
    """

    def __init__(
        self,
        batch: Batch,
        results: Mapping[str, RewardCalls],
        begin: Callable[[list[RewardCalls]], dict[str, AsyncCalls]],
    ) -> None:
        self.batch, self.results = batch, results
        self.begun: dict[str, set[int]] = {n: set() for n, one in results.items() if is_streamed(one.spec)}
        self.calls = begin([one for one in results.values() if not one.spec.options.only_if])
        self.over = False

    def add(self, row: int, prompt: Prompt, completion: Completion) -> None:
        """Begin the calls for the completion of a row."""
        cast("MutableSequence[Prompt]", self.batch.prompts)[row] = prompt
        cast("MutableSequence[Completion]", self.batch.completions)[row] = completion
        for name, begun in self.begun.items():
            begun.add(row)
            self.calls[name].add(name, self.batch.calls(self.results[name].spec, [row]))

    def missing(self, name: str, calls: Sequence[Call]) -> list[Call]:
        """Those of a reward's calls that have not begun."""
        begun = self.begun.get(name, ())
        return [call for call in calls if call.rows[0] not in begun]

    def abandon(self) -> None:
        """Give up the calls, whose answers nobody wants."""
        if self.over:
            return
        self.over = True
        for calls in {*self.calls.values()}:
            calls.abandon()
