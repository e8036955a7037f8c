"""Evaluation: how well the model answers a set of rows.

Rows are answered with the sampling of `rollout.eval`, greedy by default. Seeds are ones that training never draws, the
same at every evaluation, so that before and after are compared on equal terms. Rows that are too long stop the run or
are left out, as in training. The value of one completion comes from eval_metric.py.

A blind control answers the same rows from the same seeds without their images and videos, or with other frames
(`run.eval_blind`): what is left of the score did not need them. Its gap is the mean over rows of the score with them
less the score without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from mm_grpo.algorithm.advantages import present
from mm_grpo.data.base import MAX_TASK_LENGTH
from mm_grpo.rollout.engine import Sampling
from mm_grpo.rollout.eval_metric import EvalMetric, Interval, mean, normal
from mm_grpo.rollout.group_metrics import by_task, by_value
from mm_grpo.rollout.seeds import eval_seeds

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig
    from mm_grpo.data.base import Rows
    from mm_grpo.rollout.runner import RolloutRunner
    from mm_grpo.types import Group

CHUNK, LARGEST = 64, 256
"""Fewest and most rows that a process answers together; the pixels of a chunk are held in memory."""


@dataclass(frozen=True)
class RowScores:
    """Results of one row's completions."""

    row: int
    values: list[float]
    """Values of the eval metric."""
    rewards: list[float]
    """Total rewards."""
    parts: Mapping[str, list[float]]
    """Raw scores, by reward."""
    lengths: list[int]
    """Tokens of each completion."""
    clipped: int
    """Completions that were cut off."""
    columns: Mapping[str, Any]
    """The row's columns that hold a number or a short text."""

    @classmethod
    def of(cls, group: Group, metric: EvalMetric) -> RowScores:
        columns = group.prompt.sample.columns
        return cls(
            group.slot,
            metric.values(group),
            present(group.rewards),
            {name: present(scores) for name, scores in group.parts.items()},
            [len(c.token_ids) for c in group.completions],
            sum(c.finish_reason == "length" for c in group.completions),
            {name: value for name, value in columns.items() if _is_short(value)},
        )


@dataclass(frozen=True)
class Blind:
    """Result for the same rows of a blind control; fields are None if nothing was measured."""

    kind: str
    """A key of `blind.CONTROLS`."""
    rows: int
    score: float | None
    interval: Interval | None
    reward: float | None
    gap: float | None
    """What they add to the score, row by row."""
    gap_interval: Interval | None


