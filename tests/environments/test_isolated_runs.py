"""Whole runs with tools in worker processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.scripted import ScriptedEngine, call
from helpers.sessions import died, workers
from helpers.small_runs import config_for, rollouts_of, rows_of
from tools_to_isolate import World

from mm_grpo import GRPOTrainer
from mm_grpo.data.shapes import shapes_rows
from mm_grpo.environments.workers import WorkerHost

ROWS = [
    {**row, "start": n} for n, row in enumerate(shapes_rows(split="train", size=6, seed=1, image_size=56))
]


def ids(completion: str, completion_ids: list[int]) -> float:
    return float(sum(completion_ids) % 7)


def run(path: Path, folder: Path, how: str, **rollout: Any) -> tuple[Any, list[int]]:
    """A run of a step whose model counts in an environment, and in one of three conversations does `how`. The
    trainer, and the processes that its tools ran in."""
    values = {"max_completion_length": 200, "max_turns": 3, "environment_workers": 2, **rollout}
    config = config_for(path, folder, rollout=values, run={"max_steps": 1})
    trainer: Any = GRPOTrainer(config, train=ROWS, rewards=[ids], environment_factory=World)
    acts = ("count", how, "count")
    trainer.sampler.engine = ScriptedEngine(
        trainer.sampler.engine, lambda seed, turn: "done" if turn == 2 else call("act", how=acts[seed % 3])
    )
    seen: set[int] = set()
    host = trainer.toolbox.host
    if isinstance(host, WorkerHost):
        take = host._take
        host._take = lambda outcome: (seen.update(workers()), take(outcome))  # type: ignore[method-assign]
    trainer.train()
    return trainer, sorted(seen)


@pytest.mark.long
def test_a_run_is_the_same_in_and_out_of_the_process(models: dict[str, Path], tmp_path: Path) -> None:
    runs = []
    for count in (0, 2):
        folder = tmp_path / str(count)
        _, workers = run(models["qwen2_5_vl"], folder, "raise", environment_workers=count, tool_timeout=30)
        assert len(workers) == count and died(workers)
        metrics = [
            {k: v for k, v in row.items() if not k.startswith("time") and k != "step_time"}
            for row in rows_of(folder)
        ]
        runs.append((metrics, [rollouts_of(folder, step) for step in (1,)]))
    (inside, logged), (outside, logged_outside) = runs
    assert inside == outside and logged == logged_outside
    assert [row["tools/failures/raised"] for row in inside] == [8] and inside[0]["tools/masked"] == 0
