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
    from mm_grpo.rewards.isolation import IsolatedCalls
    from mm_grpo.rewards.spec import RewardSpec
    from mm_grpo.types import Completion, Prompt


def is_streamed(spec: RewardSpec) -> bool:
    """True when a reward may be called for a completion before the others of the step are there."""
    options = spec.options
    waits = options.only_if or options.max_concurrency == 1
    return spec.kind == "completion" and (spec.on_loop or options.isolated) and not waits


class StreamedCalls:
    """The calls of one batch that begin before it is complete. `Scorer.begin` makes it, and `Scorer.score` ends it.

    `results` are those of all rewards, by name; `on_loop` has the calls of every async reward that waits for no gate,
    `isolated` those of isolated ones, by name, as they are begun.
    """

    def __init__(
        self,
        batch: Batch,
        results: Mapping[str, RewardCalls],
        begin: Callable[[RewardCalls], IsolatedCalls],
        on_loop: Callable[[list[RewardCalls]], AsyncCalls],
    ) -> None:
        self.batch, self.results, self._begin = batch, results, begin
        self.begun: dict[str, set[int]] = {n: set() for n, one in results.items() if is_streamed(one.spec)}
        ungated = [one for one in results.values() if one.spec.on_loop and not one.spec.options.only_if]
        self.on_loop = on_loop(ungated) if ungated else None
        self.isolated: dict[str, IsolatedCalls] = {}
        self.over = False

    def add(self, row: int, prompt: Prompt, completion: Completion) -> None:
        """Begin the calls for the completion of a row."""
        cast("MutableSequence[Prompt]", self.batch.prompts)[row] = prompt
        cast("MutableSequence[Completion]", self.batch.completions)[row] = completion
        for name, begun in self.begun.items():
            results = self.results[name]
            begun.add(row)
            calls = self.batch.calls(results.spec, [row])
            if calls and self.on_loop is not None and results.spec.on_loop:
                self.on_loop.add(name, calls)
            elif calls:
                if name not in self.isolated:
                    self.isolated[name] = self._begin(results)
                self.isolated[name].add_calls(calls)

    def missing(self, name: str, calls: Sequence[Call]) -> list[Call]:
        """Those of a reward's calls that have not begun."""
        begun = self.begun.get(name, ())
        return [call for call in calls if call.rows[0] not in begun]

    def abandon(self) -> None:
        """Give up the calls, whose answers nobody wants."""
        if self.over:
            return
        self.over = True
        if self.on_loop is not None:
            self.on_loop.abandon()
        for calls in self.isolated.values():
            calls.abandon()
