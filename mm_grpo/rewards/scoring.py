"""From completions to scores: every reward called, its answers checked, weighted, summed and measured.

Nothing here invents a score (law 9). `None` means that a reward does not apply; an exception, a NaN, an
infinity, a non-number, a wrong count, a process that died or a time-out stops the run with a RewardError,
or where the policy says "mask" leaves the completions concerned without a total, counted in the metrics.
Totals and raw parts stay apart. How one function is called is in `calls.py`, how its calls are made in
`running.py`, `loop.py` and `pool.py`, and what a policy holds in `policy.py`. Within a step, async rewards
run beside the others; those that wait for a gate (`only_if`) come after it. Scoring begins when the step's
completions are all there. Axis letters: n = P·G rows, flat.
"""

from __future__ import annotations

import difflib
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_grpo.errors import RewardError
from mm_grpo.rewards.calls import Batch, Call, TrainerState
from mm_grpo.rewards.policy import Action
from mm_grpo.rewards.registry import RewardSpec
from mm_grpo.rewards.resolve import Entry, resolve_entries
from mm_grpo.rewards.running import Tally, check_isolation, run_isolated, run_plain, task_of

if TYPE_CHECKING:
    from mm_grpo.rewards.loop import BackgroundLoop
    from mm_grpo.rewards.pool import Pool
    from mm_grpo.types import Completion, Prompt

log = logging.getLogger(__name__)

Work = Sequence[tuple[RewardSpec, Sequence[Call], Tally]]


@dataclass(frozen=True)
class Scores:
    """The scores of n completions.

    `totals[i]` is the weighted sum of the rewards that apply to completion i, each clipped if its policy
    says so; None when none applies or when it is masked. `parts[name][i]` is what the reward answered,
    neither weighted nor clipped. `metrics` holds, per reward: `rewards/{name}/mean` and `/std` (sample
    standard deviation, 0 for fewer than two values) of its parts, both absent when it applies to none;
    the numbers of completions without a part: `rewards/{name}/none`, to which it does not apply,
    `/errors` and `/timeouts`, masked for that reason; `time/reward/{name}` in seconds (async rewards
    overlap with the others); and the mean of each value given to `log_metric`. `extra` holds the columns
    given to `log_extra`, n values each, None where none was given.
    """

    totals: list[float | None]
    parts: dict[str, list[float | None]]
    metrics: dict[str, float]
    extra: dict[str, list[Any]]


