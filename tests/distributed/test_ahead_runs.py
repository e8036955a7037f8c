"""Steps that are sampled ahead in two processes: the same run as in one, also after both were killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ahead_runs
import pytest
from helpers import processes
from helpers.run_folders import SHAPES, assert_the_same_run, rollouts_of, write_config

SCRIPT = Path(ahead_runs.__file__)
RUN = {"save_every": 1, "keep_checkpoints": 9, "sight_every": 0}


def run(config: Path, world: int, output: Path, *arguments: object, ends: int = 0) -> None:
    codes = processes.launch(SCRIPT, world, [config, *arguments], output, deadline=120)
    assert codes == [ends] * world, processes.outputs(output, world)


@pytest.mark.long
def test_two_processes_make_the_run_of_one_which_goes_on(models: dict[str, Path], tmp_path: Path) -> None:
    rollout = {"max_staleness": 2, "max_attempts": 2, "num_generations": 2}
    data = {"pass_rate": 0.5, "train": {**SHAPES, "split": "train", "size": 8, "seed": 1}}
    changes: dict[str, Any] = {"rollout": rollout, "data": data, "run": RUN}
    one = write_config(models["qwen2_5_vl"], tmp_path / "one", **changes)
    two = write_config(models["qwen2_5_vl"], tmp_path / "two", **changes)
    run(one, 1, tmp_path / "of-one")
    run(two, 2, tmp_path / "killed", 3, ends=9)
    run(two, 1, tmp_path / "to-the-end")
    assert_the_same_run(tmp_path / "two", tmp_path / "one", 5)
    rows = [json.loads(x) for x in "".join(rollouts_of(tmp_path / "two").values()).splitlines()]
    versions = {row["step"]: row["weight_versions"] for row in rows}
    assert versions == {1: [[0, 0]], 2: [[0, 0]], 3: [[0, 0]], 4: [[0, 1]], 5: [[0, 2]]}
    assert any(row["attempt"] for row in rows)
