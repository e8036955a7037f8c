"""A disk that fills up during a run: one message, the last checkpoint whole, and a run that goes on once there is room.

The limit on the size of a file stands for the disk; the run's own reward sets it when the first checkpoint is there.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import processes
from helpers.run_folders import metrics_of, write_config

from mm_grpo.learner.state import mark_of

LIMIT = 300_000
"""Bytes: more than a log or a picture of these runs, less than a checkpoint."""
REWARD = """
import os, pathlib, resource

def length(completion):
    folder = pathlib.Path(os.environ["RUN_DIR"], "checkpoints", "step-000002")
    if os.environ.get("DISK") == "small" and folder.exists():
        resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.RLIM_INFINITY))
    return len(completion)
"""


@pytest.mark.long
def test_a_disk_that_fills_up(models: dict[str, Path], tmp_path: Path) -> None:
    world, folder = 2, tmp_path / "run"
    (tmp_path / "mine.py").write_text(REWARD.format(limit=LIMIT))
    values = {"dir": str(folder), "max_steps": 5, "save_every": 2, "eval_every": 0, "report": False}
    rewards = [f"{tmp_path / 'mine.py'}:length"]
    config = write_config(models["qwen2_5_vl"], folder, run=values, rewards=rewards)

    def train(disk: str) -> tuple[list[int], str]:
        """Exit codes and outputs of the run in so many ranks."""
        command, output = ("-m", "mm_grpo.cli", "train"), tmp_path / f"output-{disk}"
        env = {"RUN_DIR": str(folder), "DISK": disk}
        codes = processes.launch(command, world, [config, "--resume"], output, env=env)
        return codes, processes.outputs(output, world)

    codes, said = train("small")
    assert codes == [2] * world, said
    assert said.count("error: ") == 1 and "Traceback" not in said, said
    assert f"run.dir = '{folder}'" in said and "the last good one is step-000002" in said, said
    good = folder / "checkpoints" / "step-000002"
    assert [p.name for p in (folder / "checkpoints").iterdir()] == [good.name]
    manifest = json.loads((good / "manifest.json").read_text())
    assert len(manifest["files"]) == world
    assert all(mark_of(good / mark["name"]).as_dict() == mark for mark in manifest["files"])
    assert min(mark["bytes"] for mark in manifest["files"]) > LIMIT
    steps = [row["step"] for row in metrics_of(folder)]
    assert steps == [*range(5)]
    assert not (folder / "model").exists()
    codes, said = train("large")
    assert codes == [0] * world, said
    assert [row["step"] for row in metrics_of(folder)] == [*range(6)]
    assert (folder / "model").exists()
