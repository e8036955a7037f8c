"""From completions to scores: call every reward, check its answers, weight, sum and measure them.

Nothing here invents a score (law 9). `None` means that a reward does not apply. An exception, a NaN, a non-number, a
wrong count, a process that died or a time-out stops the run with a RewardError. If the reward's options say "mask",
the completions concerned get no total instead, and are counted in the metrics.

Plain functions are called one after the other (`plain.py`). Async and isolated ones run on event loops
(`async_runner.py`), together and while the engine samples (`streaming_rewards.py`). Rewards with a gate (`only_if`)
come after the gate's. Axis letters: n = P·G rows, flat.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mm_grpo.errors import RewardError
from mm_grpo.rewards.batch import Batch, TrainerState
from mm_grpo.rewards.call import RewardCalls, calls_of
from mm_grpo.rewards.outcome import ScoresByReward, check_outcomes, gated
from mm_grpo.rewards.plain import run_plain
from mm_grpo.rewards.required_columns import column_faults, routing_faults
from mm_grpo.rewards.resolve import Entry, gate_levels, resolve_entries
from mm_grpo.rewards.scores import Score, total_of
from mm_grpo.rewards.spec import RewardSpec
from mm_grpo.rewards.streaming_rewards import StreamedCalls, is_streamed

if TYPE_CHECKING:
    from mm_grpo.background import BackgroundLoop
    from mm_grpo.rewards.async_runner import AsyncRunner
    from mm_grpo.rewards.isolation import WorkerPool
    from mm_grpo.types import Completion, Prompt

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scores:
    """Scores of n completions."""

    totals: list[Score]
    """Weighted sums of the rewards that apply; None if none applies or the completion is masked."""
    parts: dict[str, list[Score]]
    """Each reward's scores, not weighted."""
    metrics: dict[str, float]
    """Per reward `rewards/{name}/mean` and `/std` (sample deviation, 0 for fewer than two scores), both absent if it
    applies to no completion. Numbers of completions without a score: `/none` (it does not apply), `/errors` and
    `/timeouts` (masked). `time/reward/{name}` in seconds; async rewards overlap. The mean of each `log_metric`."""
    extra: dict[str, list[Any]]
    """Columns of `log_extra`, n values each, None for rows without one."""
    turns: list[tuple[Score, ...]] = field(default_factory=list)
    """Totals of the model's turns in each completion, () without turns. A score of the whole conversation counts in
    its last turn."""


