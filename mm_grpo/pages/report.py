"""The page of one or several runs, made from their folders alone: report.html, view.html.

Curves, evaluations, groups of rollouts (gallery.py), the config with what differs from the defaults, the machine. It
works for a run that is under way or was stopped, with what there is.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from mm_grpo.config import GRPOConfig
from mm_grpo.config.yaml_file import read_yaml
from mm_grpo.errors import UserError
from mm_grpo.files import atomic_write, read_json
from mm_grpo.pages.curves import CURVES, Curve, Curves, ExpectedCurve, places_of, read_expected_curve, thinned
from mm_grpo.pages.gallery import WHILE_RUNNING, WHOLE, Budget, Pictures, gather_gallery
from mm_grpo.pages.page import Picture, render
from mm_grpo.run.metrics import iter_metrics, read_events, read_summary
from mm_grpo.run.paths import RunPaths
from mm_grpo.terminal import redact

PAGE = 10
"""Groups and evaluation rows that are shown at a time."""
MOST_EVENTS = 200

logger = logging.getLogger("mm_grpo")


class Report:
    """The page of one or several runs, which may be written, or shown in a notebook, again and again as they go on."""

    def __init__(self, runs: Sequence[RunPaths]) -> None:
        self.runs = tuple(runs)

    def write(self, path: Path, budget: Budget = WHOLE) -> Path:
        """Write the page to `path`, in one piece, and return it."""
        atomic_write(path, self.html(budget))
        return path

    def html(self, budget: Budget = WHOLE) -> str:
        """The page."""
        data, pictures = self.gather(budget)
        title = f"{', '.join(run['name'] for run in data['runs'])} – mm_grpo"
        return render(title, data, pictures)

    def _repr_html_(self) -> str:
        page = escape(self.html(WHILE_RUNNING))
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 800px; border: 0"></iframe>'

    def gather(self, budget: Budget = WHOLE) -> tuple[dict[str, Any], dict[str, Picture]]:
        """Everything the page shows, and its pictures."""
        share = Budget(budget.texts // len(self.runs), budget.images // len(self.runs))
        pictures = Pictures(0)
        configs = [config_of(paths) for paths in self.runs]
        curves = [Curves(iter_metrics(p.metrics) if p.metrics.is_file() else ()) for p in self.runs]
        runs, galleries = [], []
        for i, (paths, name) in enumerate(zip(self.runs, run_names(self.runs), strict=True)):
            pictures.limit += share.images
            galleries.append(gather_gallery(paths, share, pictures, i))
            one = {
                "name": name,
                "summary": read_summary(paths),
                "blind": (configs[i].get("run") or {}).get("eval_blind"),
                **curves[i].numbers(),
                "events": read_events(paths.events)[-MOST_EVENTS:],
                "config": str(redact(paths.config.read_text(encoding="utf-8")))
                if paths.config.is_file()
                else "",
                "changed": changed_settings(configs[i]),
                "environment": read_json(paths.environment, dict) if paths.environment.is_file() else {},
                "shown": galleries[i].counts,
            }
            runs.append(one)
        expected = [
            read_expected_curve(paths.expected) if paths.expected.is_file() else None for paths in self.runs
        ]
        data = {
            "kind": "run",
            "runs": runs,
            "charts": list(self._charts(curves, expected)),
            "expected": list(dict.fromkeys(f"{curve.metric}: {curve.source}" for curve in expected if curve)),
            "groups": [group for gallery in galleries for group in gallery.groups],
            "evaluations": [row for gallery in galleries for row in gallery.evaluations],
            "page": PAGE,
            "budget": asdict(budget),
        }
        return data, pictures.held

    def _charts(
        self, curves: Sequence[Curves], expected: Sequence[ExpectedCurve | None]
    ) -> Iterator[dict[str, Any]]:
        """The charts that have values; one that is `zero` throughout is named instead of drawn.

        The evaluation's reward is left out where it is its accuracy.
        """
        accuracy: list[dict[str, Any]] = []
        for place, curve in enumerate(CURVES):
            lines = list(self._lines(place, curve, curves))
            if len(lines) < (1 if len(self.runs) > 1 else curve.least):
                continue
            if curve.title == "Evaluation reward" and lines == accuracy:
                continue
            accuracy = lines if curve.title == "Evaluation accuracy" else accuracy
            yield {
                "title": curve.title,
                "unit": curve.unit,
                "limits": curve.limits,
                "smooth": curve.smooth,
                "zero": not curve.zeros and not any(y for line in lines for _, y in line["points"]),
                "lines": lines,
                "expected": expected_lines(place, len(lines) > 1, expected),
            }

    def _lines(self, place: int, curve: Curve, curves: Sequence[Curves]) -> Iterator[dict[str, Any]]:
        """The lines of one chart."""
        several = len(self.runs) > 1
        for run, (name, own) in enumerate(zip(run_names(self.runs), curves, strict=True)):
            lines = own.lines[place]
            for metric, points in lines.items():
                if all(y is None for _, y in points) or (several and curve.alone not in ("", metric)):
                    continue
                label = metric
                if several:
                    label = f"{name} {metric}" if len(lines) > 1 else name
                yield {"label": label, **({"run": run} if several else {}), **thinned(points)}


class LivePage:
    """report.html of a run that goes on: written every `every` steps, after evaluations, and at the end."""

    def __init__(self, paths: RunPaths, every: int) -> None:
        self._report, self._path, self._every = Report([paths]), paths.report, every

    def on_log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the page where it is due after a step, whose `metrics` are in metrics.jsonl."""
        if step % self._every == 0 or any(name.startswith("eval/") for name in metrics):
            self.write(WHILE_RUNNING)

    def write(self, budget: Budget = WHOLE) -> None:
        """Write the page; one that cannot be written is a warning, for `mm-grpo view` can make it later."""
        try:
            self._report.write(self._path, budget)
        except Exception as error:  # whatever it is: no run ends for a page
            logger.warning("report.html cannot be written (%s: %s)", type(error).__name__, error)


