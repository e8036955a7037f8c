"""Rewards that are called while other completions are still being sampled.

Which may be: those that are called for one completion at a time and not in the thread that samples, that is isolated
and async functions that take `completion`, unless they wait for a gate (`only_if`). What takes `completions` is
promised all of a step at once, and a plain function runs in the thread that samples and may look at, or change, the
state of the process; both are called when all have been sampled.

Scores do not depend on it, nor does what a call sees. Calls begin in the order in which completions end; with
`max_concurrency: 1` in the order of the rows, one after the other, as ever. An error that stops the run is raised when
all have been sampled. A time-out counts from then on; a call of an isolated reward may not take longer than it.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, cast

from mm_grpo.rewards.user_code import kept_alive

if TYPE_CHECKING:
    from collections.abc import Callable

    from mm_grpo.rewards.async_calls import AsyncCalls
    from mm_grpo.rewards.call import Batch, Call, RewardCalls
    from mm_grpo.rewards.isolation import Step, WorkerPool
    from mm_grpo.rewards.spec import RewardSpec
    from mm_grpo.types import Completion, Prompt


def begins_early(spec: RewardSpec) -> bool:
    """Whether a reward may be called for a completion before the others of the step are there."""
    options = spec.options
    return spec.kind == "completion" and (spec.on_loop or options.isolated) and not options.only_if


class EarlyCalls:
    """The calls of one batch that begin before it is complete. `Scorer.begin` makes it, and `Scorer.score` ends it.

    `results` are those of all rewards, by name; `on_loop` has the calls of every async reward that waits for no gate.
    """

    def __init__(
        self,
        batch: Batch,
        results: Mapping[str, RewardCalls],
        pool: Callable[[], WorkerPool],
        on_loop: Callable[[list[RewardCalls]], AsyncCalls],
    ) -> None:
        self.batch, self.results, self._pool = batch, results, pool
        self.begun: dict[str, set[int]] = {n: set() for n, one in results.items() if begins_early(one.spec)}
        ungated = [one for one in results.values() if one.spec.on_loop and not one.spec.options.only_if]
        self.on_loop = on_loop(ungated) if ungated else None
        self.there = [False] * len(batch.completions)
        self.steps: dict[str, Step] = {}
        self.over = False
        self._stack = ExitStack()
        if self.on_loop is not None:
            self._stack.enter_context(kept_alive(here=False))

    def add(self, row: int, prompt: Prompt, completion: Completion) -> None:
        """Begin the calls for the completion of a row."""
        cast("MutableSequence[Prompt]", self.batch.prompts)[row] = prompt
        cast("MutableSequence[Completion]", self.batch.completions)[row] = completion
        self.there[row] = True
        for name, begun in self.begun.items():
            spec = self.results[name].spec
            if spec.options.max_concurrency != 1:
                rows = [row]
            else:  # those that have come, as far as none is missing
                rows, following = [], len(begun)
                while following < len(self.there) and self.there[following]:
                    rows.append(following)
                    following += 1
            begun.update(rows)
            if calls := self.batch.calls(spec, rows) if rows else ():
                self._begin(name, calls)

    def missing(self, name: str, calls: Sequence[Call]) -> list[Call]:
        """Those of a reward's calls that have not begun."""
        begun = self.begun.get(name, ())
        return [call for call in calls if call.rows[0] not in begun]

    def end(self) -> None:
        """All calls have ended, or were given up by those who made them."""
        self.over = True
        self._stack.close()

    def abandon(self) -> None:
        """Give up the calls, whose answers nobody wants."""
        if self.over:
            return
        self.end()
        if self.on_loop is not None:
            self.on_loop.abandon()
        for step in self.steps.values():
            self._pool().abandon(step)

    def _begin(self, name: str, calls: list[Call]) -> None:
        results = self.results[name]
        if results.spec.on_loop:
            assert self.on_loop is not None
            self.on_loop.add(name, calls)
            return
        if name not in self.steps:
            self.steps[name] = self._pool().begin(results)
        self.steps[name].add(calls)
