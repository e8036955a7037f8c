"""Where each file of a run is: the names in a run folder, and nothing that writes them."""

from __future__ import annotations

import glob
import re
import time
from pathlib import Path

from mm_grpo.errors import ConfigError
from mm_grpo.files import RUN_MARK, expand_glob

STEP_NAME = re.compile(r"step-(\d{6,})")
"""Of a checkpoint."""
ROLLOUT_NAME = re.compile(r"(eval-)?step-(\d{6,})\.jsonl")
IMAGE_NAME = re.compile(r"[0-9a-f]{32}\.png")
REPORT_EVERY = 10
"""Steps from one report.html, and one table of a tracker, to the next."""


TIME = "{time}"
"""In `run.dir` the date and time at which a run starts."""


def dated(folder: str, *, newest: bool = False) -> str:
    """`folder` with the present second in place of TIME, or that of the `newest` run there is: ConfigError without one.

    >>> dated("runs/mine")
    'runs/mine'
    """
    if TIME not in folder or not newest:
        return folder.replace(TIME, time.strftime("%Y%m%d-%H%M%S"))
    digits = "[0-9]" * 8 + "-" + "[0-9]" * 6
    found = [
        each
        for each in expand_glob(glob.escape(folder).replace(TIME, digits))
        if (Path(each) / RUN_MARK).exists()
    ]
    if not found:
        raise ConfigError(f"run.dir = '{folder}': there is no such run to resume; leave --resume out")
    return found[-1]


class RunPaths:
    """The paths of the run in the folder `root`, whether they exist or not."""

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

    def rollout_file(self, step: int) -> Path:
        return self.rollouts / f"step-{step:06d}.jsonl"

    def evaluation_file(self, step: int) -> Path:
        return self.rollouts / f"eval-step-{step:06d}.jsonl"


def left_in(folder: Path) -> list[Path]:
    """What killed processes left in `folder`: checkpoints that they were writing (.new) or removing (.old)."""
    return [path for path in folder.glob(".step-*") if path.suffix in (".new", ".old")]
