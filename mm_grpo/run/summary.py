"""summary.json, a run's results on each evaluation set, and the last lines that a run prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from mm_grpo.data.blind import CONTROLS, FRAME_CONTROLS
from mm_grpo.rollout.eval_metric import score_text
from mm_grpo.run.evaluations import Evaluations
from mm_grpo.run.metrics import read_rows
from mm_grpo.run.paths import RunPaths

DETAILS = ("score", "interval", "reward", "reward_interval", "parts", "rows", "length", "clipped", "blind")


def summary_of(
    evaluations: Evaluations, seconds: float, steps: int, stopped: str | None = None
) -> dict[str, Any]:
    """Return the contents of summary.json; `stopped` is why a callback ended the run early, else None.

    `score_*` are values of the headline on the first set; `accuracy_*` the same if it is an accuracy, else None. `eval`
    has the sets that could be scored. `first_set` has more of the first set: DETAILS before, at the best step, after.
    """
    headline, before, after = evaluations.headline, evaluations.before, evaluations.after
    best, first = evaluations.best, next(iter(before), "")
    scores = {
        "before": before[first].score if first else None,
        "after": after[first].score if first else None,
        "best": best.score if best else None,
    }
    best_evaluation = best.evaluation if best else None
    details = {"before": before.get(first), "best": best_evaluation, "after": after.get(first)}
    return {
        "headline": str(headline),
        **{f"score_{when}": score for when, score in scores.items()},
        **{f"accuracy_{when}": score if headline.is_share else None for when, score in scores.items()},
        "best_step": best.step if best else None,
        "seconds": round(seconds, 3),
        "steps": steps,
        "stopped": stopped,
        "eval": {
            n: {"before": before[n].score, "after": after[n].score, "rows": before[n].rows}
            for n in before
            if before[n].score is not None and after[n].score is not None
        },
        "first_set": {
            when: {key: value for key, value in asdict(evaluation).items() if key in DETAILS}
            for when, evaluation in details.items()
            if evaluation is not None
        },
    }


def warnings_of(paths: RunPaths) -> dict[str, dict[str, int]]:
    """Return guard -> number of its warnings (`times`) and step of the first one (`first`)."""
    events = [event for event in read_rows(paths.events) if event["action"] == "warn"]
    steps = {event["name"]: [e["step"] for e in events if e["name"] == event["name"]] for event in events}
    return {name: {"times": len(numbers), "first": min(numbers)} for name, numbers in steps.items()}


def learned_blind(before: Any, after: Any) -> bool:
    """Return True if the score surely rose and the gap may be 0, by 95 % intervals; without one, up to 0.02 may be."""
    blind, (score, *_) = after["blind"], after["interval"] or [after["score"]]
    gap = 1 if blind["gap"] is None else (blind["gap_interval"] or [blind["gap"] - 0.02])[0]
    return bool(score > before["score"] and gap <= 0)


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return a line for each set, the first with interval, best score and blind control, and for each warned guard."""
    lines = []
    for number, (name, result) in enumerate(summary["eval"].items()):
        details = summary.get("first_set", {}) if number == 0 else {}
        after, before = details.get("after"), details.get("before")
        end = score_text(result["after"], after and after["interval"])
        text = f"{name}: {summary['headline']} {result['before']:.3f} -> {end} ({result['rows']} rows)"
        if number == 0 and summary.get("best_step") is not None:
            step = summary["best_step"]
            text += f", best {summary['score_best']:.3f} {f'after step {step}' if step else 'before the first step'}"
        lines.append(text)
        old, new = (evaluation and evaluation["blind"] for evaluation in (before, after))
        if old and new and old["score"] is not None and new["score"] is not None:
            done, adds = CONTROLS[new["kind"]]
            gap = "" if new["gap"] is None else f", {adds} {new['gap']:.3f}"
            if before and after and new["kind"] not in FRAME_CONTROLS and learned_blind(before, after):
                gap += ": it learned the questions, not the pictures"
            lines.append(
                f"{name}, {done}: {old['score']:.3f} -> {new['score']:.3f} ({new['rows']} rows){gap}"
            )
    for name, counts in summary.get("warned", {}).items():
        lines.append(f"guard {name} warned {counts['times']} times, first after step {counts['first']}")
    if model := summary.get("model"):
        lines.append(f"model/ holds the weights after step {model['step']}: {model['why']}")
    return lines
