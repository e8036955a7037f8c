"""From completions to scores: every reward called, its answers checked, weighted, summed and measured.

Nothing here invents a score (law 9). `None` means that a reward does not apply; an exception, a NaN, a non-number, a
wrong count, a process that died or a time-out stops the run with a RewardError, or where its options say "mask" leaves
the completions concerned without a total, counted in the metrics. Plain functions are called one after the other
(`plain.py`), async rewards and isolated ones, in worker processes (`isolation.py`), on event loops (`async_calls.py`)
beside the others and while the engine samples (`streaming_rewards.py`); what waits for a gate (`only_if`) comes after
it. One call's arguments and messages are in `call.py`. Axis letters: n = P·G rows, flat.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mm_grpo.errors import RewardError, did_you_mean
from mm_grpo.rewards.call import Batch, Call, RewardCalls, TrainerState
from mm_grpo.rewards.outcome import Scored, check_outcomes, gated
from mm_grpo.rewards.plain import run_plain
from mm_grpo.rewards.required_columns import column_faults, routing_faults
from mm_grpo.rewards.resolve import Entry, resolve_entries
from mm_grpo.rewards.scores import total_of
from mm_grpo.rewards.spec import RewardSpec
from mm_grpo.rewards.streaming_rewards import StreamedCalls, is_streamed
from mm_grpo.user_code.kept_state import kept_state

if TYPE_CHECKING:
    from mm_grpo.background import BackgroundLoop
    from mm_grpo.rewards.async_calls import AsyncCalls
    from mm_grpo.rewards.isolation import WorkerPool
    from mm_grpo.types import Completion, Prompt

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scores:
    """The scores of n completions.

    `totals[i]` is the weighted sum of the rewards that apply to completion i; None when none applies or when it is
    masked. `parts[name][i]` is what the reward answered, not weighted. `metrics` holds, per reward:
    `rewards/{name}/mean` and `/std` (sample standard deviation, 0 for fewer than two values) of its parts, both absent
    when it applies to none; the numbers of completions without a part: `rewards/{name}/none`, to which it does not
    apply, `/errors` and `/timeouts`, masked for that reason; `time/reward/{name}` in seconds (async rewards
    overlap with the others); and the mean of each value given to `log_metric`. `extra` holds the columns
    given to `log_extra`, n values each, None where none was given. `turns[i]` are the totals of the turns of the model
    in completion i: a score of the whole conversation is one of its last turn; () where it has no turns.
    """

    totals: list[float | None]
    parts: dict[str, list[float | None]]
    metrics: dict[str, float]
    extra: dict[str, list[Any]]
    turns: list[tuple[float | None, ...]] = field(default_factory=list)


class Scorer:
    """Scores completions with a list of rewards.

    `entries` is the config's `rewards` list (see `resolve.py`). With `conversational` prompts are messages, and batch
    functions get completions as `[{"role": "assistant", "content": text}]` and not as strings. `max_steps` is what
    rewards read in `trainer_state`; `workers` the number of processes for isolated rewards, by default the cores that
    this rank may use. Without `several_turns` a reward with `per_turn` is refused.
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
        self._checked: list[tuple[str, ...]] = []
        self._streamed: StreamedCalls | None = None
        self._loops: dict[bool, BackgroundLoop] = {}
        self._pools: dict[str, WorkerPool] = {}
        weakref.finalize(self, _close, self._pools, self._loops).atexit = False  # they end with the process
        self._levels = _levels(self.specs)
        check_outcomes(self.specs)
        self._scoring, self._beginning = threading.Lock(), threading.Lock()
        for spec in self.specs:
            if spec.options.per_turn and not several_turns:
                raise RewardError(
                    f"reward {spec.name!r}: per_turn = true scores the turns of conversations; set rollout.tools or "
                    "rollout.environment"
                )
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
        """Compare what the rewards ask for with the dataset's columns, before anything is sampled.

        `rows` goes through the columns of all rows, which rewards with `when` need. Raises RewardError for a parameter
        or a needed column that nothing supplies, an option that shares its name with a column, and a `when` that names
        an unknown column, or where the rows are `trained` on, none of them. Call it once for each dataset; `score` does
        it with the columns of its batch when it was never done.
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
        self._checked.append(columns)

    def asking_for(self, arguments: Sequence[str], columns: Sequence[str]) -> list[str]:
        """The names of the rewards that take one of these arguments, and neither from a column nor from the config."""
        given = set(arguments) - set(columns)
        return [s.name for s in self.specs if given & {*s.required, *s.optional} - s.bound.keys()]

    def start(self) -> None:
        """Start the worker processes of the isolated rewards, and return while they import them. `score` waits
        for them, outside any deadline, and starts those that are missing."""
        for spec in self.specs:
            if spec.options.isolated:
                self._loop(True).submit(self._pool(spec).start())

    def begin(self, count: int, columns: Iterable[str], step: int) -> StreamedCalls | None:
        """Begin the calls that can be made before all `count` completions of a step are there, whose prompts have these
        `columns`. None where no reward streams, where nothing was checked before, and while other calls are under way.
        """
        if not (self.streams and self._checked):
            return None
        state = TrainerState(step, self.max_steps)
        rows: list[Any] = [None] * count
        with self._beginning:
            if self._streamed is not None and not self._streamed.over:
                return None
            held = self._held_columns(columns)
            self._streamed = self._calls_of(Batch(rows, [*rows], held, self.conversational, state))
            return self._streamed

    @property
    def streams(self) -> bool:
        """Whether some reward can begin before all completions of a step are there."""
        return any(is_streamed(spec) for spec in self.specs)

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        step: int,
        early: StreamedCalls | None = None,
    ) -> Scores:
        """Score completions, where `completions[i]` answers `prompts[i]` (n = P·G of each, flat); `early` has the calls
        that have begun. One thread at a time: an evaluation may meet the rewards of steps that are sampled ahead."""
        if len(prompts) != len(completions):
            raise ValueError(f"{len(prompts)} prompts for {len(completions)} completions")
        if early is None:
            columns, state = self._columns(prompts), TrainerState(step, self.max_steps)
            early = self._calls_of(Batch(prompts, completions, columns, self.conversational, state))
        elif len(early.batch.completions) != len(completions):
            early.abandon()
            raise ValueError(
                f"{len(completions)} completions where {len(early.batch.completions)} were begun"
            )
        early.batch.prompts, early.batch.completions = prompts, completions
        try:
            with self._scoring:
                return self._score(early)
        finally:
            early.abandon()

    def _score(self, streamed: StreamedCalls) -> Scores:
        batch, results = streamed.batch, streamed.results
        for number, level in enumerate(self._levels):
            for spec in level:
                results[spec.name].calls = self._calls(spec, batch, results)
            called = [results[spec.name] for spec in level if results[spec.name].calls]
            self._run(called, streamed, gated=number > 0)
        return self._scores(batch, results)

    def close(self) -> None:
        """Stop the thread of the async rewards and the worker processes, if there are any."""
        if self._streamed is not None:
            self._streamed.abandon()
        _close(self._pools, self._loops)

    def _calls_of(self, batch: Batch) -> StreamedCalls:
        results = {spec.name: RewardCalls(spec, [None] * len(batch.completions)) for spec in self.specs}
        return StreamedCalls(batch, results, self._begin)

    def _calls(self, spec: RewardSpec, batch: Batch, results: Mapping[str, RewardCalls]) -> list[Call]:
        """The calls to make: where every gate of the reward has scored above 0."""
        rows = set(range(len(batch.completions)))
        for name in spec.options.only_if:
            rows &= {row for row, score in enumerate(results[name].scores) if score is not None and score > 0}
        return batch.calls(spec, sorted(rows))

    def _run(self, rewards: Sequence[RewardCalls], streamed: StreamedCalls, *, gated: bool) -> None:
        """Make the calls of rewards that do not wait for each other; of those that have begun, the rest."""
        begun = self._begin(rewards) if gated else streamed.calls
        together = [one for one in rewards if one.spec.on_loop]
        for one in together:
            begun[one.spec.name].add(one.spec.name, streamed.missing(one.spec.name, one.calls))
        calls = dict.fromkeys(begun[one.spec.name] for one in together)
        for each in calls:
            each.close()
        try:
            for one in rewards:
                if not one.spec.on_loop:
                    self._run_here(one)
            for each in calls:
                each.finish()
        except BaseException:
            for each in calls:
                each.abandon()
            raise

    def _run_here(self, one: RewardCalls) -> None:
        start = time.perf_counter()
        try:
            with kept_state(f"reward {one.spec.name!r}"):
                run_plain(one)
        finally:
            one.seconds += time.perf_counter() - start

    def _begin(self, rewards: Sequence[RewardCalls]) -> dict[str, AsyncCalls]:
        """By reward, what makes its calls on an event loop: one of the async ones, which may block it, and another one
        of those in worker processes."""
        begun: dict[str, AsyncCalls] = {}
        for isolated in (False, True):
            own = [one for one in rewards if one.spec.on_loop and one.spec.options.isolated == isolated]
            if own:
                # asyncio costs most of the import of mm_grpo.rewards
                from mm_grpo.rewards.async_calls import AsyncCalls

                pools = {one.spec.name: self._pool(one.spec) for one in own} if isolated else None
                begun |= dict.fromkeys(
                    (one.spec.name for one in own), AsyncCalls(self._loop(isolated), own, pools)
                )
        return begun

    def _loop(self, isolated: bool) -> BackgroundLoop:
        from mm_grpo.background import BackgroundLoop

        return self._loops.setdefault(isolated, BackgroundLoop("rewards"))

    def _pool(self, spec: RewardSpec) -> WorkerPool:
        if spec.name not in self._pools:
            from mm_grpo.rewards.isolation import WorkerPool

            self._pools[spec.name] = WorkerPool(spec, self.workers)
        return self._pools[spec.name]

    def _columns(self, prompts: Sequence[Prompt]) -> tuple[str, ...]:
        """The columns of the dataset that the prompts come from: the smallest checked set that has them all.

        Rows of a mixed dataset need not hold every column, yet functions see the same ones at each step.
        """
        present = tuple(dict.fromkeys(name for prompt in prompts for name in prompt.sample.columns))
        if not self._checked and prompts:
            self.check(present, lambda: (prompt.sample.columns for prompt in prompts), trained=False)
        return self._held_columns(present)

    def _held_columns(self, present: Iterable[str]) -> tuple[str, ...]:
        """The smallest checked set of columns that has all of these."""
        columns = tuple(dict.fromkeys(present))
        return min((c for c in self._checked if set(columns) <= set(c)), key=len, default=columns)

    def _scores(self, batch: Batch, results: Mapping[str, RewardCalls]) -> Scores:
        # A part of weight 0 is only watched: alone it would make an invented 0.
        counted = [one for one in results.values() if one.spec.weight != 0]
        entering = gated(self.specs, {name: one.scores for name, one in results.items()})
        weighted = {
            one.spec.name: [None if s is None else one.spec.weight * s for s in entering[one.spec.name]]
            for one in counted
        }
        totals = [
            total_of([part[row] for part in weighted.values()]) for row in range(len(batch.completions))
        ]
        metrics: dict[str, float] = {}
        for name, one in results.items():
            metrics.update(_metrics(name, one))
            for kept in filter(None, (one.errors, one.timeouts)):
                totals = [None if row in kept else total for row, total in enumerate(totals)]
                step, first = batch.state.global_step, next(iter(kept.values()))
                log.warning("%d completions masked at step %d: %s", len(kept), step, first)
        metrics.update({name: math.fsum(values) / len(values) for name, values in batch.logged.items()})
        return Scores(
            totals=totals,
            parts={name: one.scores for name, one in results.items()},
            metrics=metrics,
            extra={column: values for column, (_, values) in batch.extra.items()},
            turns=[
                _turn_totals(row, len(done.turn_lengths), [] if totals[row] is None else counted, weighted)
                for row, done in enumerate(batch.completions)
            ],
        )


def _close(pools: dict[str, WorkerPool], loops: Mapping[bool, BackgroundLoop]) -> None:
    for pool in pools.values():
        loops[True].call_soon(pool.close)
    for loop in loops.values():
        loop.close()
    pools.clear()


def _turn_totals(
    row: int, turns: int, counted: Iterable[RewardCalls], weighted: Scored
) -> tuple[float | None, ...]:
    """The total of each turn of one completion, as `_scores` makes that of all of it.

    Where an outcome withholds the gain of a whole conversation, the reward is 0 in each of its turns.
    """
    parts: list[list[float | None]] = [[] for _ in range(turns)]
    for one in counted if turns else ():
        scores: list[float | None]
        entered = weighted[one.spec.name][row]
        if row in one.turns:
            withheld = entered == 0 and one.scores[row] != 0
            factor = 0.0 if withheld else one.spec.weight
            scores = [None if score is None else factor * score for score in one.turns[row]]
        else:  # a score that is one for all turns is paid when the conversation has ended
            scores = [*[None] * (turns - 1), entered]
        for own, value in zip(parts, scores, strict=True):
            own.append(value)
    return tuple(map(total_of, parts))


def _metrics(name: str, results: RewardCalls) -> dict[str, float]:
    applied = [score for score in results.scores if score is not None]
    errors, timeouts = len(results.errors), len(results.timeouts)
    metrics = {
        f"rewards/{name}/none": float(len(results.scores) - len(applied) - errors - timeouts),
        f"rewards/{name}/errors": float(errors),
        f"rewards/{name}/timeouts": float(timeouts),
        f"time/reward/{name}": results.seconds,
    }
    if applied:
        mean = math.fsum(applied) / len(applied)
        squares = math.fsum((score - mean) ** 2 for score in applied)
        metrics[f"rewards/{name}/mean"] = mean
        metrics[f"rewards/{name}/std"] = math.sqrt(squares / (len(applied) - 1)) if len(applied) > 1 else 0.0
    return metrics


def _levels(specs: Sequence[RewardSpec]) -> list[list[RewardSpec]]:
    """The rewards in the order of their gates: each level waits for those before it."""
    names = [spec.name for spec in specs]
    for spec in specs:
        for gate in spec.options.only_if:
            if gate not in names or gate == spec.name:
                hint = did_you_mean(gate, [n for n in names if n != spec.name])
                listed = f"no other reward of the list; {hint}its rewards: {', '.join(names)}"
                raise RewardError(f"reward {spec.name!r}: only_if is {gate!r}, which is {listed}")
    levels: list[list[RewardSpec]] = []
    done: set[str] = set()
    while left := [spec for spec in specs if spec.name not in done]:
        level = [spec for spec in left if done.issuperset(spec.options.only_if)]
        if not level:
            raise RewardError(
                f"rewards: only_if goes in a circle among {', '.join(spec.name for spec in left)}"
            )
        levels.append(level)
        done.update(spec.name for spec in level)
    return levels
