"""Where each file of a run is: the names in a run folder, and nothing that writes them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

STEP_NAME = re.compile(r"step-(\d{6,})")
EVALUATION_NAME = re.compile(r"eval-step-(\d{6,})")
IMAGE_NAME = re.compile(r"[0-9a-f]{32}\.png")
REPORT_EVERY = 10
"""Steps from one report.html, and one table of a tracker, to the next."""


@dataclass(frozen=True)
class RunPaths:
    """The paths of the run in the folder `root`, whether they exist or not."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def expected(self) -> Path:
        return self.root / "expected_curve.json"

    @property
    def environment(self) -> Path:
        return self.root / "environment.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def error(self) -> Path:
        return self.root / "error.txt"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def rollouts(self) -> Path:
        return self.root / "rollouts"

    @property
    def images(self) -> Path:
        return self.rollouts / "images"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def adapter(self) -> Path:
        return self.root / "adapter"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def trace(self) -> Path:
        return self.root / "trace.json"

    @property
    def torch_trace(self) -> Path:
        return self.root / "torch_trace.json"

    def rollout_file(self, step: int) -> Path:
        return self.rollouts / f"step-{step:06d}.jsonl"

    def evaluation_file(self, step: int) -> Path:
        return self.rollouts / f"eval-step-{step:06d}.jsonl"


def left_in(folder: Path) -> list[Path]:
    """What killed processes left in `folder`: checkpoints that they were writing (.new) or removing (.old)."""
    return [path for path in folder.glob(".step-*") if path.suffix in (".new", ".old")]
