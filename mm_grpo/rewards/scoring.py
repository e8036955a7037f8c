"""From completions to scores: every reward called, its answers checked, weighted, summed and measured.

Nothing here invents a score (law 9). `None` means that a reward does not apply; an exception, a NaN, an
infinity, a non-number or a wrong count stops the run with a RewardError, or with `on_error="mask"`
leaves that one completion without a total, counted in the metrics. Totals and raw parts stay apart.
How one function is called is in `calls.py`. Axis letters: n = P·G rows, flat.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mm_grpo.errors import RewardError
from mm_grpo.rewards.calls import Batch, Call, TrainerState
from mm_grpo.rewards.loop import BackgroundLoop
from mm_grpo.rewards.registry import RewardSpec
from mm_grpo.rewards.resolve import Entry, resolve_entries

if TYPE_CHECKING:
    from mm_grpo.types import Completion, Prompt

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scores:
    """The scores of n completions.

    `totals[i]` is the weighted sum of the rewards that apply to completion i, None when none does or
    when it is masked. `parts[name][i]` is what the reward answered, unweighted. `metrics` holds, per
    reward: `rewards/{name}/mean` and `/std` (sample standard deviation, 0 for fewer than two values)
    over the completions it applies to, both absent when it applies to none; `rewards/{name}/none`, the
    number it does not apply to; `rewards/{name}/masked`, under `on_error="mask"`; `time/reward/{name}`
    in seconds (async rewards overlap); and the mean of each value given to `log_metric`. `extra` holds
    the columns given to `log_extra`, n values each, None where none was given.
    """

    totals: list[float | None]
    parts: dict[str, list[float | None]]
    metrics: dict[str, float]
    extra: dict[str, list[Any]]


@dataclass
class _Tally:
    """One reward's answers while they come in."""

    scores: list[float | None]
    masked: dict[int, RewardError] = field(default_factory=dict)
    seconds: float = 0.0


