"""Runs of a tiny model that cases damage, end and resume: four steps of six completions, in half a second.

`stopped(folder)` lays a run into `folder`/out that ended without a word after its third step of four, with the
checkpoints of steps 1 to 3. `resume(folder)` goes on with it and compares what it leaves with a run that was
never stopped. Runs are made once a process and copied.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from helpers.configs import merged

import robustness.run_case as by
from robustness.cases import Call

STEPS, LAST = 4, 3
SHAPES = {"task": "shapes", "image_size": 56, "kinds": ["colour"], "max_objects": 1}
RUN: Mapping[str, Any] = {
    "data": {"train": {**SHAPES, "split": "train", "size": 8, "seed": 1}},
    "rollout": {"prompts_per_step": 2, "num_generations": 3, "max_completion_length": 6},
    "rewards": [{"name": "length", "max_length": 4}],
    "optim": {"learning_rate": 1e-3, "lr_scheduler_type": "constant"},
    "run": {"dir": "out", "max_steps": STEPS, "save_every": 1, "keep_checkpoints": 3, "report": False},
}
_MADE = tempfile.TemporaryDirectory(prefix="mm_grpo_robustness_")


def write_config(folder: Path, **changes: Any) -> Path:
    """config.yaml in `folder`, whose run goes to `folder`/out."""
    model = os.path.realpath(folder / "MODEL")
    path = folder / "config.yaml"
    path.write_text(json.dumps(merged(merged(RUN, {"model": {"path": model}}), changes)))
    return path


@cache
def _straight(model: Path, changes: str) -> Path:
    """The folder of a run that was never stopped, with all of its checkpoints."""
    folder = Path(tempfile.mkdtemp(dir=_MADE.name))
    (folder / "MODEL").symlink_to(model)
    config = write_config(folder, **merged(json.loads(changes), {"run": {"keep_checkpoints": STEPS}}))
    with by.inside(folder):
        by.command("train", config)
    return folder / "out"


def straight(folder: Path, **changes: Any) -> Path:
    return _straight(Path(os.path.realpath(folder / "MODEL")), json.dumps(changes))


def stopped(folder: Path, **changes: Any) -> Path:
    """Lay the run that ended after step LAST into `folder`, with its config; returns the run's folder."""
    write_config(folder, **changes)
    out = folder / "out"
    shutil.copytree(straight(folder, **changes), out)
    for left in (out / "model", out / "checkpoints" / f"step-{STEPS:06d}"):
        shutil.rmtree(left)
    for name in ("summary.json", f"rollouts/step-{STEPS:06d}.jsonl"):
        (out / name).unlink()
    rows = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(rows[:LAST]))
    return out


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """Rows of the log without times."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "step_time"))} for row in rows]


def resume(folder: Path, *overrides: str, straight_run: Path | None) -> None:
    """`mm-grpo train --resume`; AssertionError when it is done and did not do what `straight_run` did."""
    by.command("train", folder / "config.yaml", "--resume", *overrides)
    assert straight_run is None or metrics_of(folder / "out") == metrics_of(straight_run)
    assert (folder / "out" / "summary.json").is_file() and (folder / "out" / "model").is_dir()
    assert not list((folder / "out" / "checkpoints").glob(".*"))


def resumed(
    damage: Callable[[Path], Any],
    *overrides: str,
    base: Mapping[str, Any] | None = None,
    same: bool = True,
) -> Callable[[Path], Call]:
    """Resume the stopped run after `damage` was done to its folder; `same` numbers are to come out."""

    def make(folder: Path) -> Call:
        changes = dict(base or {})
        with by.quiet():
            damage(stopped(folder, **changes))
            other = straight(folder, **changes) if same else None
        return lambda: resume(folder, *overrides, straight_run=other)

    return make
