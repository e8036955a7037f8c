"""Paths of the files in a run folder."""

from __future__ import annotations

import glob
import re
import time
from pathlib import Path

from mm_grpo.errors import ConfigError
from mm_grpo.files import RUN_MARK, expand_glob

STEP_NAME = re.compile(r"step-(\d{6,})")
"""Name of a checkpoint's folder."""
ROLLOUT_NAME = re.compile(r"(eval-|)step-(\d{6,})\.jsonl")
EVALUATION = "eval-"
"""Beginning of the names of rollout files of evaluations; others have none."""
IMAGE_NAME = re.compile(r"[0-9a-f]{32}\.(?:png|jpeg)")
REPORT_EVERY = 10
"""Steps between two writes of report.html, and between two tables of a tracker."""
TIME = "{time}"
"""Placeholder in `run.dir` for the date and time at which a run starts."""


def dated(folder: str, *, newest: bool = False) -> str:
    """Replace TIME in `folder` by the current second, or with `newest` by the newest run's.

    Raises ConfigError if `newest` and there is no run.

    >>> dated("runs/mine")
    'runs/mine'
    """
    if TIME not in folder or not newest:
        return folder.replace(TIME, time.strftime("%Y%m%d-%H%M%S"))
    pattern = glob.escape(folder).replace(TIME, "[0-9]" * 8 + "-" + "[0-9]" * 6)
    runs = [path for path in expand_glob(pattern) if (Path(path) / RUN_MARK).exists()]
    if not runs:
        raise ConfigError(f"run.dir = '{folder}': there is no such run to resume; leave --resume out")
    return runs[-1]


class RunPaths:
    """Paths of the run in the folder `root`. The files need not exist."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.yaml"
        self.expected = root / "expected_curve.json"
        self.environment = root / "environment.json"
        self.metrics = root / "metrics.jsonl"
        self.events = root / "events.jsonl"
        self.summary = root / "summary.json"
        self.error = root / "error.txt"
        self.report = root / "report.html"
        self.rollouts = root / "rollouts"
        self.images = self.rollouts / "images"
        self.checkpoints = root / "checkpoints"
        self.model = root / "model"
        self.adapter = root / "adapter"
        self.tensorboard = root / "tensorboard"

    def rollout_file(self, step: int, kind: str = "") -> Path:
        """Return the file of a step's rollouts, or with EVALUATION of the evaluation after it."""
        return self.rollouts / f"{kind}step-{step:06d}.jsonl"


def left_in(folder: Path) -> list[Path]:
    """Return checkpoints in `folder` that killed processes were writing (.new) or removing (.old)."""
    return [path for path in folder.glob(".step-*") if path.suffix in (".new", ".old")]