class Scorer:
    """Scores completions with a list of rewards.

    Args:
        entries: the config's `rewards` list (see `resolve.py`).
        conversational: prompts are messages, and batch functions get completions as
            `[{"role": "assistant", "content": text}]` and not as strings.
        max_steps: last step of the run for `trainer_state`; 0 without a bound.
        workers: processes for isolated rewards; by default the cores that this rank may use.
        several_turns: False refuses rewards with `per_turn`.
    """

    def __init__(
        self,
        entries: Iterable[Entry],
        *,
        conversational: bool = True,
        max_steps: int = 0,
        workers: int | None = None,
        several_turns: bool = True,
    ) -> None:
        self.specs = resolve_entries(entries)
        self.conversational = conversational
        self.max_steps = max_steps
        self.workers = workers
        self._column_sets: list[tuple[str, ...]] = []
        self._streamed_calls: StreamedCalls | None = None
        self._loops: dict[bool, BackgroundLoop] = {}
        self._pools: dict[str, WorkerPool] = {}
        # atexit=False: at exit the processes and threads end anyway, and joining them could hang
        weakref.finalize(self, _close, self._pools, self._loops).atexit = False
        self._levels = gate_levels(self.specs)
        check_outcomes(self.specs)
        # Two locks: steps that are sampled ahead begin while an evaluation is scored.
        self._scoring, self._beginning = threading.Lock(), threading.Lock()
        for spec in self.specs:
            if not several_turns:
                spec.options.refuse_per_turn(spec.name)
            if spec.options.isolated:
                from mm_grpo.rewards.isolation import check_isolation

                check_isolation(spec)
            elif spec.options.timeout is not None and not spec.is_async and spec.source != "built-in":
                log.info(
                    "reward %r runs in the trainer's process, so that its time-out stops the run", spec.name
                )

    def check(
        self,
        columns: Iterable[str],
        rows: Callable[[], Iterable[Mapping[str, Any]]] | None = None,
        trained: bool = True,
    ) -> None:
        """Compare what the rewards ask for with a dataset's columns, before anything is sampled.

        Call it once for each dataset; otherwise `score` checks the columns of its first batch. `rows` iterates over the
        columns of all rows for rewards with `when`. Raise RewardError if nothing supplies a parameter or a needed
        column, an option shares its name with a column, or `when` names an unknown column or, in rows that are
        `trained` on, matches none.
        """
        columns = tuple(dict.fromkeys(columns))
        faults: list[str] = []
        for spec in self.specs:
            if spec.options.when:
                faults += routing_faults(spec, columns, rows, trained=trained)
            else:
                faults += column_faults(spec, columns)
        if faults:
            raise RewardError("\n".join(faults))
        self._column_sets.append(columns)

    def asking_for(self, arguments: Sequence[str], columns: Sequence[str]) -> list[str]:
        """Return the rewards that take one of these arguments, unless a column or the config supplies it."""
        supplied = set(arguments) - set(columns)
        return [s.name for s in self.specs if supplied & {*s.required, *s.optional} - s.bound.keys()]

    def start(self, *, conversational: bool | None = None, max_steps: int | None = None) -> None:
        """Start the worker processes of isolated rewards, and return while they import the functions.

        What only the loaded rows and the plan of the run say may be given here and not to the constructor.
        `score` waits for the workers, outside any deadline, and starts those that are missing.
        """
        self.conversational = self.conversational if conversational is None else conversational
        self.max_steps = self.max_steps if max_steps is None else max_steps
        for spec in self.specs:
            if spec.options.isolated:
                self._loop(isolated=True).submit(self._pool(spec).start())

    @property
    def streams(self) -> bool:
        """True if some reward can begin before all completions of a step are sampled."""
        return any(is_streamed(spec) for spec in self.specs)

    def begin(self, count: int, columns: Iterable[str], step: int) -> StreamedCalls | None:
        """Begin to score a step of `count` completions that are still to be sampled, of prompts with these `columns`.

        Return None if no reward streams, `check` was never called, or another step's calls are running.
        """
        if not (self.streams and self._column_sets):
            return None
        with self._beginning:
            if self._streamed_calls is not None and not self._streamed_calls.over:
                return None
            rows: list[Any] = [None] * count
            state = TrainerState(step, self.max_steps)
            batch = Batch(rows, [*rows], self._dataset_columns(columns), self.conversational, state)
            rewards = self._reward_calls(count)
            ungated = [reward for reward in rewards.values() if not reward.spec.options.only_if]
            self._streamed_calls = StreamedCalls(batch, rewards, self._start_runners(ungated))
            return self._streamed_calls

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        step: int,
        streamed_calls: StreamedCalls | None = None,
    ) -> Scores:
        """Score n completions, of which `completions[i]` answers `prompts[i]`; `streamed_calls` began some calls.

        Threads take turns: an evaluation may meet the rewards of steps that are sampled ahead.
        """
        if len(prompts) != len(completions):
            raise ValueError(f"{len(prompts)} prompts for {len(completions)} completions")
        if streamed_calls is None:
            state = TrainerState(step, self.max_steps)
            batch = Batch(prompts, completions, self._checked_columns(prompts), self.conversational, state)
            streamed_calls = StreamedCalls(batch, self._reward_calls(len(completions)), {})
        elif (count := len(streamed_calls.batch.completions)) != len(completions):
            streamed_calls.abandon()
            raise ValueError(f"{len(completions)} completions where {count} were begun")
        batch, rewards = streamed_calls.batch, streamed_calls.rewards
        batch.prompts, batch.completions = prompts, completions
        try:
            with self._scoring:
                for level in self._levels:
                    for spec in level:
                        rewards[spec.name].calls = calls_of(batch, spec, _open_rows(spec, rewards))
                    self._run([rewards[spec.name] for spec in level], streamed_calls.runners)
                return self._scores(batch, rewards)
        finally:
            streamed_calls.abandon()

    def close(self) -> None:
        """Stop the event loops and the worker processes."""
        if self._streamed_calls is not None:
            self._streamed_calls.abandon()
        _close(self._pools, self._loops)

    def _reward_calls(self, count: int) -> dict[str, RewardCalls]:
        return {spec.name: RewardCalls(spec, [None] * count) for spec in self.specs}

    def _run(self, level: Sequence[RewardCalls], runners: dict[str, AsyncRunner]) -> None:
        """Make the calls of rewards that do not wait for each other, except those that `runners` started before."""
        on_loop = [reward for reward in level if reward.spec.on_loop and reward.calls]
        runners |= self._start_runners([reward for reward in on_loop if reward.spec.name not in runners])
        for reward in on_loop:
            runners[reward.spec.name].add(reward, reward.calls)
        running = dict.fromkeys(runners[reward.spec.name] for reward in on_loop)
        for runner in running:
            runner.close()
        # Plain functions run here while the loops work: finish() comes last.
        for reward in level:
            if reward.calls and not reward.spec.on_loop:
                run_plain(reward)
        for runner in running:
            runner.finish()

    def _start_runners(self, rewards: Sequence[RewardCalls]) -> dict[str, AsyncRunner]:
        """Return the runner of each async or isolated reward, by name."""
        runners: dict[str, AsyncRunner] = {}
        for isolated in (False, True):  # two loops: user code may block that of the async rewards
            group = [r for r in rewards if r.spec.on_loop and r.spec.options.isolated == isolated]
            if group:
                # imported here: asyncio would take most of the import time of mm_grpo.rewards
                from mm_grpo.rewards.async_runner import AsyncRunner

                pools = {reward.spec.name: self._pool(reward.spec) for reward in group} if isolated else None
                runner = AsyncRunner(self._loop(isolated), group, pools)
                runners |= dict.fromkeys((reward.spec.name for reward in group), runner)
        return runners

    def _loop(self, isolated: bool) -> BackgroundLoop:
        from mm_grpo.background import BackgroundLoop

        return self._loops.setdefault(isolated, BackgroundLoop("rewards"))

    def _pool(self, spec: RewardSpec) -> WorkerPool:
        if spec.name not in self._pools:
            from mm_grpo.rewards.isolation import WorkerPool

            self._pools[spec.name] = WorkerPool(spec, self.workers)
        return self._pools[spec.name]

    def _checked_columns(self, prompts: Sequence[Prompt]) -> tuple[str, ...]:
        """Return the columns of the dataset that the prompts come from; check these if none were checked."""
        columns = tuple(dict.fromkeys(name for prompt in prompts for name in prompt.sample.columns))
        if not self._column_sets and prompts:
            self.check(columns, lambda: (prompt.sample.columns for prompt in prompts), trained=False)
        return self._dataset_columns(columns)

    def _dataset_columns(self, present: Iterable[str]) -> tuple[str, ...]:
        # Rows of a mixed dataset need not hold every column, yet functions must see the same ones at each step:
        # the smallest checked set that has them all.
        columns = tuple(dict.fromkeys(present))
        return min((c for c in self._column_sets if set(columns) <= set(c)), key=len, default=columns)

    def _scores(self, batch: Batch, rewards: Mapping[str, RewardCalls]) -> Scores:
        # A reward of weight 0 is only logged: alone it would invent a total of 0.
        weighty = [reward for reward in rewards.values() if reward.spec.weight != 0]
        entering = gated(self.specs, {name: reward.scores for name, reward in rewards.items()})
        weighted = {
            reward.spec.name: [
                None if score is None else reward.spec.weight * score for score in entering[reward.spec.name]
            ]
            for reward in weighty
        }
        count = len(batch.completions)
        totals = [total_of([scores[row] for scores in weighted.values()]) for row in range(count)]
        metrics: dict[str, float] = {}
        for reward in rewards.values():
            metrics |= reward.metrics()
            for errors in filter(None, (reward.errors, reward.timeouts)):
                totals = [None if row in errors else total for row, total in enumerate(totals)]
                step, first = batch.state.global_step, next(iter(errors.values()))
                log.warning("%d completions masked at step %d: %s", len(errors), step, first)
        metrics |= {name: math.fsum(values) / len(values) for name, values in batch.logged.items()}
        return Scores(
            totals=totals,
            parts={name: reward.scores for name, reward in rewards.items()},
            metrics=metrics,
            extra={column: values for column, (_, values) in batch.extra.items()},
            turns=[
                _turn_totals(row, len(c.turn_lengths), [] if totals[row] is None else weighty, weighted)
                for row, c in enumerate(batch.completions)
            ],
        )


