"""The evaluation of a config's sets by one model: scores with intervals, pass@k, by a column, the blind control."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mm_grpo.build import build_sampler
from mm_grpo.data.sources import load_eval
from mm_grpo.distributed.ranks import start
from mm_grpo.environments.toolbox import reward_entries, toolbox_of
from mm_grpo.errors import ConfigError, did_you_mean
from mm_grpo.rewards.scorer import Scorer
from mm_grpo.rollout.evaluate import Evaluation, RowScores, answer_rows, rows_by, sampling_of, summarise
from mm_grpo.rollout.headline import Headline, pass_at
from mm_grpo.rollout.seeds import SeedPlan
from mm_grpo.rollout.turns import sampler_of
from mm_grpo.run.evaluations import blind_controls, in_order
from mm_grpo.trained.model import put_in

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig
    from mm_grpo.evaluation.weights import Weights

MOST_VALUES = 100
"""Values of the column of `--by` from which a table is none any more."""


@dataclass(frozen=True)
class SetResult:
    """One set, or the rows of it that share a value: its evaluation, and pass@k by k where there is a mark to pass."""

    evaluation: Evaluation
    pass_at: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Results:
    """All sets by name, and by the values of the column `by` in each; `sampling` is how they were answered."""

    model: str
    headline: str
    sampling: Mapping[str, Any]
    sets: Mapping[str, SetResult]
    by: str | None = None
    groups: Mapping[str, Mapping[str, SetResult]] = field(default_factory=dict)
    seconds: float = 0.0
    first: bool = True


def evaluate_config(
    config: GRPOConfig,
    weights: Weights,
    *,
    by: str | None = None,
    phase: Callable[[str], None] = lambda text: None,
    report: Callable[[str, int, int], None] | None = None,
) -> Results:
    """Answer the evaluation sets of `config` with `weights`, and the blind controls that `run.eval_blind` asks for.

    `report` gets the name of a set, the rows that are answered and all rows; `phase` what begins. Every process of a
    launcher calls it; `Results.first` says which one has the results. Raises UserError for what the user can mend.
    """
    ranks = start(config.model.device, config.run.process_timeout)
    tell: Callable[[str], None] = phase if ranks.first else lambda text: None
    tell("reading the rows")
    toolbox = toolbox_of(config, None, None)
    scorer = Scorer(reward_entries(config, None, toolbox), several_turns=toolbox is not None)
    headline = Headline.of(config, [spec.name for spec in scorer.specs])
    sets = load_eval(config, None, needs=scorer.check)
    if not sets:
        raise ConfigError("data.eval = null: there are no rows to evaluate on; name some")
    if by is not None:
        _check_column(by, {name: rows.columns for name, rows in sets.items()})
    kind, controls = config.run.eval_blind, {}
    if kind is not None:
        controls = blind_controls(sets, kind, several_turns=toolbox is not None)
    if toolbox is not None:
        columns = [c for rows in sets.values() for c in rows.columns]
        toolbox.place(scorer.asking_for(("environment", "environments"), columns), processes=ranks.world)
    scorer.conversational = next(iter(sets.values())).conversational
    changed = config.model_copy(update={"model": weights.model})
    checkpoint = weights.checkpoint
    parts = build_sampler(
        changed,
        [*sets.values(), *controls.values()],
        toolbox=toolbox,
        put_in=None if checkpoint is None else lambda model: put_in(model, checkpoint),
        phase=tell,
    )
    repeats = config.rollout.eval.num_generations
    turns = config.rollout.max_turns if toolbox is not None else 1
    seeds = SeedPlan(config.run.seed, 1, max(repeats, 2), 1, 1, turns)
    sampler = sampler_of(changed, parts.processor, parts.engine, toolbox, seeds, lambda: 0)
    clock, found, groups = time.perf_counter(), dict[str, SetResult](), dict[str, dict[str, SetResult]]()
    try:
        if ranks.first:
            scorer.start()
        following = dict(pairwise(in_order(sets, controls)))
        for number, name in enumerate(sets):
            answers: list[list[RowScores]] = []
            for dataset, label in (
                (sets[name], name),
                *([(controls[name], f"{name}, images {kind}")] if name in controls else []),
            ):

                def told(done: int, total: int, label: str = label) -> None:
                    if report is not None:
                        report(label, done, total)

                answers.append(
                    answer_rows(
                        dataset,
                        parts.prompt_builder,
                        sampler,
                        scorer,
                        changed,
                        0,
                        ranks,
                        (number, len(sets)),
                        following=following.get(dataset),
                        report=told,
                    )
                )
            rows, control = answers[0], answers[1] if len(answers) > 1 else []
            made = kind if name in controls else None
            found[name] = _result(rows, control, made, headline, repeats)
            if by is not None:
                blind = rows_by(control, by)
                split = rows_by(rows, by)
                if len(split) > MOST_VALUES:
                    raise ConfigError(
                        f"--by {by}: the rows of {name} have {len(split)} values of it; a column of at most "
                        f"{MOST_VALUES} makes a table"
                    )
                groups[name] = {
                    value: _result(own, blind.get(value, []), made, headline, repeats)
                    for value, own in split.items()
                }
    finally:
        parts.prompt_builder.close()
        scorer.close()
        if toolbox is not None:
            toolbox.close()
        parts.engine.close()
    sampling = {**vars(sampling_of(config)), "num_generations": repeats, "seed": config.run.seed}
    seconds = time.perf_counter() - clock
    return Results(weights.name, str(headline), sampling, found, by, groups, seconds, ranks.first)


def _result(
    rows: Sequence[RowScores],
    control: Sequence[RowScores],
    kind: str | None,
    headline: Headline,
    repeats: int,
) -> SetResult:
    evaluation = summarise(rows, headline, blind=control, blind_kind=kind)
    passed: dict[int, float] = {}
    if headline.is_share and repeats > 1:
        powers = [2**n for n in range(repeats.bit_length()) if 2**n < repeats]
        for k in (*powers, repeats):
            value = pass_at([row.values for row in rows], k)
            if value is not None:
                passed[k] = value
    return SetResult(evaluation, passed)


def _check_column(by: str, columns: Mapping[str, Sequence[str]]) -> None:
    for name, known in columns.items():
        if by not in known:
            raise ConfigError(
                f"--by {by}: the rows of {name} have no such column. {did_you_mean(by, known)}"
                f"They have {', '.join(known) or 'none'}"
            )
