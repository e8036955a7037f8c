"""Tests that need a GPU. Where there is none they are skipped, and the run's summary says so."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.skip(reason="no GPU here: tests/gpu was not run"))


@pytest.fixture
def run_python() -> Callable[..., None]:
    """Runs `python ARGUMENTS` as the command mm-grpo does, in a process that is no fork of the CPU's server."""
    paths = os.pathsep.join(str(ROOT / folder) for folder in (".", "tests", "tests/gpu"))
    env = {**os.environ, "PYTHONPATH": paths, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

    def run(*arguments: object) -> None:
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]

    return run
