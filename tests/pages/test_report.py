"""The page of a run: made from the folder alone, complete, and bounded. What it draws is in test_pages_browser.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.runs import group

from mm_grpo.errors import ConfigError
from mm_grpo.pages.curves import read_expected_curve
from mm_grpo.pages.page import inert_json
from mm_grpo.pages.report import LivePage, Report
from mm_grpo.run.folder import RunFolder
from mm_grpo.run.paths import RunPaths

GOLDEN = Path(__file__).with_name("report.json")


def controlled(path: Path, source: str = "seed 0") -> RunFolder:
    """A run of three evaluations with a blind control and sight, which expects a curve."""
    curve = path.parent / "curve.json"
    curve.write_text(
        json.dumps({"metric": "eval/a/accuracy", "steps": [0, 20], "values": [0.1, 0.9], "source": source})
    )
    folder = RunFolder(path, expected=curve)
    folder.start("model:\n  path: m\nrun:\n  eval_blind: removed\n")
    for step, right, gap in ((0, 0.25, 0.05), (10, 0.5, 0.25), (20, 0.75, 0.5)):
        row: dict[str, Any] = {"eval/a/accuracy": right, "eval/a/score": right, "eval/a/reward": right}
        row |= {"eval/a/score_low": right - 0.125, "eval/a/score_high": right + 0.125}
        row |= {"sight/nats": 2 * right}
        row |= {"eval/blind/accuracy": right - gap, "eval/blind/score": right - gap, "eval/blind/gap": gap}
        row |= {"eval/blind/reward": right - gap, "eval/blind/gap_low": gap - 0.1, "kl": 0.0, "reward": right}
        row |= {"eval/blind/gap_high": gap + 0.1, "step_time": 1.0, "time/learner": 0.5, "grad_norm": "inf"}
        folder.on_log(step, row)
    return folder


def test_the_page_of_a_run_is_the_golden_one(tmp_path: Path) -> None:
    folder = controlled(tmp_path / "run")
    (tmp_path / "curve.json").unlink()  # the page needs the run folder alone
    folder.write_rollouts(20, [group(0, (1.0, 0.0), parts={"exact": [1.0, 0.0]})])
    folder.append_event(10, "zero_std", "warn", "no group has a signal")
    data, pictures = Report([folder.paths]).gather()
    assert data["runs"][0].pop("environment")["command"] and len(pictures) == 1
    assert json.loads(inert_json(data)) == json.loads(GOLDEN.read_text(encoding="utf-8"))


def test_a_page_is_written_while_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = RunFolder(tmp_path / "run").start("x: 1\n")
    live, found = LivePage(folder.paths, 3), []
    for step in range(5):
        row = {"reward": 0.5, **({"eval/heldout/accuracy": 0.5} if step in (0, 2) else {})}
        folder.on_log(step, row)
        live.on_log(step, row)
        if folder.paths.report.exists():
            found.append(step)
            folder.paths.report.unlink()
    assert found == [0, 2, 3]
    LivePage(RunPaths(tmp_path / "gone"), 1).write()  # no run ends for a page
    assert "report.html cannot be written" in caplog.text and not caplog.text.count("Traceback")


def charts(*folders: RunFolder) -> dict[str, list[dict[str, Any]]]:
    data, _ = Report([folder.paths for folder in folders]).gather()
    return {chart["title"]: [*chart["lines"], *chart["expected"]] for chart in data["charts"]}


def test_an_expected_curve_is_checked_and_goes_with_the_run(tmp_path: Path) -> None:
    curve, root = tmp_path / "curve.json", tmp_path / "run"
    with pytest.raises(ConfigError, match=r"run.expected_curve = '.*curve.json'"):
        read_expected_curve(curve)
    values = {"metric": "rewrad", "steps": [1], "values": [0.5], "source": "here"}
    curve.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="rewrad"):
        read_expected_curve(curve)
    curve.write_text(json.dumps(values | {"metric": "reward"}))
    read_expected_curve(curve)
    folder = RunFolder(root, expected=curve).start("x: 1\n")
    folder.on_log(1, {"reward": 0.25})
    assert charts(folder)["Reward"] == [
        {"label": "reward", "points": [(1, 0.25)]}, {"label": "expected", "points": [(1, 0.5)]},
    ]  # fmt: skip
    RunFolder(root, resume=True).start("x: 1\n")
    assert not folder.paths.expected.exists()
    RunFolder(root, expected=curve, overwrite=True).start("x: 1\n")
    RunFolder(root, overwrite=True).start("x: 1\n")
    assert not folder.paths.expected.exists()
