"""Guards on the command line: exit code 3 with the message, a whole run folder, and warnings only with --smoke."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def job(job: Path) -> Path:
    """The config with a reward that is the same for every completion."""
    (job.parent / "mine.py").write_text("def mine(completion):\n    return 1.0\n")
    return job


def test_a_run_without_an_update_ends_with_3_and_leaves_its_folder(command: Any, job: Path) -> None:
    result = command("train", job)
    assert result.code == 3, result.err
    assert "stopped: guard no_update: " in result.err
    assert "Traceback" not in result.err and "done: 2 steps" not in result.out
    run = job.parent / "run"
    assert (run / "model" / "config.json").exists() and (run / "report.html").exists()
    assert json.loads((run / "summary.json").read_text())["steps"] == 2


def test_a_smoke_run_only_warns_and_leaves_nothing(
    command: Any, job: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    place = tmp_path_factory.mktemp("tmp")
    monkeypatch.setattr("tempfile.tempdir", str(place))
    (job.parent / "mine.py").write_text("def mine(completion):\n    return None\n")
    result = command("train", job, "--smoke")
    assert result.code == 0, result.err
    assert "guard no_reward: for 2 steps no completion has had a reward" in caplog.text + result.err
    assert "results are not kept; set run.dir=... to keep them" in result.out
    assert list(place.glob("mm_grpo*")) == []
    both = command("train", job, "--smoke", "--resume")
    assert both.code == 2 and "--smoke and --resume" in both.err
