"""The evaluations of a run: its sets and blind controls, the results before the first step, last and best, in words.

`run` answers every set, logs the completions (rollout_log.py) and keeps the results; the trainer decides when. One
evaluation is computed in rollout/evaluate.py. The blind control (`run.eval_blind`) is of the first set, the headline,
and doubles what an evaluation of that set costs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from mm_grpo.config import GRPOConfig
from mm_grpo.data.base import Rows
from mm_grpo.data.blind import CONTROLS, FRAME_CONTROLS
from mm_grpo.errors import ConfigError, UserError
from mm_grpo.rollout.eval_metric import EvalMetric, score_text
from mm_grpo.rollout.evaluate import Best, Evaluation, RowScores, answer_rows, as_metrics, better, summarise
from mm_grpo.rollout.runner import RolloutRunner
from mm_grpo.run.folder import RunFolder
from mm_grpo.run.json_records import decode
from mm_grpo.run.rollout_log import EvaluationLog
from mm_grpo.types import Group

Keep = Callable[[str, "str | None", "list[Group]"], None]
"""Called on the first process with a set's name, its control's kind or None, and a chunk of scored groups."""
Report = Callable[[str, int, int], None]
"""Called with the name of a set, how many of its rows are answered, and how many there are."""


def nothing(*arguments: object) -> None:
    """Do nothing: the default of a function to be called."""


class Evaluations:
    """The sets of a run by name, the headline first, and their results.

    `controlled` is the number of sets, from the first, that get the blind control that the config asks for; None for
    all. Raises ConfigError or DataError if a control cannot be made.
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
            first_sets = dict([*sets.items()][:controlled])
            self.controls = blind_controls(first_sets, kind, several_turns=several_turns)
        self.before: dict[str, Evaluation] = {}
        self.after: dict[str, Evaluation] = {}
        self.best: Best | None = None

    @property
    def datasets(self) -> list[Rows]:
        """Return all rows that will be asked about, in their order: each set, and then its control."""
        pairs = ((rows, self.controls.get(name)) for name, rows in self.sets.items())
        return [dataset for pair in pairs for dataset in pair if dataset is not None]

    def answer(
        self, runner: RolloutRunner, step: int, *, keep: Keep = nothing, report: Report = nothing
    ) -> dict[str, Evaluation]:
        """Answer every set with the current weights; returns the results by name on every process. Collective."""
        results = dict[str, Evaluation]()
        for name, rows, control, kind in self.rows(runner, step, keep=keep, report=report):
            with runner.ranks.fail_together("evaluation"):
                split = self.sets[name].by_task
                result = summarise(rows, self.headline, split_tasks=split, blind=control, blind_kind=kind)
            results[name] = runner.ranks.broadcast(result, "evaluation")
        return results

    def rows(
        self, runner: RolloutRunner, step: int, *, keep: Keep = nothing, report: Report = nothing
    ) -> Iterator[tuple[str, list[RowScores], list[RowScores], str | None]]:
        """Answer one set after the other; yields its name, its rows, its control's rows, and the control's kind.

        Every process calls it; the first one has the rows.
        """
        for number, (name, dataset) in enumerate(self.sets.items()):
            control = self.controls.get(name)
            kind = self.config.run.eval_blind if control is not None else None
            answers = [
                answer_rows(
                    runner, rows, self.config, step, (number, len(self.sets)),
                    keep=partial(keep, name, blind),
                    report=partial(report, f"{name}, {CONTROLS[blind][0]}" if blind else name),
                )
                for rows, blind in ((dataset, None), (control, kind))
                if rows is not None
            ]  # fmt: skip
            yield name, answers[0], answers[1] if kind else [], kind

    def run(self, step: int, runner: RolloutRunner, folder: RunFolder, report: Report) -> dict[str, float]:
        """Evaluate after `step`, log the completions and keep the results; returns the metrics. Collective."""
        ranks = runner.ranks
        log = EvaluationLog(folder.paths, step, runner.scorer.specs) if ranks.first and self.sets else None

        def keep(name: str, blind: str | None, groups: list[Group]) -> None:
            if log is not None:
                with folder.writing("the completions of an evaluation"):
                    log.add(name, blind, groups)

        self.after = self.answer(runner, step, keep=keep, report=report)
        self.before = self.after if step == 0 else self.before
        self.best = better(self.best, self.after, step)
        with ranks.fail_together("writing the completions of an evaluation"):
            if log is not None:
                with folder.writing("the completions of an evaluation"):
                    log.write(self.best.step if self.best else None)
        return as_metrics(self.after)

    def kept_step(self, step: int, checkpoints: Collection[int]) -> tuple[int, str]:
        """Return the step whose weights a run that ends after `step` saves, and the reason in words.

        It follows from `run.keep` and the steps that have `checkpoints`.
        """
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
        """Return what a checkpoint keeps, as JSON holds it."""
        best = self.best
        return {
            "best": {"score": best.score, "step": best.step} if best else None,
            "best_evaluation": asdict(best.evaluation) if best and best.evaluation else None,
            "headline": str(self.headline),
            "before": {name: asdict(result) for name, result in self.before.items()},
            "after": {name: asdict(result) for name, result in self.after.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state that a checkpoint kept. ConfigError when it was judged by another headline."""
        then = state.get("headline", str(self.headline))
        if self.sets and then != str(self.headline):
            raise ConfigError(
                f"run.headline: the run was judged by '{then}' up to its checkpoint, and now by '{self.headline}'; the "
                "best of the two would not compare. Put it back, or start a new run"
            )
        pair = (state["before"], state["after"])
        self.before, self.after = ({n: decode(Evaluation, r) for n, r in results.items()} for results in pair)
        self.best = Best(**state["best"]) if state.get("best") else None
        if self.best is not None and (evaluation := state.get("best_evaluation")):
            self.best = replace(self.best, evaluation=decode(Evaluation, evaluation))

    # in words --------------------------------------------------------------------------------

    @property
    def plan(self) -> str:
        """Return what is evaluated and when, in one line."""
        run, rows = self.config.run, sum(len(rows) for rows in self.sets.values())
        if not self.sets:
            return "evaluation: none (data.eval = null)"
        often = {0: "", 1: ", after every step"}.get(run.eval_every or 0, f", every {run.eval_every} steps")
        return f"evaluation: {rows:,} rows before{often} and at the end (run.eval_every)"

    def sentence(self, step: int) -> str:
        """Return the newest evaluation on one line."""
        first, *_ = self.after.values()
        words = [f"evaluation after step {step}: {self.headline} {score_text(first.score, first.interval)}"]
        if self.headline.name is not None and first.reward is not None:
            words.append(f"reward {first.reward:.3f}")
        if first.blind is not None:
            words.append(
                f"{CONTROLS[first.blind.kind][0]} {score_text(first.blind.score, first.blind.interval)}, "
                f"gap {score_text(first.blind.gap, first.blind.gap_interval)}"
            )
        words += [f"{name} {score_text(result.score)}" for name, result in [*self.after.items()][1:]]
        return "  ".join(words)


def blind_controls(sets: Mapping[str, Rows], kind: str, *, several_turns: bool = False) -> dict[str, Rows]:
    """Return the sets that have images or videos, without them as `kind` says, a key of `blind.CONTROLS`.

    Raises ConfigError if no set has some, or if tools would look for images that are removed; DataError if images
    cannot be exchanged.
    """
    where = f"run.eval_blind = '{kind}'"
    if several_turns and kind == "removed":
        raise ConfigError(
            f"{where}: tools and environments would look for the images that are removed; write shuffled"
        )
    field, medium = ("videos", "a video") if kind in FRAME_CONTROLS else ("media", "an image or a video")
    controls = {
        name: rows.control(kind)
        for name, rows in sets.items()
        if any(getattr(rows.fields(index), field) for index in range(len(rows)))
    }
    if not controls:
        raise ConfigError(f"{where}: no row of {', '.join(sets)} has {medium}; leave it out")
    return controls


def default_control(sets: Mapping[str, Rows]) -> str | None:
    """Return `shuffled` if the images of the first set can be exchanged, else None."""
    try:
        blind_controls(dict([*sets.items()][:1]), "shuffled")
    except UserError:
        return None
    return "shuffled"
