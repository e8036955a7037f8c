"""Runs that are killed at random moments, in one and in two processes, are the run that was not killed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import runs
import torch
from helpers.run_folders import metrics_of, rollouts_of, weights_of, write_config
from killed import kill_until_done


@pytest.mark.long
@pytest.mark.parametrize(("world", "kills"), [(1, 2), (2, 1)])
def test_a_run_that_is_killed_at_random_moments(
    world: int, kills: int, models: dict[str, Path], tmp_path: Path
) -> None:
    """Of a mixture, whose places in the sources are kept too."""
    model, straight, killed = models["qwen2_5_vl"], tmp_path / "straight", tmp_path / "killed"
    values = {"max_steps": 12, "save_every": 3, "eval_every": 5, "report": False}
    one, other = (write_config(model, folder, **runs.MIXTURE, run=values) for folder in (straight, killed))
    kill_until_done(one, world, kills=0, seed=1)
    notes = killed / "notes" / "mine.txt"
    notes.parent.mkdir(parents=True)
    notes.write_text("mine")
    base = digests(model)
    log = kill_until_done(other, world, kills, seed=1)
    assert log == [(None, [])] * kills, log  # each was killed before its end, and left no process
    assert metrics_of(killed) == metrics_of(straight) and len(metrics_of(killed)) == 13
    assert rollouts_of(killed) == rollouts_of(straight)
    want = weights_of(straight)
    assert all(torch.equal(weight, want[name]) for name, weight in weights_of(killed).items())
    files = {str(p.relative_to(straight)) for p in straight.rglob("*") if p.is_file()}
    left = {str(p.relative_to(killed)) for p in killed.rglob("*") if p.is_file()}
    assert left == files | {"notes/mine.txt"} and notes.read_text() == "mine"
    assert digests(model) == base


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}