@dataclass(frozen=True)
class Evaluation:
    """Result of one evaluation of one set over `rows` rows; intervals are of 95 % (eval_metric.py).

    Means are None if no reward applied to any row.
    """

    accuracy: float | None
    """`score`, in [0, 1], if the metric is a share; else None."""
    reward: float | None
    """Mean total reward."""
    rows: int
    score: float | None
    """Mean of the eval metric."""
    tasks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Accuracy and reward by task, if they are known."""
    interval: Interval | None = None
    reward_interval: Interval | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    """Mean raw score, by reward."""
    length: float | None = None
    """Mean length in tokens."""
    clipped: float | None = None
    """Share of completions that were cut off."""
    blind: Blind | None = None


def sampling_of(config: GRPOConfig) -> Sampling:
    """Return the sampling of `rollout.eval`."""
    longest = config.rollout.eval.max_completion_length or config.rollout.max_completion_length
    options = config.rollout.eval.model_dump(exclude={"max_completion_length", "num_generations"})
    return Sampling(longest, **options)


def answer_rows(
    runner: RolloutRunner,
    dataset: Rows,
    config: GRPOConfig,
    step: int,
    part: tuple[int, int] = (0, 1),
    *,
    keep: Callable[[list[Group]], None] | None = None,
    report: Callable[[int, int], None] | None = None,
) -> list[RowScores]:
    """Answer and score every row of `dataset`, which is number `part[0]` of `part[1]` sets. Collective.

    Every process answers its share of the rows; the first one scores them all and returns the results, the others [].
    On the first process `keep` gets the scored groups of each chunk, and `report` the number of finished rows and of
    all. Prompts of the next chunk are made while one is answered. Raises what data and rewards raise.
    """
    sampling, repeats, ranks = sampling_of(config), config.rollout.eval.num_generations, runner.ranks
    metric = EvalMetric.of(config, [spec.name for spec in runner.scorer.specs])
    results: list[RowScores] = []
    # a chunk waits for its longest completion, so few large chunks finish sooner: as many as a step samples
    step_rows = config.rollout.prompts_per_step * config.rollout.num_generations // (ranks.world * repeats)
    rows, size = range(len(dataset)), min(max(CHUNK, step_rows), LARGEST) * ranks.world
    for start in rows[::size]:
        if report is not None and ranks.first:
            report(start, len(dataset))
        chunk, next_chunk = rows[start : start + size], rows[start + size : start + 2 * size]
        with ranks.fail_together("evaluation"):
            local_rows = {row: row for row in ranks.shard(chunk)}
            builder = runner.prompt_builder.evaluation
            prompts = builder.prompts(dataset, local_rows, ranks.shard(next_chunk))
            seeds = [eval_seeds(config.run.seed, row, repeats, *part) for row in prompts.slots]
        groups, streamed_calls = runner.sample(prompts, seeds, sampling, step, "evaluation")
        gathered = runner.gather(groups, "evaluation")
        with ranks.fail_together("evaluation"):
            if gathered:
                scored, _ = runner.score(gathered, step, streamed_calls)
                results += [RowScores.of(group, metric) for group in scored]
                if keep is not None:
                    keep(scored)
    return results


def summarise(
    rows: Sequence[RowScores],
    metric: EvalMetric,
    *,
    split_tasks: bool = False,
    blind: Sequence[RowScores] = (),
    blind_kind: str | None = None,
) -> Evaluation:
    """Return the evaluation of a set from its rows, and from its `blind` rows if there is a `blind_kind`."""
    values, rewards = [row.values for row in rows], [row.rewards for row in rows]
    score, lengths = mean(values), [length for row in rows for length in row.lengths]
    names = dict.fromkeys(name for row in rows for name in row.parts)
    parts = {name: mean([row.parts.get(name, []) for row in rows]) for name in names}
    return Evaluation(
        accuracy=score if metric.is_share else None,
        reward=mean(rewards),
        rows=len(rows),
        score=score,
        tasks=_tasks(rows, metric) if split_tasks else {},
        interval=metric.interval(values),
        reward_interval=normal(rewards),
        parts=_measured(parts),
        length=fmean(lengths) if lengths else None,
        clipped=sum(row.clipped for row in rows) / len(lengths) if lengths else None,
        blind=_control(rows, blind, metric, blind_kind) if blind_kind else None,
    )


def rows_by(rows: Iterable[RowScores], column: str) -> dict[str, list[RowScores]]:
    """Return the rows of each value of a column; rows without it are left out."""
    return by_value((row.columns.get(column), row) for row in rows)


def _tasks(rows: Sequence[RowScores], metric: EvalMetric) -> dict[str, dict[str, float]]:
    tasks: dict[str, dict[str, float]] = {}
    for task, task_rows in by_task((row.columns, row) for row in rows).items():
        result = summarise(task_rows, metric)
        values = {"accuracy": result.accuracy, "reward": result.reward}
        if metric.name is not None and not metric.is_share:
            values["score"] = result.score
        tasks[task] = _measured(values)
    return tasks


def _control(rows: Sequence[RowScores], blind: Sequence[RowScores], metric: EvalMetric, kind: str) -> Blind:
    """Return the blind control, and its distance from the same rows as they are."""
    sighted, values = {row.row: row.values for row in rows}, [row.values for row in blind]
    gaps = [[fmean(s) - fmean(row.values)] for row in blind if row.values and (s := sighted.get(row.row))]
    return Blind(
        kind=kind,
        rows=len(blind),
        score=mean(values),
        interval=metric.interval(values),
        reward=mean([row.rewards for row in blind]),
        gap=mean(gaps),
        gap_interval=normal(gaps),
    )


@dataclass(frozen=True)
class Best:
    """Highest score of the first set, and the step after which it was measured; 0 is before the first."""

    score: float
    step: int
    evaluation: Evaluation | None = field(default=None, compare=False)


def better(best: Best | None, results: Mapping[str, Evaluation], step: int) -> Best | None:
    """Return the first set's score after `step` if it is higher than `best`, else `best`."""
    first = next(iter(results.values()), None)
    score = None if first is None else first.score
    if score is None or (best is not None and score <= best.score):
        return best
    return Best(score, step, first)


def as_metrics(results: Mapping[str, Evaluation]) -> dict[str, float]:
    """Return the metrics of named sets under `eval/{set}/`, absent if not measured.

    `score` is the eval metric's, with its interval's ends `score_low` and `score_high`, `accuracy` the same if it is a
    share; `reward`, `rewards/{name}/mean`, `mean_length`, `clipped_ratio`; `task/{task}/accuracy` and `/reward` of a
    task. The blind control's are under `eval/blind/`: `score`, `accuracy`, `reward`, `gap`, `gap_low`, `gap_high`.
    """
    metrics: dict[str, float | None] = {}
    for name, result in results.items():
        low, high = result.interval or (None, None)
        values = {"accuracy": result.accuracy, "reward": result.reward, "score": result.score}
        values |= {"score_low": low, "score_high": high}
        values |= {f"rewards/{part}/mean": score for part, score in result.parts.items()}
        values |= {"mean_length": result.length, "clipped_ratio": result.clipped}
        for task, scores in result.tasks.items():
            values |= {f"task/{task}/{kind}": score for kind, score in scores.items()}
        metrics |= {f"eval/{name}/{metric}": value for metric, value in values.items()}
        if (blind := result.blind) is not None:
            accuracy = blind.score if result.accuracy is not None else None
            low, high = blind.gap_interval or (None, None)
            values = {"score": blind.score, "accuracy": accuracy, "reward": blind.reward}
            values |= {"gap": blind.gap, "gap_low": low, "gap_high": high}
            metrics |= {f"eval/blind/{metric}": value for metric, value in values.items()}
    return _measured(metrics)


def _measured(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


def _is_short(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) or (isinstance(value, str) and len(value) <= MAX_TASK_LENGTH)
