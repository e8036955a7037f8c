"""A disk that fills up during a run: one message, the last good checkpoint whole, and the same run once there is room.

The limit on the size of a file stands for the disk; the run's own reward sets it when the first checkpoint is there.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import processes
from helpers.run_folders import metrics_of, rollouts_of, weights_of, write_config

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


def train(
    config: Path, folder: Path, *arguments: str, disk: str = "large", world: int = 1
) -> tuple[list[int], str]:
    """Exit codes and outputs of `mm-grpo train CONFIG` in so many ranks."""
    output = config.parent / f"output-{len(list(config.parent.iterdir()))}"
    command, settings = ("-m", "mm_grpo.cli", "train"), {"RUN_DIR": str(folder), "DISK": disk}
    codes = processes.launch(command, world, [config, *arguments], output, env=settings)
    return codes, processes.outputs(output, world)


@pytest.mark.long
def test_a_disk_that_fills_up(models: dict[str, Path], tmp_path: Path) -> None:
    world = 2
    (tmp_path / "mine.py").write_text(REWARD.format(limit=LIMIT))
    configs = {}
    for name in ("straight", "stopped"):
        run = {"dir": str(tmp_path / name), "max_steps": 6, "save_every": 2, "eval_every": 0, "report": False}
        rewards = [f"{tmp_path / 'mine.py'}:length"]
        configs[name] = write_config(models["qwen2_5_vl"], tmp_path / name, run=run, rewards=rewards)
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    codes, said = train(configs["straight"], straight, world=world)
    assert codes == [0] * world, said

    codes, said = train(configs["stopped"], stopped, disk="small", world=world)
    assert codes == [2] * world, said
    assert said.count("error: ") == 1 and "Traceback" not in said, said
    assert (
        f"error: run.dir = '{stopped}': a checkpoint cannot be written (File too large); the last good one is "
        "step-000002. Make room, or lower run.keep_checkpoints, and resume" in said
    ), said
    good = stopped / "checkpoints" / "step-000002"
    assert [p.name for p in (stopped / "checkpoints").iterdir()] == [good.name]
    manifest = json.loads((good / "manifest.json").read_text())
    assert len(manifest["files"]) == world
    assert all(mark_of(good / mark["name"]).as_dict() == mark for mark in manifest["files"])
    assert min(mark["bytes"] for mark in manifest["files"]) > LIMIT
    steps = [row["step"] for row in metrics_of(stopped)]
    assert steps in ([*range(5)], [*range(6)], [*range(7)])  # a thread met the full disk after step 4
    assert not (stopped / "model").exists()

    codes, said = train(configs["stopped"], stopped, "--resume", world=world)
    assert codes == [0] * world, said
    assert metrics_of(stopped) == metrics_of(straight) and rollouts_of(stopped) == rollouts_of(straight)
    for name, weight in weights_of(straight).items():
        assert torch.equal(weights_of(stopped)[name], weight), name
