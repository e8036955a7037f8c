"""report.html: one or several runs on one page that needs nothing else, made from the run folders alone.

Curves, evaluations, groups of rollouts (gallery.py), the config with what differs from the defaults, the machine. It
works for a run that is under way or was stopped, with what there is. A `Report` reads each row of metrics.jsonl once
and holds a bounded number of points (curves.py), so a page costs the same at step 100 and at step 100,000.

Everything that a run wrote is data: the template escapes all of it, or holds it as JSON that no browser runs, and the
page's policy allows one script and one style, by their hashes, and nothing to be fetched. Layout is in report.html.j2,
looks in report.css, what a reader does in report.js, the numbers at the top in tiles.py; without the script the page
shows all but the later groups.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

from mm_grpo.config import GRPOConfig
from mm_grpo.config.yaml_file import read_yaml
from mm_grpo.errors import ConfigError, UserError
from mm_grpo.files import atomic_write, read_json
from mm_grpo.run.charts import Point, Series, line_chart, number, running_mean, thin
from mm_grpo.run.curves import CURVES, Curve, Curves, Trace, places_of
from mm_grpo.run.events import read_events
from mm_grpo.run.expected_curve import ExpectedCurve, read_expected_curve
from mm_grpo.run.gallery import WHILE_RUNNING, WHOLE, Budget, Pictures, gather_gallery, images_of
from mm_grpo.run.metrics import new_rows, read_summary
from mm_grpo.run.paths import RunPaths
from mm_grpo.run.shades import LEGEND
from mm_grpo.run.tiles import evaluation_table, tiles
from mm_grpo.terminal import printable, redact

__all__ = ["WHILE_RUNNING", "WHOLE", "Budget", "Report", "write_report"]

WRITTEN_BY = b'<meta name="generator" content="mm_grpo report">'
"""Stands near the start of each page: `view` writes over nothing else."""
PAGE = 10
"""Groups and evaluation rows that are shown at a time."""
SMOOTH_FROM = 20  # steps from which the reward is shown with its running mean
MOST_EVENTS = 200
READ = 1 << 20
"""Bytes of metrics.jsonl that are held at once."""


class Report:
    """The page of one or several runs, which may be written again and again as they go on."""

    def __init__(self, runs: Sequence[RunPaths]) -> None:
        self.runs = tuple(runs)
        self.curves = [Curves() for _ in self.runs]
        self._read = [0 for _ in self.runs]
        self._pictures: dict[Any, Any] = {}

    def write(self, path: Path, budget: Budget = WHOLE) -> Path:
        """Write the page to `path`, in one piece, and return it."""
        atomic_write(path, render(self.gather(budget)))
        return path

    def gather(self, budget: Budget = WHOLE) -> dict[str, Any]:
        """Everything the template shows."""
        self.update()
        names = run_names(self.runs)
        share = Budget(*(part // len(self.runs) for part in (budget.texts, budget.images, budget.read)))
        pictures = Pictures(0, self._pictures)
        shown = []
        for i, paths in enumerate(self.runs):
            pictures.limit += share.images
            shown.append(gather_gallery(paths, share, pictures, i))
        summaries = [read_summary(paths) for paths in self.runs]
        events = [read_events(paths.events)[-MOST_EVENTS:] for paths in self.runs]
        blind = [blind_kind(paths) for paths in self.runs]
        drawn, zeros, sources = self._charts(names, summaries, events, blind)
        groups = [group for gallery in shown for group in gallery.groups]
        return {
            "runs": [
                {
                    "name": name,
                    "steps": summary["steps"] if summary else curves.last_step or 0,
                    "finished": summary is not None,
                    "tiles": tiles(curves, summary, kind),
                    "evaluations": evaluation_table(curves, summary),
                    "events": [{**event, "message": printable(event["message"])} for event in guarded],
                    "config": config_text(paths),
                    "changed": changed_settings(paths),
                    "environment": environment_of(paths),
                    "gallery": gallery,
                }
                for name, paths, curves, summary, guarded, gallery, kind in zip(
                    names, self.runs, self.curves, summaries, events, shown, blind, strict=True
                )
            ],
            "charts": drawn,
            "zeros": zeros,
            "expected": sources,
            "groups": groups,
            "sight_legend": LEGEND if any("sight" in c for g in groups for c in g["completions"]) else (),
            "evaluations": [row for gallery in shown for row in gallery.evaluations],
            "pictures": pictures.held,
            "budget": budget,
        }

    def update(self) -> None:
        """Read the rows of metrics.jsonl that were added since."""
        for i, paths in enumerate(self.runs):
            if not paths.metrics.is_file():
                continue
            if paths.metrics.stat().st_size < self._read[i]:  # cut by a run that resumed
                self.curves[i], self._read[i] = Curves(), 0
            while True:
                rows, end = new_rows(paths.metrics, self._read[i], READ)
                for row in rows:
                    self.curves[i].take(row)
                if end == self._read[i]:
                    break
                self._read[i] = end

    def _charts(
        self,
        names: Sequence[str],
        summaries: Sequence[Mapping[str, Any] | None],
        events: Sequence[Sequence[Mapping[str, Any]]],
        blind: Sequence[str | None],
    ) -> tuple[list[dict[str, Any]], list[str], list[str]]:
        """The charts that have values, the titles of those that are 0 throughout, and the sources of expected curves.

        The evaluation's reward is left out where it is its accuracy.
        """
        found: list[dict[str, Any]] = []
        zeros: list[str] = []
        accuracy: list[Series] = []
        expected = [expected_of(paths) for paths in self.runs]
        for place, curve in enumerate(CURVES):
            lines = self._lines(place, curve, names, summaries, blind)
            if sum(not line.faint for line in lines) < (1 if len(self.runs) > 1 else curve.least):
                continue
            if not curve.zeros and not any(y for line in lines for _, y in line.points):
                zeros.append(curve.title.lower())
                continue
            if curve.title == "Evaluation reward" and lines == accuracy:
                continue
            accuracy = lines if curve.title == "Evaluation accuracy" else accuracy
            lines = [*lines, *expected_lines(place, lines, expected, blind)]
            found.append(draw(curve, lines, events[0] if len(self.runs) == 1 else ()))
        sources = dict.fromkeys(
            f"{printable(e.metric, lines=False)}: {printable(e.source, lines=False)}" for e in expected if e
        )
        return found, zeros, list(sources)

    def _lines(
        self,
        place: int,
        curve: Curve,
        names: Sequence[str],
        summaries: Sequence[Mapping[str, Any] | None],
        blind: Sequence[str | None],
    ) -> list[Series]:
        """The lines of one chart; none when no run has its metrics."""
        several = len(self.runs) > 1
        lines: list[Series] = []
        for name, curves, summary, kind in zip(names, self.curves, summaries, blind, strict=True):
            for metric, trace in curves.traces[place].items():
                before = value_before(metric, trace, summary) if curve.before else ()
                if all(y is None for _, y in trace.points) or (several and curve.alone not in ("", metric)):
                    continue
                label = line_name(metric, kind)
                lines += series_of(
                    curve,
                    (f"{name} {label}" if len(curves.traces[place]) > 1 else name) if several else label,
                    trace,
                    slot=sum(not line.faint for line in lines) + 1,
                    before=before,
                    alone=not several,
                )
        return lines


def draw(curve: Curve, lines: Sequence[Series], events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One chart with its legend."""
    marked = [(e["step"], printable(f"step {e['step']}: {e['name']}: {e['message']}")) for e in events]
    return {
        "title": curve.title,
        "unit": curve.unit,
        "svg": line_chart(curve.title, "", lines, curve.limits, marked),
        "legend": lines if len(lines) > 1 else [],
        "lines": [{"label": line.label, "look": line.look, "points": thin(line.points)} for line in lines],
    }


