"""Whole runs with a real vLLM in each process: two processes make the run of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import runs
from helpers import forkserver, processes
from helpers.run_folders import assert_the_same_run, metrics_of, rollouts_of, write_config

STEPS = 2


@pytest.mark.long
def test_two_processes_with_vllm_make_the_run_of_one(models: dict[str, Path], tmp_path: Path) -> None:
    for world in (1, 2):
        folder = tmp_path / f"of-{world}"
        run = {"dir": str(folder), "max_steps": STEPS, "eval_every": 0, "report": False}
        config = write_config(models["qwen2_5_vl"], folder, rollout={"engine": "vllm"}, run=run)
        output, script = tmp_path / f"output-{world}", Path(runs.__file__)
        codes = processes.launch(script, world, [config], output, deadline=140, preload=forkserver.VLLM)
        assert codes == [0] * world, processes.outputs(output, world)
    one, two = tmp_path / "of-1", tmp_path / "of-2"
    assert_the_same_run(two, one, STEPS)
    assert '"seed"' in rollouts_of(two)["step-000002.jsonl"]
    steps = [[row for row in metrics_of(folder) if row["step"]] for folder in (one, two)]
    assert len(steps[0]) == STEPS
    for theirs, mine in zip(*steps, strict=True):
        assert mine["sync/bytes"] == theirs["sync/bytes"] > 0 and mine["sync/logp_gap"] < 1e-4
