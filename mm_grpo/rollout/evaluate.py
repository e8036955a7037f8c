"""Evaluation: how well the model answers a set of rows.

Rows are answered with the sampling of `rollout.eval`, greedy by default, and with seeds that training never draws, the
same at every evaluation, so that before and after are compared on equal terms. Rows that are too long stop the run or
are left out, as in training. What the rows are judged by is in eval_metric.py.

A blind control answers the same rows from the same seeds without their images (`run.eval_blind`): what is left of the
score did not need them. Its gap is the mean over rows of the score with images less the score without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from mm_grpo.data.base import MAX_TASK_LENGTH, TASK
from mm_grpo.rollout.collect import begin_scoring, gather_groups, groups_of, sample, score_groups
from mm_grpo.rollout.engine import Sampling, requests_for
from mm_grpo.rollout.eval_metric import EvalMetric, Interval, mean, normal
from mm_grpo.rollout.group_metrics import by_value
from mm_grpo.rollout.seeds import eval_seeds

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig
    from mm_grpo.data.base import Rows
    from mm_grpo.distributed.ranks import Ranks
    from mm_grpo.rewards.scorer import Scorer
    from mm_grpo.rollout.prompts import PromptBuilder
    from mm_grpo.rollout.turns import Sampler
    from mm_grpo.types import Group

CHUNK, LARGEST = 64, 256
"""Rows that a process answers together: at least, and at most, for their pixels are held in memory."""


@dataclass(frozen=True)
class RowScores:
    """Results of one row's completions: `values` of the eval metric, total `rewards`, raw `parts`, `lengths` in
    tokens and how many were cut off. `columns` are those of the row's that hold a number or a short text."""

    row: int
    values: list[float]
    rewards: list[float]
    parts: Mapping[str, list[float]]
    lengths: list[int]
    clipped: int
    columns: Mapping[str, Any]

    @classmethod
    def of(cls, group: Group, metric: EvalMetric) -> RowScores:
        return cls(
            group.slot,
            metric.values(group),
            _known(group.rewards),
            {name: _known(scores) for name, scores in group.parts.items()},
            [len(c.token_ids) for c in group.completions],
            sum(c.finish_reason == "length" for c in group.completions),
            {n: v for n, v in group.prompt.sample.columns.items() if _is_short(v)},
        )


@dataclass(frozen=True)
class Blind:
    """The same rows without their images (`kind`: shuffled or removed). `gap` is what the image adds to the score,
    row by row; all are None where nothing was measured."""

    kind: str
    rows: int
    score: float | None
    interval: Interval | None
    reward: float | None
    gap: float | None
    gap_interval: Interval | None


@dataclass(frozen=True)
class Evaluation:
    """Result of one evaluation of one set over `rows` rows: the metric's score and the mean total reward.

    `accuracy` in [0, 1] is the metric's share, None where it is a mean. All are None where there was
    nothing to take a mean of: the reward applied to no row. `tasks` has accuracy and reward of the rows of each
    task, where they are known, `parts` the mean of each reward, `length` the mean in tokens, `clipped` the share
    that was cut off; intervals are of 95 % (eval_metric.py), `blind` the control where there is one.
    """

    accuracy: float | None
    reward: float | None
    rows: int
    score: float | None
    tasks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    interval: Interval | None = None
    reward_interval: Interval | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    length: float | None = None
    clipped: float | None = None
    blind: Blind | None = None


def sampling_of(config: GRPOConfig) -> Sampling:
    """The sampling of `rollout.eval`."""
    chosen = config.rollout.eval
    return Sampling(
        max_tokens=chosen.max_completion_length or config.rollout.max_completion_length,
        temperature=chosen.temperature,
        top_p=chosen.top_p,
        top_k=chosen.top_k,
        min_p=chosen.min_p,
        repetition_penalty=chosen.repetition_penalty,
    )


def answer_rows(
    dataset: Rows,
    prompt_builder: PromptBuilder,
    engine: Sampler,
    scorer: Scorer,
    config: GRPOConfig,
    step: int,
    ranks: Ranks,
    part: tuple[int, int] = (0, 1),
    *,
    keep: Callable[[list[Group]], None] | None = None,
    report: Callable[[int, int], None] | None = None,
) -> list[RowScores]:
    """Answer and score every row of `dataset`, which is number `part[0]` of `part[1]` sets.

    Every process answers its share of the rows; the first one scores them all and has the result, empty elsewhere.
    There `keep` gets the scored groups of each chunk, `report` how many of how many rows are done. Prompts of the next
    chunk are made while one is answered. Raises what data and rewards raise.
    """
    sampling, repeats = sampling_of(config), config.rollout.eval.num_generations
    metric = EvalMetric.of(config, [spec.name for spec in scorer.specs])
    found: list[RowScores] = []
    # each batch waits for its longest completion, so few large ones are sooner done: as many as a step samples
    step_rows = config.rollout.prompts_per_step * config.rollout.num_generations // (ranks.world * repeats)
    rows, size = range(len(dataset)), min(max(CHUNK, step_rows), LARGEST) * ranks.world
    for start in rows[::size]:
        if report is not None and ranks.first:
            report(start, len(dataset))
        chunk, ahead = rows[start : start + size], rows[start + size : start + 2 * size]
        with ranks.fail_together("evaluation"):
            own = {i: i for i in ranks.shard(chunk)}
            asked = prompt_builder.evaluation.prompts(dataset, own, ranks.shard(ahead))
            seeds = [eval_seeds(config.run.seed, i, repeats, *part) for i in asked.slots]
            requests = requests_for(asked.prompts, seeds, sampling)
        scoring = begin_scoring(scorer, asked, repeats, step, ranks)
        with ranks.fail_together("evaluation"):
            completions = sample(engine, requests, scoring)
        groups = gather_groups(groups_of(asked.slots, asked.prompts, completions), ranks, "evaluation")
        with ranks.fail_together("evaluation"):
            if groups:
                scored, _ = score_groups(scorer, groups, step, scoring)
                found += [RowScores.of(group, metric) for group in scored]
                if keep is not None:
                    keep(scored)
    return found