def line_name(metric: str, blind: str | None) -> str:
    """The name of a line: of the blind control, how it was made."""
    return f"images {blind}" if blind and metric == "blind" else printable(metric, lines=False)


def expected_lines(
    place: int,
    lines: Sequence[Series],
    expected: Sequence[ExpectedCurve | None],
    blind: Sequence[str | None],
) -> list[Series]:
    """The expected curves of the chart at `place`, each once, though several runs expect it."""
    found: dict[ExpectedCurve, Series] = {}
    several = sum(not line.faint for line in lines) > 1
    for curve, kind in zip(expected, blind, strict=True):
        for at, metric in places_of(curve.metric) if curve is not None else ():
            if curve is not None and at == place:
                label = f"expected {line_name(metric, kind)}" if several else "expected"
                points = tuple(zip(curve.steps, curve.values, strict=True))
                found[curve] = Series(label, points, expected=True)
    return list(found.values())


def check_expected(path: str | PathLike[str]) -> None:
    """ConfigError unless the file `run.expected_curve` holds a curve that the page draws."""
    metric = read_expected_curve(path).metric
    if not places_of(metric):
        raise ConfigError(
            f"run.expected_curve = '{path}': metric '{printable(metric, lines=False)}' is none that report.html draws; "
            "name one of its curves, such as reward or eval/<set>/accuracy"
        )


def expected_of(paths: RunPaths) -> ExpectedCurve | None:
    """The curve that a run was started with; None where there is none that can be read."""
    try:
        return read_expected_curve(paths.expected) if paths.expected.is_file() else None
    except ConfigError:
        return None


def blind_kind(paths: RunPaths) -> str | None:
    """How a run's blind control is made, by its config.yaml: shuffled or removed."""
    try:
        section = read_yaml(str(paths.config)).get("run")
    except (UserError, OSError, ValueError):
        return None
    kind = section.get("eval_blind") if isinstance(section, Mapping) else None
    return kind if kind in ("shuffled", "removed") else None