class Scorer:
    """Scores completions with a list of rewards.

    `entries` is the config's `rewards` list (see `resolve.py`). `on_error` is "stop", or "mask": a
    completion on which a per-completion reward fails, or gets a score that is none, has no total and
    is counted. An exception or a wrong count out of a batch function always stops, for it cannot be laid
    at one completion's door. `conversational` says that prompts are messages, so that batch functions
    get completions as `[{"role": "assistant", "content": text}]` and not as strings. `max_steps` is
    what rewards read in `trainer_state`; `base` the folder of relative paths.
    """

    def __init__(
        self,
        entries: Iterable[Entry],
        *,
        on_error: Literal["stop", "mask"] = "stop",
        conversational: bool = True,
        max_steps: int = 0,
        base: Path | None = None,
    ) -> None:
        if on_error not in ("stop", "mask"):
            raise RewardError(f"rewards: on_error is {on_error!r}; legal are 'stop' and 'mask'")
        self.specs = resolve_entries(entries, base=base)
        self.on_error = on_error
        self.conversational = conversational
        self.max_steps = max_steps
        self._checked: list[tuple[str, ...]] = []
        self._loop = BackgroundLoop()

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

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion], step: int) -> Scores:
        """Score completions, where `completions[i]` answers `prompts[i]` (n = P·G of each, flat)."""
        if len(prompts) != len(completions):
            raise ValueError(
                f"{len(prompts)} prompts for {len(completions)} completions; there must be as many"
            )
        columns = self._columns(prompts)
        batch = Batch(prompts, completions, columns, self.conversational, TrainerState(step, self.max_steps))
        tallies = {spec.name: _Tally([None] * len(completions)) for spec in self.specs}
        if waiting := [spec for spec in self.specs if spec.is_async]:
            self._loop.run(self._score_async(waiting, batch, tallies))
        for spec in self.specs:
            if not spec.is_async:
                self._score_sync(spec, batch, tallies[spec.name])
        return self._scores(batch, tallies)

    def close(self) -> None:
        """Stop the thread of the async rewards, if one runs."""
        self._loop.close()

    def _columns(self, prompts: Sequence[Prompt]) -> tuple[str, ...]:
        """The columns of the dataset that the prompts come from: the smallest checked set that has them all.

        Rows of a mixed dataset need not hold every column, yet functions see the same ones at each step.
        """
        present = tuple(dict.fromkeys(name for prompt in prompts for name in prompt.sample.columns))
        if not self._checked and prompts:
            self.check(present)
        return min((c for c in self._checked if set(present) <= set(c)), key=len, default=present)

    def _score_sync(self, spec: RewardSpec, batch: Batch, tally: _Tally) -> None:
        start = time.perf_counter()
        for call in batch.calls(spec):
            try:
                answer = call()
            # A reward that calls sys.exit() has failed too; it must not end the run as a success.
            except (Exception, SystemExit) as error:
                self._failed(call, error, tally)
            else:
                self._answered(call, answer, tally)
        tally.seconds = time.perf_counter() - start

    async def _score_async(
        self, specs: Sequence[RewardSpec], batch: Batch, tallies: dict[str, _Tally]
    ) -> None:
        """All calls of all async rewards at once; the first failure cancels the rest."""
        import asyncio

        start = time.perf_counter()

        async def one(call: Call, tally: _Tally) -> None:
            try:
                answer = call()
                if hasattr(answer, "__await__"):
                    answer = await answer
            except (Exception, SystemExit) as error:
                self._failed(call, error, tally)
            else:
                self._answered(call, answer, tally)
            tally.seconds = max(tally.seconds, time.perf_counter() - start)

        tasks = [
            asyncio.create_task(one(call, tallies[spec.name])) for spec in specs for call in batch.calls(spec)
        ]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    def _failed(self, call: Call, error: BaseException, tally: _Tally) -> None:
        fault = call.raised(error)
        if self.on_error == "stop" or call.spec.kind == "batch":
            raise fault from error
        tally.masked[call.rows[0]] = fault

    def _answered(self, call: Call, answer: Any, tally: _Tally) -> None:
        def bad(row: int, fault: RewardError) -> None:
            if self.on_error == "stop":
                raise fault
            tally.masked[row] = fault

        for row, score in zip(call.rows, call.scores(answer, bad), strict=True):
            tally.scores[row] = score

    def _scores(self, batch: Batch, tallies: dict[str, _Tally]) -> Scores:
        masked = {row for tally in tallies.values() for row in tally.masked}
        totals = [
            None
            if row in masked
            else _total([(spec.weight, tallies[spec.name].scores[row]) for spec in self.specs])
            for row in range(len(batch.completions))
        ]
        metrics: dict[str, float] = {}
        for name, tally in tallies.items():
            metrics.update(_metrics(name, tally.scores, len(tally.masked), tally.seconds))
            if self.on_error == "mask":
                metrics[f"rewards/{name}/masked"] = float(len(tally.masked))
            if tally.masked:
                first = next(iter(tally.masked.values()))
                log.warning(
                    "%d completions masked at step %d: %s", len(tally.masked), batch.state.global_step, first
                )
        metrics.update({name: math.fsum(values) / len(values) for name, values in batch.logged.items()})
        return Scores(
            totals=totals,
            parts={name: tally.scores for name, tally in tallies.items()},
            metrics=metrics,
            extra={column: values for column, (_, values) in batch.extra.items()},
        )


def _total(parts: Sequence[tuple[float, float | None]]) -> float | None:
    """The weighted sum of the parts that apply. A part of weight 0 is only watched: were it to make a
    total by itself, that total would be an invented 0."""
    applied = [weight * score for weight, score in parts if score is not None and weight != 0]
    return math.fsum(applied) if applied else None


def _metrics(name: str, scores: Sequence[float | None], masked: int, seconds: float) -> dict[str, float]:
    applied = [score for score in scores if score is not None]
    metrics = {
        f"rewards/{name}/none": float(len(scores) - len(applied) - masked),
        f"time/reward/{name}": seconds,
    }
    if applied:
        mean = math.fsum(applied) / len(applied)
        spread = math.fsum((score - mean) ** 2 for score in applied)
        metrics[f"rewards/{name}/mean"] = mean
        metrics[f"rewards/{name}/std"] = math.sqrt(spread / (len(applied) - 1)) if len(applied) > 1 else 0.0
    return metrics


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
