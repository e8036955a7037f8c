"""Page of one or several runs, made from the files of their folders: report.html, view.html.

It shows curves, evaluations, groups of rollouts (gallery.py), the config with its changes from the defaults, and the
machine. The run may be unfinished.
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
from mm_grpo.data.blind import CONTROLS
from mm_grpo.errors import UserError
from mm_grpo.files import atomic_write, read_json
from mm_grpo.pages.curves import CURVES, Curves, ExpectedCurve, curves_of, read_expected_curve, thin_out
from mm_grpo.pages.gallery import FULL_BUDGET, LIVE_BUDGET, Budget, ImageStore, gather_gallery
from mm_grpo.pages.page import PageImage, render
from mm_grpo.run.metrics import iter_metrics, read_rows, read_summary
from mm_grpo.run.paths import RunPaths
from mm_grpo.terminal import redact

PAGE_SIZE = 10  # groups and evaluation rows that are shown at a time
MAX_EVENTS = 200

logger = logging.getLogger("mm_grpo")


class Report:
    """Page of one or several runs, to be written to a file or shown in a notebook, also while they go on."""

    def __init__(self, runs: Sequence[RunPaths]) -> None:
        self.runs = tuple(runs)

    def write(self, path: Path, budget: Budget = FULL_BUDGET) -> Path:
        """Write the page to `path` atomically, and return `path`."""
        atomic_write(path, self.html(budget))
        return path

    def html(self, budget: Budget = FULL_BUDGET) -> str:
        """Return the page."""
        data, images = self.gather(budget)
        title = f"{', '.join(run['name'] for run in data['runs'])} – mm_grpo"
        return render(title, data, images)

    def _repr_html_(self) -> str:
        # the page has many double quotes, which a notebook would save as six characters each
        page = escape(self.html(LIVE_BUDGET), quote=False).replace("'", "&#x27;")
        return f"<iframe srcdoc='{page}' style='width: 100%; height: 800px; border: 0'></iframe>"

    def gather(self, budget: Budget = FULL_BUDGET) -> tuple[dict[str, Any], dict[str, PageImage]]:
        """Return the data of the page, and its images by name."""
        share = Budget(budget.texts // len(self.runs), budget.images // len(self.runs))
        images = ImageStore(0)
        curves = [Curves(iter_metrics(p.metrics) if p.metrics.is_file() else ()) for p in self.runs]
        runs, galleries = [], []
        for i, (paths, name) in enumerate(zip(self.runs, run_names(self.runs), strict=True)):
            images.limit += share.images
            galleries.append(gather_gallery(paths, share, images, i))
            config = config_of(paths)
            text = paths.config.read_text(encoding="utf-8") if paths.config.is_file() else ""
            runs.append({
                "name": name,
                "summary": read_summary(paths),
                "blind": (config.get("run") or {}).get("eval_blind"),
                **curves[i].numbers(),
                "events": read_rows(paths.events)[-MAX_EVENTS:],
                "config": str(redact(text)),
                "changed": changed_settings(config),
                "environment": read_json(paths.environment, dict) if paths.environment.is_file() else {},
                "shown": galleries[i].counts,
            })  # fmt: skip
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
            "controls": CONTROLS,
            "page": PAGE_SIZE,
            "budget": asdict(budget),
        }
        return data, images.by_name

    def _charts(
        self, curves: Sequence[Curves], expected: Sequence[ExpectedCurve | None]
    ) -> Iterator[dict[str, Any]]:
        """Yield the charts with values. The evaluation's reward is left out if it equals its accuracy."""
        accuracy: list[dict[str, Any]] = []
        for index, curve in enumerate(CURVES):
            lines = list(self._lines(index, curves))
            if len(lines) < (1 if len(self.runs) > 1 else curve.min_lines):
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
                "expected": expected_lines(index, len(lines) > 1, expected),
            }

    def _lines(self, index: int, curves: Sequence[Curves]) -> Iterator[dict[str, Any]]:
        """Yield the lines of the chart CURVES[index]."""
        several_runs = len(self.runs) > 1
        for run, (name, run_curves) in enumerate(zip(run_names(self.runs), curves, strict=True)):
            lines = run_curves.lines[index]
            for metric, points in lines.items():
                if all(y is None for _, y in points) or (
                    several_runs and CURVES[index].compared not in ("", metric)
                ):
                    continue
                label = metric
                if several_runs:
                    label = f"{name} {metric}" if len(lines) > 1 else name
                yield {"label": label, **({"run": run} if several_runs else {}), **thin_out(points)}


class LivePage:
    """report.html of a running run, written every `every` steps, after evaluations, and at the end."""

    def __init__(self, paths: RunPaths, every: int) -> None:
        self._report, self._path, self._every = Report([paths]), paths.report, every

    def on_log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the page if it is due after this step; its `metrics` are in metrics.jsonl already."""
        if step % self._every == 0 or any(name.startswith("eval/") for name in metrics):
            self.write(LIVE_BUDGET)

    def write(self, budget: Budget = FULL_BUDGET) -> None:
        """Write the page; only warn if that fails, because `mm-grpo view` can make it later."""
        try:
            self._report.write(self._path, budget)
        except Exception as error:  # no error of the page may end a run
            logger.warning("report.html cannot be written (%s: %s)", type(error).__name__, error)


def expected_lines(index: int, named: bool, expected: Sequence[ExpectedCurve | None]) -> list[dict[str, Any]]:
    """Return the expected lines of the chart CURVES[index], without duplicates, `named` by their metric."""
    lines = []
    for curve in dict.fromkeys(filter(None, expected)):
        points = list(zip(curve.steps, curve.values, strict=True))
        metrics = [metric for chart, metric in curves_of(curve.metric) if chart == index]
        lines += [{"label": f"expected {m}" if named else "expected", "points": points} for m in metrics]
    return lines


def config_of(paths: RunPaths) -> dict[str, Any]:
    """Read config.yaml; return {} if it cannot be read."""
    try:
        return read_yaml(paths.config)
    except (UserError, OSError, ValueError):
        return {}


def changed_settings(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (full name, value) of the settings that are not the defaults; [] for a config that is illegal today."""
    try:
        config = GRPOConfig.from_dict(values)
    except UserError:
        return []
    defaults = GRPOConfig.from_dict({"model": {"path": config.model.path}}).flat()
    changes = {path: value for path, value in redact(config.flat()).items() if value != defaults[path]}
    texts = {path: json.dumps(value, ensure_ascii=False, default=str) for path, value in changes.items()}
    return [("model.path", str(config.model.path)), *texts.items()]


def run_names(runs: Sequence[RunPaths]) -> list[str]:
    """Return the folders' names, with their parents' names if two are equal."""
    roots = [paths.root.resolve() for paths in runs]
    names = [root.name for root in roots]
    if len(set(names)) < len(names):
        names = [f"{root.parent.name}/{root.name}" for root in roots]
    return names
