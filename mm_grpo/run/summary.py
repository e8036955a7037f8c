"""What `summary.json` holds: how a run did, before, best and after, on each evaluation set; and its last lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mm_grpo.run.metrics import read_events
from mm_grpo.run.paths import RunPaths

if TYPE_CHECKING:
    from mm_grpo.run.evaluations import Evaluations

DETAILS = ("score", "interval", "reward", "reward_interval", "parts", "rows", "length", "clipped", "blind")


def summary_of(found: Evaluations, seconds: float, steps: int, stopped: str | None = None) -> dict[str, Any]:
    """What `summary.json` holds: scores of the first set and of each set before and after, seconds, steps.

    A score is what the headline says; `accuracy_*` are the same where it is an accuracy, else None. A set whose score
    could not be measured is left out of `eval`. `first_set` has of the first set, before, best and after, the score
    with its 95 % interval, the mean reward, its parts, the mean length and the blind control. `stopped` is why a
    callback ended the run before `run.max_steps`, else None.
    """
    headline, before, after, best = found.headline, found.before, found.after, found.best
    first = next(iter(before), None)
    ends = [sets[first].score if first else None for sets in (before, after)]
    scores = dict(zip(("before", "after", "best"), [*ends, best.score if best else None], strict=True))
    details = (
        {"before": before.get(first), "best": best.evaluation if best else None, "after": after.get(first)}
        if first
        else {}
    )
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
            when: {key: value for key, value in asdict(one).items() if key in DETAILS}
            for when, one in details.items()
            if one is not None
        },
    }


def warnings_of(paths: RunPaths) -> dict[str, dict[str, int]]:
    """How often each guard warned, and after which step first, by its name."""
    steps: dict[str, list[int]] = {}
    for event in read_events(paths.events):
        if event["action"] == "warn":
            steps.setdefault(event["name"], []).append(event["step"])
    return {name: {"times": len(found), "first": min(found)} for name, found in steps.items()}


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """How each set did, in words, the first with its interval, its best and its blind control."""
    lines = []
    for number, (name, result) in enumerate(summary["eval"].items()):
        text = f"{name}: {summary['headline']} {result['before']:.3f} -> {result['after']:.3f}"
        detail = summary.get("first_set", {}) if number == 0 else {}
        last, first = detail.get("after"), detail.get("before")
        if last and last["interval"]:
            text += f" [{last['interval'][0]:.3f}, {last['interval'][1]:.3f}]"
        text += f" ({result['rows']} rows)"
        if number == 0 and summary.get("best_step") is not None:
            step = summary["best_step"]
            text += f", best {summary['score_best']:.3f} {f'after step {step}' if step else 'before the first step'}"
        lines.append(text)
        then, now = (one and one["blind"] for one in (first, last))
        if then and now and then["score"] is not None and now["score"] is not None:
            gap = "" if now["gap"] is None else f", the images add {now['gap']:.3f}"
            lines.append(
                f"{name}, images {now['kind']}: {then['score']:.3f} -> {now['score']:.3f} ({now['rows']} rows){gap}"
            )
    for name, warned in summary.get("warned", {}).items():
        lines.append(f"guard {name} warned {warned['times']} times, first after step {warned['first']}")
    if model := summary.get("model"):
        lines.append(f"model/ holds the weights after step {model['step']}: {model['why']}")
    return lines