def expected_lines(place: int, named: bool, expected: Sequence[ExpectedCurve | None]) -> list[dict[str, Any]]:
    """The expected curves of the chart at `place`, `named` by their metric; one that several runs expect is once."""
    found = []
    for curve in dict.fromkeys(filter(None, expected)):
        for metric in (metric for at, metric in places_of(curve.metric) if at == place):
            label = f"expected {metric}" if named else "expected"
            found.append({"label": label, "points": list(zip(curve.steps, curve.values, strict=True))})
    return found


def config_of(paths: RunPaths) -> dict[str, Any]:
    """What config.yaml holds; {} where it cannot be read, which a page is drawn without."""
    try:
        return read_yaml(paths.config)
    except (UserError, OSError, ValueError):
        return {}


def changed_settings(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The settings of a config that are not the defaults, by their full names; none of one that is not legal now."""
    try:
        config = GRPOConfig.from_dict(values)
    except UserError:
        return []
    default = GRPOConfig.from_dict({"model": {"path": config.model.path}})

    def walk(now: Any, then: Any, before: str) -> Iterator[tuple[str, str]]:
        for key, value in now.items():
            known = then.get(key)
            if isinstance(value, dict) and isinstance(known, dict) and value and known:
                yield from walk(value, known, f"{before}{key}.")
            elif value != known:
                yield before + key, json.dumps(value, ensure_ascii=False, default=str)

    found = walk(redact(config.model_dump(mode="json")), default.model_dump(mode="json"), "")
    return [("model.path", str(config.model.path)), *found]


def run_names(runs: Sequence[RunPaths]) -> list[str]:
    """The folders' names; with their parents' where two have the same."""
    roots = [paths.root.resolve() for paths in runs]
    names = [root.name for root in roots]
    if len(set(names)) < len(names):
        names = [f"{root.parent.name}/{root.name}" for root in roots]
    return names
