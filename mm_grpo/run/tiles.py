"""The numbers at the top of report.html and its table of evaluations, with 95 % intervals and the blind control.

Those of a finished run are of summary.json; while it goes on, of the evaluations in metrics.jsonl.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mm_grpo.run.charts import number
from mm_grpo.run.curves import Curves

Summary = Mapping[str, Any] | None


def tiles(curves: Curves, summary: Summary, blind: str | None = None) -> list[dict[str, str]]:
    """Accuracy (or what the headline is), what the images add to it, reward, steps, time.

    `blind` is how the control of a run that goes on is made: its images are shuffled, or removed.
    """
    found: list[dict[str, str]] = []
    if summary:
        share = summary["accuracy_after"] is not None
        before, after = (summary.get(f"{'accuracy' if share else 'score'}_{when}") for when in ENDS)
        first, last = (summary.get("first_set", {}).get(when) or {} for when in ENDS)
        word = "accuracy" if share else str(summary.get("headline", "score"))
        interval, control = last.get("interval"), last.get("blind")
        gap_before = (first.get("blind") or {}).get("gap")
    else:
        then, now = curves.first_evaluation, curves.last_evaluation
        name, share = headline_set(now)
        word, what = ("accuracy", "accuracy") if share else ("score", "score")
        before, after = (row.get(f"eval/{name}/{what}") for row in (then, now))
        before = None if now is then else before
        interval = _pair(now, f"eval/{name}/score")
        control = {
            "kind": blind,
            "score": now.get("eval/blind/score"),
            "gap": now.get("eval/blind/gap"),
            "gap_interval": _pair(now, "eval/blind/gap"),
        }
        gap_before = None if now is then else then.get("eval/blind/gap")
        control = control if blind else None
    if after is not None:
        note = [_interval(interval, share)]
        if before is not None:
            note.append(f"from {plain(before, share)}, {difference(after - before, share)}")
        found.append({"word": word, "value": plain(after, share), "note": "; ".join(filter(None, note))})
    if control and control.get("gap") is not None:
        note = [_interval(control.get("gap_interval"), share, signed=True)]
        if control.get("score") is not None:
            note.append(f"images {control['kind']}: {plain(control['score'], share)}")
        if gap_before is not None:
            note.append(f"from {difference(gap_before, share)}")
        value, _, unit = difference(control["gap"], share).partition(" ")
        found.append(
            {
                "word": "what the images add",
                "value": value,
                "unit": unit,
                "note": "; ".join(filter(None, note)),
            }
        )
    if rewards := curves.rewards:
        words = f"mean of the last {len(rewards)} steps, from {curves.first_reward:.3f}"
        value = f"{sum(rewards) / len(rewards):.3f}"
        found.append({"word": "reward", "value": value, "note": words if len(rewards) > 1 else ""})
    if curves.last_step is not None:
        words = f"{curves.seconds / curves.timed:.1f} s each" if curves.timed else ""
        found.append({"word": "steps", "value": str(curves.last_step), "note": words})
    if summary:
        found.append({"word": "time", "value": duration(summary["seconds"]), "note": "from start to end"})
    return found


ENDS = ("before", "after")


def evaluation_table(curves: Curves, summary: Summary) -> list[dict[str, str]]:
    """A row of each set: its score before and after, with the interval and the change; and of the blind control."""
    if not summary:
        return []
    share = summary["accuracy_after"] is not None
    first, last = (summary.get("first_set", {}).get(when) or {} for when in ENDS)
    found: list[dict[str, str]] = []
    for place, (name, scores) in enumerate(summary["eval"].items()):
        now = curves.last_evaluation
        same = now.get(f"eval/{name}/score") == scores["after"]
        interval = last.get("interval") if place == 0 else _pair(now, f"eval/{name}/score") if same else None
        found.append(_row(name, scores["before"], scores["after"], interval, share))
        then, control = (one.get("blind") if place == 0 else None for one in (first, last))
        if control:
            then = then or {}
            words = f"{name}, images {control['kind']}"
            found.append(_row(words, then.get("score"), control["score"], control.get("interval"), share))
            gaps = [
                None if gap is None else difference(gap, share) for gap in (then.get("gap"), control["gap"])
            ]
            values = dict(zip(ENDS, (gap or "–" for gap in gaps), strict=True))
            change = "–" if None in gaps else difference(control["gap"] - then["gap"], share)
            ends = _ends(control.get("gap_interval"), share, signed=True)
            found.append(
                {"set": f"{name}, what the images add", **values, "interval": ends, "change": change}
            )
    return found


def _row(
    name: str, before: float | None, after: float | None, interval: Sequence[float] | None, share: bool
) -> dict[str, str]:
    change = "–" if before is None or after is None else difference(after - before, share)
    values = {
        "before": plain(before, share),
        "after": plain(after, share),
        "interval": _ends(interval, share),
    }
    return {"set": name, **values, "change": change}


def headline_set(row: Mapping[str, float]) -> tuple[str, bool]:
    """The first set in the metrics of an evaluation, and whether its score is an accuracy.

    >>> headline_set({"eval/a/reward": 0.5, "eval/a/score": 0.5, "eval/b/accuracy": 0.5})
    ('a', False)
    """
    for name in row:
        if (match := re.fullmatch(r"eval/(.+)/(?:accuracy|score)", name)) and "/task/" not in name:
            return match[1], f"eval/{match[1]}/accuracy" in row
    return "", True


def plain(value: float | None, share: bool) -> str:
    """A score, in per cent where it is a share.

    >>> plain(0.5, True), plain(0.5, False), plain(None, True)
    ('50.0%', '0.5', '–')
    """
    return "–" if value is None else f"{value:.1%}" if share else number(value)


def difference(value: float, share: bool) -> str:
    """A difference of two scores.

    >>> difference(-0.125, True), difference(0.5, False)
    ('-12.5 points', '+0.5')
    """
    return f"{value * 100:+.1f} points" if share else f"{value:+.4g}"


def duration(seconds: float) -> str:
    """Seconds in words.

    >>> duration(59.6), duration(3725)
    ('60 s', '1 h 2 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _pair(row: Mapping[str, float], name: str) -> tuple[float, float] | None:
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    return None if low is None or high is None else (low, high)


def _ends(interval: Sequence[float] | None, share: bool, *, signed: bool = False) -> str:
    if not interval:
        return "–"
    if signed:
        return " to ".join(f"{end * 100:+.1f}" if share else f"{end:+.4g}" for end in interval)
    return " to ".join(plain(end, share) for end in interval)


def _interval(interval: Sequence[float] | None, share: bool, *, signed: bool = False) -> str:
    return f"95 % interval {_ends(interval, share, signed=signed)}" if interval else ""