def summarise(
    rows: Sequence[RowScores],
    metric: EvalMetric,
    *,
    by_task: bool = False,
    blind: Sequence[RowScores] = (),
    blind_kind: str | None = None,
) -> Evaluation:
    """The evaluation of a set from its rows, and from those of its blind control where there is a `blind_kind`."""
    values, rewards = [row.values for row in rows], [row.rewards for row in rows]
    score, lengths = mean(values), [length for row in rows for length in row.lengths]
    names = dict.fromkeys(name for row in rows for name in row.parts)
    parts = {name: mean([row.parts.get(name, []) for row in rows]) for name in names}
    return Evaluation(
        accuracy=score if metric.is_share else None,
        reward=mean(rewards),
        rows=len(rows),
        score=score,
        tasks=_tasks(rows, metric) if by_task else {},
        interval=metric.interval(values),
        reward_interval=normal(rewards),
        parts={name: value for name, value in parts.items() if value is not None},
        length=fmean(lengths) if lengths else None,
        clipped=sum(row.clipped for row in rows) / len(lengths) if lengths else None,
        blind=_control(rows, blind, metric, blind_kind) if blind_kind else None,
    )


def rows_by(rows: Iterable[RowScores], column: str) -> dict[str, list[RowScores]]:
    """The rows of each value of a column, in the order of the values as text; those without it are left out."""
    return by_value((row.columns.get(column), row) for row in rows)


def _tasks(rows: Sequence[RowScores], metric: EvalMetric) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for task, own in rows_by((r for r in rows if isinstance(r.columns.get(TASK), str)), TASK).items():
        one = summarise(own, metric)
        values = {"accuracy": one.accuracy, "reward": one.reward}
        if metric.name is not None and not metric.is_share:
            values["score"] = one.score
        found[task] = {name: value for name, value in values.items() if value is not None}
    return found


def _control(rows: Sequence[RowScores], blind: Sequence[RowScores], metric: EvalMetric, kind: str) -> Blind:
    """The blind control, and its distance from the same rows with images."""
    sighted, values = {row.row: row.values for row in rows}, [row.values for row in blind]
    gaps = [[fmean(own) - fmean(row.values)] for row in blind if row.values and (own := sighted.get(row.row))]
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
    """The highest score of the first set, and the step after which it was found; 0 is before the first."""

    score: float
    step: int


def better(best: Best | None, found: Mapping[str, Evaluation], step: int) -> Best | None:
    """`best`, or the first of what was `found` after `step` if its score is higher. None without evaluations."""
    first = next(iter(found.values()), None)
    score = None if first is None else first.score
    if score is None or (best is not None and score <= best.score):
        return best
    return Best(score, step)


def as_metrics(results: Mapping[str, Evaluation]) -> dict[str, float]:
    """Metrics of named sets under `eval/{set}/`, absent where not measured.

    `score` is the eval metric's, with its interval's ends `score_low` and `score_high`, `accuracy` the same where it is
    a share; `reward`, `rewards/{name}/mean`, `mean_length`, `clipped_ratio`; `task/{task}/accuracy` and `/reward` of
    a task. The blind control's are under `eval/blind/`: `score`, `accuracy`, `reward`, `gap`, `gap_low`, `gap_high`.
    """
    found: dict[str, float | None] = {}
    for name, result in results.items():
        own: dict[str, float | None] = {"accuracy": result.accuracy, "reward": result.reward}
        own["score"] = result.score
        own["score_low"], own["score_high"] = result.interval or (None, None)
        own |= {f"rewards/{part}/mean": value for part, value in result.parts.items()}
        own |= {"mean_length": result.length, "clipped_ratio": result.clipped}
        for task, values in result.tasks.items():
            own |= {f"task/{task}/{what}": value for what, value in values.items()}
        found |= {f"eval/{name}/{what}": value for what, value in own.items()}
        if (blind := result.blind) is not None:
            accuracy = blind.score if result.accuracy is not None else None
            low, high = blind.gap_interval or (None, None)
            control = {"score": blind.score, "accuracy": accuracy, "reward": blind.reward}
            control |= {"gap": blind.gap, "gap_low": low, "gap_high": high}
            found |= {f"eval/blind/{what}": value for what, value in control.items()}
    return {name: value for name, value in found.items() if value is not None}


def _known(values: Iterable[float | None]) -> list[float]:
    return [v for v in values if v is not None]


def _is_short(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) or (isinstance(value, str) and len(value) <= MAX_TASK_LENGTH)
