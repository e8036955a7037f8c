"""report.html: a run on one page that needs nothing else, made from the run folder alone.

Curves, the evaluation, some rollouts of the first, the middle and the last step that was logged, the
config and the machine. It works for a run that is under way or was stopped, with what there is.
Everything that a run wrote is data: the template escapes all of it, the page forbids scripts, and
only pictures named as ours are read. Layout and colours are in report.html.j2, drawing in charts.py.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_grpo.files import atomic_write
from mm_grpo.run.charts import Series, line_chart, number, running_mean
from mm_grpo.run.metrics import read_metrics, read_summary
from mm_grpo.run.paths import IMAGE_NAME, RunPaths
from mm_grpo.run.rollout_log import logged_steps, read_rollouts

GROUPS_PER_STEP = 3
COMPLETIONS_PER_GROUP = 8
LONGEST_SIDE = 512  # pixels of a picture on the page
SMOOTH_FROM = 20  # steps from which the reward is shown with its running mean
# Columns that hold the answer; without one of these all columns are shown.
GOLD = ("answer", "solution", "gold", "target", "label", "ground_truth")


@dataclass(frozen=True)
class Curve:
    """One chart: the metrics whose whole name matches `pattern`; its group, if any, names the line.

    `limits` fix the ends of the y axis; a None is as high as the values. `smooth` adds the running
    mean. `from_summary` puts the accuracy before the first step in front. `least` is the number of
    lines from which the chart is drawn.
    """

    title: str
    unit: str
    pattern: str
    limits: tuple[float, float | None] | None = None
    smooth: bool = False
    from_summary: bool = False
    least: int = 1


CURVES = (
    Curve("Reward", "mean reward", r"reward", smooth=True),
    Curve(
        "Evaluation accuracy",
        "share right",
        r"eval(?:[/_](.+))?[/_]accuracy",
        limits=(0, 1),
        from_summary=True,
    ),
    Curve("Reward parts", "mean score", r"rewards/(.+)/mean", least=2),
    Curve("Groups without a signal", "share of groups", r"frac_reward_zero_std", limits=(0, 1)),
    Curve("KL to the reference", "nats", r"kl", limits=(0, None)),
    Curve("Entropy", "nats per token", r"entropy", limits=(0, None)),
    Curve("Completion length", "tokens", r"completions/(mean|min|max)_length", limits=(0, None)),
    Curve("Calls of tools", "calls per conversation", r"tools/call_frequency", limits=(0, None)),
    Curve("Gradient norm", "norm", r"grad_norm", limits=(0, None)),
    Curve("Step time", "seconds", r"step_time", limits=(0, None)),
)


def write_report(paths: RunPaths) -> Path:
    """Write report.html from what is in the folder, and return its path."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = lambda value: "–" if value is None else number(value)
    environment.filters["percent"] = lambda value: "–" if value is None else f"{value:.1%}"
    template = environment.from_string(Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8"))
    atomic_write(paths.report, template.render(gather(paths)))
    return paths.report


def gather(paths: RunPaths) -> dict[str, Any]:
    """Everything the template shows."""
    rows = read_metrics(paths.metrics) if paths.metrics.is_file() else []
    summary = read_summary(paths)
    steps = logged_steps(paths)
    shown = sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []
    return {
        "name": paths.root.resolve().name,
        "finished": summary is not None,
        "steps": summary["steps"] if summary else rows[-1]["step"] if rows else 0,
        "tiles": tiles(rows, summary),
        "evaluations": summary["eval"] if summary else {},
        "charts": [chart for curve in CURVES if (chart := draw(curve, rows, summary))],
        "rollouts": [
            {"step": step, "groups": pick_groups(paths, read_rollouts(paths, step))} for step in shown
        ],
        "config": paths.config.read_text(encoding="utf-8") if paths.config.is_file() else "",
        "environment": json.loads(paths.environment.read_text(encoding="utf-8"))
        if paths.environment.is_file()
        else {},
    }


def tiles(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any] | None) -> list[dict[str, str]]:
    """The few numbers at the top: accuracy, reward, steps, time."""
    found: list[dict[str, str]] = []
    if summary and summary["accuracy_after"] is not None:
        before, after = summary["accuracy_before"], summary["accuracy_after"]
        note = "" if before is None else f"from {before:.1%}, {(after - before) * 100:+.1f} points"
        found.append({"word": "accuracy", "value": f"{after:.1%}", "note": note})
    rewards = [row["reward"] for row in rows if row.get("reward") is not None]
    if rewards:
        last = rewards[-10:]
        note = f"mean of the last {len(last)} steps, from {rewards[0]:.3f}" if len(last) > 1 else ""
        found.append({"word": "reward", "value": f"{sum(last) / len(last):.3f}", "note": note})
    if rows:
        times = [row["step_time"] for row in rows if row.get("step_time") is not None]
        note = f"{sum(times) / len(times):.1f} s each" if times else ""
        found.append({"word": "steps", "value": str(rows[-1]["step"]), "note": note})
    if summary:
        found.append({"word": "time", "value": duration(summary["seconds"]), "note": "from start to end"})
    return found