def write_report(paths: RunPaths, budget: Budget = WHOLE) -> Path:
    """Write report.html from what is in the folder, and return its path."""
    return Report([paths]).write(paths.report, budget)


def render(found: Mapping[str, Any]) -> str:
    """The page of what `Report.gather` found."""
    style, script = (_asset(name) for name in ("report.css", "report.js"))
    first = (*found["groups"][:PAGE], *found["evaluations"][:PAGE])
    shown = {name: None for row in first for name in images_of(row) if name in found["pictures"]}
    html: str = _template().render(
        **found,
        first_pictures=shown,
        data={
            "runs": [run["name"] for run in found["runs"]],
            "page": PAGE,
            "groups": found["groups"],
            "evaluations": found["evaluations"],
            "pictures": {name: [made["width"], made["height"]] for name, made in found["pictures"].items()},
            "charts": [chart["lines"] for chart in found["charts"]],
        },
        page=PAGE,
        mark=WRITTEN_BY.decode(),
        style=style,
        script=script,
        style_hash=policy_hash(style),
        script_hash=policy_hash(script),
    )
    return html


@cache
def _template() -> Any:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = lambda value: "–" if value is None else number(value)
    environment.filters["percent"] = lambda value: "–" if value is None else f"{value:.1%}"
    environment.filters["visible"] = printable
    environment.filters["inert"] = inert_json
    return environment.from_string(_asset("report.html.j2"))


def series_of(
    curve: Curve, label: str, trace: Trace, *, slot: int, before: tuple[Point, ...] = (), alone: bool = True
) -> list[Series]:
    """The lines of one metric: its points; of a long run their means, over the points where it is `alone`."""
    points = before + trace.points
    if trace.width > 1:
        words = f"{label}, mean of {trace.width} steps" if alone else label
        mean = Series(words, before + trace.means, slot)
        return [Series(f"{label}, lowest and highest", points, slot, faint=True), mean] if alone else [mean]
    if curve.smooth and len(points) >= SMOOTH_FROM:
        width = max(5, len(points) // 20 | 1)
        mean = Series(f"mean of {width} steps" if alone else label, running_mean(points, width), slot)
        return [Series("each step", points, slot, faint=True), mean] if alone else [mean]
    return [Series(label, points, slot)]


def value_before(
    label: str, trace: Trace, summary: Mapping[str, Any] | None
) -> tuple[tuple[float, float], ...]:
    """The accuracy before the first step, of a run whose metrics.jsonl has no row for it."""
    scores = (summary or {}).get("eval", {})
    own = scores.get(label)
    if own is None or own.get("before") is None or (trace.buckets and trace.points[0][0] <= 0):
        return ()
    return ((0, own["before"]),)


def changed_settings(paths: RunPaths) -> list[dict[str, str]]:
    """The settings of config.yaml that are not the defaults, by their full names; none where it cannot be read."""
    try:
        config = GRPOConfig.from_dict(read_yaml(paths.config))
        default = GRPOConfig.from_dict({"model": {"path": config.model.path}})
    except (UserError, OSError, ValueError):
        return []
    found: list[dict[str, str]] = []

    def walk(now: Any, then: Any, before: str) -> None:
        for key, value in now.items():
            known = then.get(key) if isinstance(then, Mapping) else None
            if isinstance(value, dict) and isinstance(known, dict) and value and known:
                walk(value, known, f"{before}{key}.")
            elif value != known:
                text = json.dumps(value, ensure_ascii=False, default=str)
                found.append({"name": printable(before + key), "value": printable(text, lines=False)})

    walk(redact(config.model_dump(mode="json")), default.model_dump(mode="json"), "")
    return [{"name": "model.path", "value": printable(config.model.path)}, *found]


def config_text(paths: RunPaths) -> str:
    return printable(redact(paths.config.read_text(encoding="utf-8"))) if paths.config.is_file() else ""


def environment_of(paths: RunPaths) -> dict[str, Any]:
    if not paths.environment.is_file():
        return {}
    found: dict[str, Any] = read_json(paths.environment, dict)
    return found


def run_names(runs: Sequence[RunPaths]) -> list[str]:
    """The folders' names; with their parents' where two have the same."""
    roots = [paths.root.resolve() for paths in runs]
    names = [root.name for root in roots]
    if len(set(names)) < len(names):
        names = [f"{root.parent.name}/{root.name}" for root in roots]
    if len(set(names)) < len(names):
        names = [f"{i + 1}: {name}" for i, name in enumerate(names)]
    return [printable(name, lines=False) for name in names]


def policy_hash(text: str) -> str:
    """The source of a content security policy that allows exactly this inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def inert_json(value: Any) -> str:
    """A value as JSON that can stand in a <script> element: nothing in it ends the element or begins a tag."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
