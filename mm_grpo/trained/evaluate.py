"""The evaluation of a config's sets by one model: scores with intervals, pass@k, by a column, the blind control."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mm_grpo.build import open_runner, processor_of
from mm_grpo.config import GRPOConfig
from mm_grpo.data.image_files import readable
from mm_grpo.data.sources import load_eval
from mm_grpo.distributed.ranks import start
from mm_grpo.environments.toolbox import reward_entries, toolbox_of
from mm_grpo.errors import ConfigError, did_you_mean
from mm_grpo.rewards.scorer import Scorer
from mm_grpo.rollout.eval_metric import EvalMetric, pass_at
from mm_grpo.rollout.evaluate import Evaluation, RowScores, rows_by, sampling_of, summarise
from mm_grpo.run.evaluations import Evaluations, Report, nothing
from mm_grpo.trained.model import put_in
from mm_grpo.trained.source import RunCheckpoint, WholeModel


@dataclass(frozen=True)
class SetResult:
    """Evaluation of one set, or of its rows that share a value."""

    evaluation: Evaluation
    pass_at: Mapping[int, float] = field(default_factory=dict)
    """pass@k by k, if the headline has a mark."""


@dataclass(frozen=True)
class Results:
    """Results of all sets by name, and by the values of the column `by` in each."""

    model: str
    headline: str
    sampling: Mapping[str, Any]
    """Sampling options, number of completions and seed."""
    sets: Mapping[str, SetResult]
    by: str | None = None
    groups: Mapping[str, Mapping[str, SetResult]] = field(default_factory=dict)
    seconds: float = 0.0
    first: bool = True
    """True on the process that has the results."""


def evaluate_config(
    config: GRPOConfig,
    model: RunCheckpoint | WholeModel,
    *,
    by: str | None = None,
    phase: Callable[[str], None] = nothing,
    report: Report = nothing,
) -> Results:
    """Answer the evaluation sets of `config` with a model (`model_to_evaluate`), and the blind controls of
    `run.eval_blind`.

    `report` gets the name of a set, the rows that are answered and all rows; `phase` what begins. Every process of a
    launcher calls it. Raises UserError for faults of config, rows, rewards and model.
    """
    ranks = start(config.model.device, config.run.process_timeout)
    print_phase: Callable[[str], None] = phase if ranks.first else nothing
    print_phase("reading the rows")
    toolbox = toolbox_of(config, None, None)
    scorer = Scorer(reward_entries(config, None, toolbox), several_turns=toolbox is not None)
    headline = EvalMetric.of(config, [spec.name for spec in scorer.specs])
    sets = load_eval(config, None, needs=scorer.check, turns=toolbox is not None)
    if not sets:
        raise ConfigError("data.eval = null: there are no rows to evaluate on; name some")
    section = config.model if model.config is None else model.config.model
    sampled_config = config.model_copy(update={"model": section})
    processor, drop = processor_of(sampled_config), config.data.on_bad_media
    sets = {name: readable(rows, drop, ranks, processor) for name, rows in sets.items()}
    for name, rows in sets.items():
        if by is not None and by not in (columns := rows.columns):
            hint = f"{did_you_mean(by, columns)}They have {', '.join(columns) or 'none'}"
            raise ConfigError(f"--by {by}: the rows of {name} have no such column. {hint}")
    evaluations = Evaluations(config, sets, headline, several_turns=toolbox is not None, controlled=None)
    if toolbox is not None:
        every_column = [column for rows in sets.values() for column in rows.columns]
        toolbox.place(scorer.asking_for(("environment", "environments"), every_column), processes=ranks.world)
    put = partial(put_in, checkpoint=model) if isinstance(model, RunCheckpoint) else None
    repeats = config.rollout.eval.num_generations
    results, groups = dict[str, SetResult](), dict[str, dict[str, SetResult]]()
    parts, datasets = (scorer, toolbox, processor, ranks), evaluations.datasets
    options: Any = {"conversational": datasets[0].conversational, "put_in": put, "phase": print_phase}
    with open_runner(sampled_config, datasets, *parts, **options) as runner:
        clock = time.perf_counter()
        for name, scored, control, kind in evaluations.rows(runner, 0, report=report):
            results[name] = _result(scored, control, kind, headline, repeats)
            if by is not None:
                blind = rows_by(control, by)
                groups[name] = {
                    value: _result(value_rows, blind.get(value, []), kind, headline, repeats)
                    for value, value_rows in rows_by(scored, by).items()
                }
    sampling = {**vars(sampling_of(config)), "num_generations": repeats, "seed": config.run.seed}
    seconds = time.perf_counter() - clock
    return Results(model.name, str(headline), sampling, results, by, groups, seconds, ranks.first)


def _result(
    rows: Sequence[RowScores],
    control: Sequence[RowScores],
    kind: str | None,
    headline: EvalMetric,
    repeats: int,
) -> SetResult:
    evaluation = summarise(rows, headline, blind=control, blind_kind=kind)
    passed: dict[int, float] = {}
    if headline.is_share and repeats > 1:
        values = [row.values for row in rows]
        ks = (*(2**n for n in range(repeats.bit_length()) if 2**n < repeats), repeats)
        passed = {k: value for k in ks if (value := pass_at(values, k)) is not None}
    return SetResult(evaluation, passed)