class Scorer:
    """Scores completions with a list of rewards.

    `entries` is the config's `rewards` list (see `resolve.py`). `on_error` and `on_timeout` ("stop" or
    "mask") hold for rewards whose own policy says nothing: under "mask" the completions of a call that
    fails, or that get a score that is none, have no total and are counted. A batch function's call has all
    of its completions. `conversational` says that prompts are messages, so that batch functions get
    completions as `[{"role": "assistant", "content": text}]` and not as strings. `max_steps` is what
    rewards read in `trainer_state`; `base` the folder of relative paths; `workers` the number of processes
    for isolated rewards, by default the cores that this rank may use. They start at the first step.
    """

    def __init__(
        self,
        entries: Iterable[Entry],
        *,
        on_error: Action = "stop",
        on_timeout: Action | None = None,
        conversational: bool = True,
        max_steps: int = 0,
        base: Path | None = None,
        workers: int | None = None,
    ) -> None:
        for key, action in (("on_error", on_error), ("on_timeout", on_timeout or on_error)):
            if action not in ("stop", "mask"):
                raise RewardError(f"rewards: {key} is {action!r}; legal are 'stop' and 'mask'")
        self.specs = resolve_entries(entries, base=base)
        self.on_error: Action = on_error
        self.on_timeout: Action = on_timeout or on_error
        self.conversational = conversational
        self.max_steps = max_steps
        self.workers = workers
        self._checked: list[tuple[str, ...]] = []
        self._loop: BackgroundLoop | None = None
        self._pool: Pool | None = None
        self._levels = _levels(self.specs)
        for spec in self.specs:
            if spec.policy.isolated:
                check_isolation(spec)
            elif spec.policy.timeout is not None and not spec.is_async:
                log.info(
                    "reward %r has a time-out and runs in the trainer's process, where nothing can end it: a "
                    "time-out stops the run (isolated: true runs it in a process that can be killed)",
                    spec.name,
                )

    def check(self, columns: Iterable[str]) -> None:
        """Compare what the rewards ask for with the dataset's columns, before anything is sampled.

        Raises RewardError for a parameter or a needed column that nothing supplies, and for an option
        that shares its name with a column. Call it once for each dataset; `score` does it with the
        columns of its batch when it was never done.
        """
        columns = tuple(dict.fromkeys(columns))
        for spec in self.specs:
            _check_columns(spec, columns)
        self._checked.append(columns)

    def start(self) -> None:
        """Start the worker processes of the isolated rewards; `score` does it otherwise, and then waits for
        them, which no deadline counts."""
        for spec in self.specs:
            if spec.policy.isolated:
                self._workers_pool().begin(task_of(spec))

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion], step: int) -> Scores:
        """Score completions, where `completions[i]` answers `prompts[i]` (n = P·G of each, flat)."""
        if len(prompts) != len(completions):
            raise ValueError(
                f"{len(prompts)} prompts for {len(completions)} completions; there must be as many"
            )
        columns = self._columns(prompts)
        batch = Batch(prompts, completions, columns, self.conversational, TrainerState(step, self.max_steps))
        tallies = {spec.name: self._tally(spec, len(completions)) for spec in self.specs}
        for level in self._levels:
            work = [(spec, self._calls(spec, batch, tallies), tallies[spec.name]) for spec in level]
            self._run([one for one in work if one[1]])
        return self._scores(batch, tallies)

    def close(self) -> None:
        """Stop the thread of the async rewards and the worker processes, if there are any."""
        if self._loop is not None:
            self._loop.close()
        if self._pool is not None:
            self._pool.close()

    def _tally(self, spec: RewardSpec, n: int) -> Tally:
        on_error = spec.policy.on_error or self.on_error
        on_timeout = spec.policy.on_timeout or spec.policy.on_error or self.on_timeout
        return Tally(spec, on_error, on_timeout, [None] * n)

    def _calls(self, spec: RewardSpec, batch: Batch, tallies: Mapping[str, Tally]) -> list[Call]:
        """The calls to make: where every gate of the reward has scored above 0."""
        gates = [tallies[name].scores for name in spec.policy.only_if]
        if not gates:
            return batch.calls(spec)
        rows = [
            row
            for row in range(len(batch.completions))
            if all((score := gate[row]) is not None and score > 0 for gate in gates)
        ]
        return batch.calls(spec, rows)

    def _run(self, work: Work) -> None:
        """Make the calls of rewards that do not wait for each other."""
        waiting = [one for one in work if one[0].on_loop]
        here = [one for one in work if not one[0].on_loop]
        if not waiting:
            self._run_here(here)
            return
        from mm_grpo.rewards import loop  # asyncio costs most of the import of mm_grpo.rewards

        self._loop = self._loop or loop.BackgroundLoop()
        since, future = time.monotonic(), self._loop.start(loop.run_async(waiting))
        try:
            self._run_here(here)
        except BaseException:
            self._loop.abandon(future)
            raise
        loop.finish(self._loop, future, waiting, since)

    def _run_here(self, work: Work) -> None:
        for spec, calls, tally in work:
            if spec.policy.isolated:
                run_isolated(spec, calls, tally, self._workers_pool())
            else:
                run_plain(spec, calls, tally)

    def _workers_pool(self) -> Pool:
        if self._pool is None:
            from mm_grpo.rewards.pool import Pool

            self._pool = Pool(self.workers)
        return self._pool

    def _columns(self, prompts: Sequence[Prompt]) -> tuple[str, ...]:
        """The columns of the dataset that the prompts come from: the smallest checked set that has them all.

        Rows of a mixed dataset need not hold every column, yet functions see the same ones at each step.
        """
        present = tuple(dict.fromkeys(name for prompt in prompts for name in prompt.sample.columns))
        if not self._checked and prompts:
            self.check(present)
        return min((c for c in self._checked if set(present) <= set(c)), key=len, default=present)

    def _scores(self, batch: Batch, tallies: dict[str, Tally]) -> Scores:
        masked = {row for tally in tallies.values() for kept in tally.masked for row in kept}
        parts = [
            (spec.weight, spec.policy.clipped, tallies[spec.name].scores)
            for spec in self.specs
            if spec.weight != 0
        ]
        totals = [
            None
            if row in masked
            else _total(
                [
                    weight * clipped(score)
                    for weight, clipped, scores in parts
                    if (score := scores[row]) is not None
                ]
            )
            for row in range(len(batch.completions))
        ]
        metrics: dict[str, float] = {}
        for name, tally in tallies.items():
            metrics.update(_metrics(name, tally))
            for kept in tally.masked:
                if kept:
                    log.warning(
                        "%d completions masked at step %d: %s",
                        len(kept),
                        batch.state.global_step,
                        next(iter(kept.values())),
                    )
        metrics.update({name: math.fsum(values) / len(values) for name, values in batch.logged.items()})
        return Scores(
            totals=totals,
            parts={name: tally.scores for name, tally in tallies.items()},
            metrics=metrics,
            extra={column: values for column, (_, values) in batch.extra.items()},
        )


