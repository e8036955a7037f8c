"""Runs that are killed at random moments, in one and in two processes, are the run that was not killed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from helpers.run_folders import metrics_of, rollouts_of, weights_of, write_config
from killed import kill_until_done


@pytest.mark.long
@pytest.mark.parametrize(("world", "kills"), [(1, 4), (2, 2)])
def test_a_run_that_is_killed_at_random_moments(
    world: int, kills: int, models: dict[str, Path], tmp_path: Path
) -> None:
    compare(world, kills, models["qwen2_5_vl"], tmp_path, steps=24)


def compare(
    world: int, kills: int, model: Path, place: Path, steps: int, seed: int = 1
) -> list[dict[str, object]]:
    """Kill a run `kills` times; assert that it is the run that was not killed, and that nothing else was touched."""
    run = {"max_steps": steps, "save_every": 3, "eval_every": 7, "report": False}
    rollout = {"prompts_per_step": 3, "num_generations": 3, "max_completion_length": 6}
    configs = {}
    for name in ("straight", "killed"):
        folder = place / name
        configs[name] = write_config(model, folder, run={**run, "dir": str(folder)}, rollout=rollout)
    kill_until_done(configs["straight"], world, 0, seed)
    notes = place / "killed" / "notes" / "mine.txt"
    notes.parent.mkdir(parents=True)
    notes.write_text("mine")
    base = digests(model)
    log = kill_until_done(configs["killed"], world, kills, seed)
    straight, killed = place / "straight", place / "killed"
    assert len(log) == kills and all(entry["ended"] is None for entry in log), log
    assert [entry["orphans"] for entry in log] == [[]] * kills, log
    assert metrics_of(killed) == metrics_of(straight) and rollouts_of(killed) == rollouts_of(straight)
    want = weights_of(straight)
    assert all(torch.equal(weight, want[name]) for name, weight in weights_of(killed).items())
    files = {str(p.relative_to(straight)) for p in straight.rglob("*") if p.is_file()}
    assert {str(p.relative_to(killed)) for p in killed.rglob("*") if p.is_file()} == files | {
        "notes/mine.txt"
    }
    assert notes.read_text() == "mine" and digests(model) == base
    return log


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}
