"""The demo learns, on three seeds, and by looking: whole runs as `make demo` starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("seed", "engine"), [(0, "transformers"), (1, "transformers"), (2, "transformers"), (0, "vllm")]
)
def test_accuracy_rises_from_chance_and_falls_back_when_images_are_shuffled(
    seed: int, engine: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "mm_grpo.cli", "train", "examples/shapes/config.yaml"]
    command += [f"run.dir={tmp_path}/run", f"run.seed={seed}", f"rollout.engine={engine}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=390, check=False
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    print(f"seed {seed}: {summary}")
    assert summary["accuracy_before"] <= 0.45
    assert summary["accuracy_after"] >= 0.90
    assert summary["seconds"] <= 300
    assert summary["eval"]["images_shuffled"]["after"] <= 0.40
    assert 0 <= summary["eval"]["count"]["after"] <= 1  # reported beside, not trained on
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
