"""The evaluations of a run: what is answered, what was found before the first step, last and best, and in words.

`run` answers every set, logs the completions (rollout_log.py) and keeps what was found; the trainer decides when. What
one evaluation computes is in rollout/evaluate.py. The blind control (`run.eval_blind`) is of the first set alone, the
headline, and doubles what an evaluation of that set costs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from mm_grpo.errors import ConfigError
from mm_grpo.rollout.evaluate import (
    Best,
    Evaluation,
    RowScores,
    answer_rows,
    as_metrics,
    better,
    summarise,
)
from mm_grpo.run.json_records import decode
from mm_grpo.run.rollout_log import EvaluationLog

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig
    from mm_grpo.data.base import Rows
    from mm_grpo.distributed.ranks import Ranks
    from mm_grpo.rewards.scorer import Scorer
    from mm_grpo.rollout.eval_metric import EvalMetric
    from mm_grpo.rollout.prompts import PromptBuilder
    from mm_grpo.rollout.turns import Sampler
    from mm_grpo.run.folder import RunFolder
    from mm_grpo.types import Group

    Parts = tuple[PromptBuilder, Sampler, Scorer, Ranks]

Keep = Callable[[str, "str | None", "list[Group]"], None]
"""Given on the first process the name of a set, how it was made blind, and scored groups of it, as they come."""
Report = Callable[[str, int, int], None]
"""Given the name of a set, how many of its rows are answered, and how many there are."""


class Evaluations:
    """The sets of a run by name, the headline first, and what their evaluations found.

    The blind control that the config asks for is of the first `controlled` sets, None for all. Raises ConfigError or
    DataError where it cannot be made.
    """

    def __init__(
        self,
        config: GRPOConfig,
        sets: Mapping[str, Rows],
        headline: EvalMetric,
        *,
        several_turns: bool,
        controlled: int | None = 1,
    ) -> None:
        self.config, self.sets, self.headline = config, sets, headline
        self.controls: dict[str, Rows] = {}
        kind = config.run.eval_blind
        if kind is not None and sets:
            chosen = dict([*sets.items()][:controlled])
            self.controls = blind_controls(chosen, kind, several_turns=several_turns)
        self.before: dict[str, Evaluation] = {}
        self.after: dict[str, Evaluation] = {}
        self.best: Best | None = None
        self.best_found: Evaluation | None = None

    @property
    def datasets(self) -> list[Rows]:
        """All rows that will be asked about, in their order: each set, and then its control."""
        pairs = ((rows, self.controls.get(name)) for name, rows in self.sets.items())
        return [dataset for pair in pairs for dataset in pair if dataset is not None]

    def answer(
        self, parts: Parts, step: int, *, keep: Keep | None = None, report: Report | None = None
    ) -> dict[str, Evaluation]:
        """Answer every set with the current weights, by name; every process calls it, and each gets the result."""
        found, ranks = dict[str, Evaluation](), parts[-1]
        for name, rows, control, kind in self.rows(parts, step, keep=keep, report=report):
            with ranks.fail_together("evaluation"):
                by_task = self.sets[name].by_task
                one = summarise(rows, self.headline, by_task=by_task, blind=control, blind_kind=kind)
            found[name] = ranks.broadcast(one, "evaluation")
        return found

    def rows(
        self, parts: Parts, step: int, *, keep: Keep | None = None, report: Report | None = None
    ) -> Iterator[tuple[str, list[RowScores], list[RowScores], str | None]]:
        """Answer one set after the other: its name, its rows, those of its control, and how these were made blind.

        Every process calls it; the first one has the rows.
        """
        prompt_builder, sampler, scorer, ranks = parts
        for number, (name, rows) in enumerate(self.sets.items()):
            kind = self.config.run.eval_blind if name in self.controls else None
            answers: list[list[RowScores]] = []
            for dataset, blind in [(rows, None), *([(self.controls[name], kind)] if kind else [])]:
                label = f"{name}, images {blind}" if blind else name
                answers.append(
                    answer_rows(
                        dataset,
                        prompt_builder,
                        sampler,
                        scorer,
                        self.config,
                        step,
                        ranks,
                        (number, len(self.sets)),
                        keep=partial(keep, name, blind) if keep is not None else None,
                        report=partial(report, label) if report is not None else None,
                    )
                )
            yield name, answers[0], answers[1] if kind else [], kind

    def run(self, step: int, parts: Parts, folder: RunFolder, report: Report) -> dict[str, float]:
        """Evaluate after `step`, log the completions and keep what was found; returns its metrics."""
        scorer, ranks = parts[2:]
        log = EvaluationLog(folder.paths, step, scorer.specs) if ranks.first and self.sets else None

        def keep(name: str, blind: str | None, groups: list[Group]) -> None:
            if log is not None:
                with folder.writing("the completions of an evaluation"):
                    log.add(name, blind, groups)

        found = self.answer(parts, step, keep=keep, report=report)
        self.before = found if step == 0 else self.before
        self.after = found
        best = better(self.best, found, step)
        if best is not None and best.step == step:
            self.best_found = next(iter(found.values()))
        self.best = best
        with ranks.fail_together("writing the completions of an evaluation"):
            if log is not None:
                with folder.writing("the completions of an evaluation"):
                    log.write(best.step if best else None)
        return as_metrics(found)

    def kept_step(self, step: int, checkpoints: Collection[int]) -> tuple[int, str]:
        """The step whose weights a run that ends after `step` saves, by `run.keep` and what `checkpoints` it has, and
        why, in words."""
        best, last = self.best, next(iter(self.after.values()), None)
        if best is None or best.step == step or (last is not None and last.score == best.score):
            return step, "the last" + ("" if best is None else ", and none was better")
        if self.config.run.keep == "last":
            return step, f"the last (run.keep); the best is that of step {best.step}"
        if best.step not in checkpoints:
            return step, f"the last: the best, of step {best.step}, has no checkpoint"
        return best.step, f"the best by {self.headline} (run.keep)"

    # kept over a resume ----------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON holds it."""
        return {
            "best": asdict(self.best) if self.best else None,
            "best_evaluation": asdict(self.best_found) if self.best_found else None,
            "headline": str(self.headline),
            "before": {name: asdict(found) for name, found in self.before.items()},
            "after": {name: asdict(found) for name, found in self.after.items()},
        }

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Take up what a checkpoint kept. ConfigError when it was judged by another headline."""
        then = kept.get("headline", str(self.headline))
        if self.sets and then != str(self.headline):
            raise ConfigError(
                f"run.headline: the run was judged by '{then}' up to its checkpoint, and now by '{self.headline}'; the "
                "best of the two would not compare. Put it back, or start a new run"
            )
        self.before, self.after = (
            {name: decode(Evaluation, found) for name, found in kept[when].items()}
            for when in ("before", "after")
        )
        self.best = Best(**kept["best"]) if kept.get("best") else None
        found = kept.get("best_evaluation")
        self.best_found = decode(Evaluation, found) if found else None

    # in words --------------------------------------------------------------------------------

    @property
    def plan(self) -> str:
        """What will be evaluated and when, for the start of a run."""
        run, rows = self.config.run, sum(len(rows) for rows in self.sets.values())
        if not self.sets:
            return "evaluation: none (data.eval = null)"
        often = {0: "", 1: ", after every step"}.get(run.eval_every or 0, f", every {run.eval_every} steps")
        return f"evaluation: {rows:,} rows before{often} and at the end (run.eval_every)"

    def sentence(self, step: int) -> str:
        """The newest evaluation on one line."""
        first, *_ = self.after.values()
        words = [f"evaluation after step {step}: {self.headline} {_score(first.score, first.interval)}"]
        if self.headline.name is not None and first.reward is not None:
            words.append(f"reward {first.reward:.3f}")
        if first.blind is not None:
            words.append(
                f"images {first.blind.kind} {_score(first.blind.score, first.blind.interval)}, "
                f"gap {_score(first.blind.gap, first.blind.gap_interval)}"
            )
        words += [f"{name} {_score(found.score, None)}" for name, found in [*self.after.items()][1:]]
        return "  ".join(words)


def blind_controls(sets: Mapping[str, Rows], kind: str, *, several_turns: bool = False) -> dict[str, Rows]:
    """The sets with images, each with them `shuffled` or `removed`.

    Raises ConfigError where no set has images, and for images removed from conversations whose tools would look for
    them; DataError where images cannot be exchanged.
    """
    where = f"run.eval_blind = '{kind}'"
    if several_turns and kind == "removed":
        raise ConfigError(
            f"{where}: tools and environments would look for the images that are removed; write shuffled"
        )
    seen = {
        name: rows
        for name, rows in sets.items()
        if any(rows.fields(index).images for index in range(len(rows)))
    }
    if not seen:
        raise ConfigError(f"{where}: no row of {', '.join(sets)} has an image; leave it out")
    return {
        name: rows.with_shuffled_images() if kind == "shuffled" else rows.with_images_removed()
        for name, rows in seen.items()
    }


def _score(score: float | None, interval: tuple[float, float] | None) -> str:
    ends = "" if interval is None else f" [{interval[0]:.3f}, {interval[1]:.3f}]"
    return "not measured" if score is None else f"{score:.3f}{ends}"