def _close(pools: dict[str, WorkerPool], loops: Mapping[bool, BackgroundLoop]) -> None:
    for pool in pools.values():
        loops[True].call_soon(pool.close)  # only the loop's thread may use a pool
    for loop in loops.values():
        loop.close()
    pools.clear()


def _open_rows(spec: RewardSpec, rewards: Mapping[str, RewardCalls]) -> list[int]:
    """Return the rows in which every gate of the reward scored above 0."""
    rows = range(len(rewards[spec.name].scores))
    gates = [rewards[name].scores for name in spec.options.only_if]
    return [row for row in rows if all((scores[row] or 0.0) > 0 for scores in gates)]


def _turn_totals(
    row: int, turns: int, rewards: Iterable[RewardCalls], weighted: ScoresByReward
) -> tuple[Score, ...]:
    """Return the total of each turn of one completion.

    If an outcome withholds the gain of the whole conversation, the reward is 0 in each turn.
    """
    by_turn: list[list[Score]] = [[] for _ in range(turns)]
    for reward in rewards if turns else ():
        scores: list[Score]
        whole_score = weighted[reward.spec.name][row]
        if row in reward.turns:
            withheld = whole_score == 0 and reward.scores[row] != 0
            factor = 0.0 if withheld else reward.spec.weight
            scores = [None if score is None else factor * score for score in reward.turns[row]]
        else:  # a score of the whole conversation is paid when it has ended
            scores = [*[None] * (turns - 1), whole_score]
        for turn_scores, score in zip(by_turn, scores, strict=True):
            turn_scores.append(score)
    return tuple(map(total_of, by_turn))