def _total(applied: Sequence[float]) -> float | None:
    """The sum of the weighted parts that apply. A part of weight 0 is only watched and not among them: were
    it to make a total by itself, that total would be an invented 0."""
    return math.fsum(applied) if applied else None


def _metrics(name: str, tally: Tally) -> dict[str, float]:
    applied = [score for score in tally.scores if score is not None]
    errors, timeouts = (len(kept) for kept in tally.masked)
    metrics = {
        f"rewards/{name}/none": float(len(tally.scores) - len(applied) - errors - timeouts),
        f"rewards/{name}/errors": float(errors),
        f"rewards/{name}/timeouts": float(timeouts),
        f"time/reward/{name}": tally.seconds,
    }
    if applied:
        mean = math.fsum(applied) / len(applied)
        spread = math.fsum((score - mean) ** 2 for score in applied)
        metrics[f"rewards/{name}/mean"] = mean
        metrics[f"rewards/{name}/std"] = math.sqrt(spread / (len(applied) - 1)) if len(applied) > 1 else 0.0
    return metrics


def _levels(specs: Sequence[RewardSpec]) -> list[list[RewardSpec]]:
    """The rewards in the order of their gates: each level waits for those before it."""
    names = [spec.name for spec in specs]
    for spec in specs:
        for gate in spec.policy.only_if:
            if gate not in names or gate == spec.name:
                near = difflib.get_close_matches(gate, [n for n in names if n != spec.name], n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise RewardError(
                    f"reward {spec.name!r}: only_if is {gate!r}, which is no other reward of the list; {hint}"
                    f"its rewards: {', '.join(names)}"
                )
    levels: list[list[RewardSpec]] = []
    done: set[str] = set()
    while left := [spec for spec in specs if spec.name not in done]:
        level = [spec for spec in left if done.issuperset(spec.policy.only_if)]
        if not level:
            raise RewardError(
                f"rewards: only_if goes in a circle among {', '.join(spec.name for spec in left)}; one of "
                f"them must be scored without waiting for the others"
            )
        levels.append(level)
        done.update(spec.name for spec in level)
    return levels


def _check_columns(spec: RewardSpec, columns: Sequence[str]) -> None:
    name, listed = spec.name, ", ".join(columns) or "none"
    for asked in spec.required:
        if asked not in spec.supplied and asked not in spec.bound and asked not in columns:
            raise RewardError(
                f"reward {name!r} asks for {asked!r}, which has no default and which no column supplies; "
                f"the dataset's columns: {listed}; always there: {', '.join(sorted(spec.supplied))}. Name "
                f"the column to use in data.columns ({{{asked}: its_name}}), or set the value in the entry "
                f"({{name: {name}, {asked}: ...}})"
            )
    for asked in spec.needs:
        if asked not in spec.bound and asked not in columns:
            raise RewardError(
                f"reward {name!r} needs the column {asked!r}, which the dataset lacks; its columns: "
                f"{listed}. Name the column to use in data.columns ({{{asked}: its_name}}), or leave the "
                f"reward out"
            )
    for option in spec.options:
        if option not in spec.bound and option in columns:
            raise RewardError(
                f"reward {name!r}: {option!r} is an option (keyword-only, with a default), and the dataset "
                f"has a column of that name, which would not be used. Set it in the entry ({{name: {name}, "
                f"{option}: ...}}), or remove the '*' before it in the function, so that the column "
                f"supplies it"
            )