def draw(
    curve: Curve, rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """One chart with its legend; None when no row has its metrics."""
    names = dict.fromkeys(key for row in rows for key in row)
    matches = {name: match for name in names if (match := re.fullmatch(curve.pattern, name))}
    series: list[Series] = []
    for name, match in matches.items():
        label = (match[1] if match.re.groups else None) or curve.title.lower()
        points = tuple((row["step"], row[name]) for row in rows if name in row)
        if curve.from_summary:
            points = _before(match[1], points, summary) + points
        if all(y is None for _, y in points):
            continue
        slot = len(series) + 1
        if curve.smooth and len(points) >= SMOOTH_FROM:
            width = max(5, len(points) // 20 | 1)
            series.append(Series("each step", points, slot, faint=True))
            series.append(Series(f"mean of {width} steps", running_mean(points, width), slot))
        else:
            series.append(Series(label, points, slot))
    if len(series) < curve.least:
        return None
    svg = line_chart(curve.title, curve.unit, series, curve.limits)
    return {"title": curve.title, "svg": svg, "legend": series if len(series) > 1 else []}


def pick_groups(paths: RunPaths, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The groups worth looking at: those whose rewards differ most, in the order of their slots."""
    groups: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["slot"], row.get("attempt", 0)), []).append(row)

    def spread(place: tuple[int, int]) -> float:
        rewards = [row["reward"] for row in groups[place] if row["reward"] is not None]
        return max(rewards) - min(rewards) if rewards else 0.0

    chosen = sorted(sorted(groups), key=spread, reverse=True)[:GROUPS_PER_STEP]
    return [describe_group(paths, groups[place]) for place in sorted(chosen)]


def describe_group(paths: RunPaths, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One prompt and its completions, ready for the template."""
    head = rows[0]
    gold = {name: head["columns"][name] for name in GOLD if name in head["columns"]}
    largest = max((abs(row["advantage"]) for row in rows), default=0.0)
    return {
        "slot": head["slot"],
        "uid": head["uid"],
        "images": [uri for name in head["images"] if (uri := picture(paths, name))],
        "messages": [{"role": m["role"], "text": message_text(m["content"])} for m in head["messages"]],
        "gold": {name: _plain_text(value) for name, value in (gold or head["columns"]).items()},
        "left_out": max(0, len(rows) - COMPLETIONS_PER_GROUP),
        "completions": [
            {
                **row,
                "turns": [describe_turn(paths, turn) for turn in row.get("turns", [])],
                "masked": row.get("masked"),
                "tone": "up" if row["advantage"] > 0 else "down" if row["advantage"] < 0 else "flat",
                "strength": round(abs(row["advantage"]) / largest, 2) if largest else 0,
                "signed": f"{row['advantage']:+.2f}" if row["advantage"] else "0",
            }
            for row in rows[:COMPLETIONS_PER_GROUP]
        ],
    }


def describe_turn(paths: RunPaths, turn: Mapping[str, Any]) -> dict[str, Any]:
    """One turn of a conversation: what the model wrote, or the call of a tool with its answer and its images."""
    head = turn["role"]
    if turn["role"] == "tool":
        arguments = ", ".join(f"{name}={_plain_text(value)}" for name, value in turn["arguments"].items())
        head = f"{turn['name']}({arguments})"
    return {
        "head": head,
        "text": turn["text"],
        "fault": turn.get("fault"),
        "images": [uri for name in turn.get("images", []) if (uri := picture(paths, name))],
    }


def message_text(content: str | Sequence[Mapping[str, Any]]) -> str:
    """A message's content as text; a media part is shown as its type in brackets."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else f"[{part['type']}] " for part in content)


def picture(paths: RunPaths, name: str) -> str | None:
    """A logged picture as a data URI, made smaller where it is large; None for a name that is not ours."""
    file = paths.images / name
    if not IMAGE_NAME.fullmatch(name) or not file.is_file():
        return None
    from PIL import Image

    with Image.open(file) as image:
        if max(image.size) <= LONGEST_SIDE:
            data = file.read_bytes()
        else:
            small, png = image.copy(), io.BytesIO()
            small.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
            small.save(png, "PNG")
            data = png.getvalue()
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def duration(seconds: float) -> str:
    """Seconds in words.

    >>> duration(59.6), duration(3725)
    ('60 s', '1 h 2 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _before(
    name: str | None, points: Sequence[tuple[float, Any]], summary: Mapping[str, Any] | None
) -> tuple[tuple[float, float], ...]:
    """The accuracy before the first step, which only the summary knows."""
    scores = (summary or {}).get("eval", {})
    own = scores.get(name) if name else next(iter(scores.values()), None)
    if own is None or own.get("before") is None or (points and points[0][0] <= 0):
        return ()
    return ((0, own["before"]),)


def _plain_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
