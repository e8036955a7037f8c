"""The folder of a case: its config, its files, its model, and the run of a tiny model that it damages or goes on with.

A run has four steps of six completions, in half a second; runs are made once a process and copied.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from helpers.configs import merged
from PIL import Image

from robustness.case import Case

STEPS, LAST = 4, 3
ROW = {"prompt": "?", "image": "a.png", "answer": "red"}
ROWS: Mapping[str, Any] = {
    "model": {"path": "MODEL"},
    "data": {"train": "rows.jsonl"},
    "rewards": ["exact_match"],
    "run": {"dir": "out", "max_steps": 1},
}
SHAPES = {"task": "shapes", "image_size": 56, "kinds": ["colour"], "max_objects": 1}
RUN: Mapping[str, Any] = {
    "model": {"path": "MODEL"},
    "data": {"train": {**SHAPES, "split": "train", "size": 8, "seed": 1}},
    "rollout": {"prompts_per_step": 2, "num_generations": 3, "max_completion_length": 6},
    "rewards": [{"name": "length", "max_length": 4}],
    "optim": {"learning_rate": 1e-3, "lr_scheduler_type": "constant"},
    "run": {"dir": "out", "max_steps": STEPS, "save_every": 1, "keep_checkpoints": 3, "report": False},
}
REWARD = "def f(completion):\n    return float(len(completion) % 3)\n"
_MADE = tempfile.TemporaryDirectory(prefix="mm_grpo_robustness_")


def prepare(case: Case, folder: Path) -> set[str]:
    """Fill the folder; returns the names of the user's files in it."""
    Image.new("RGB", (56, 56)).save(folder / "a.png")
    files = {"rows.jsonl": json.dumps(ROW) + "\n", **case.files}
    if isinstance(case.config, str | bytes):
        files["config.yaml"] = case.config
    else:
        files["config.yaml"] = json.dumps(merged(RUN if trains(case) else ROWS, case.config))
    if case.run:
        lay(folder, merged(RUN, case.config), ended=case.run == "ended")
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            path.unlink(missing_ok=True)
            content(path)
        else:
            path.write_bytes(
                content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
            )
    if case.model is not None:
        shutil.copytree(folder / "MODEL", folder / "m", copy_function=shutil.copyfile)
        case.model(folder / "m")
    case.damage(folder / "out")
    return {*files, "a.png"}


def trains(case: Case) -> bool:
    """Whether the base of its config is a run of rendered shapes; else it is the one row of rows.jsonl."""
    return not case.command.startswith("check") and "rows.jsonl" not in case.files


@cache
def _straight(model: Path, config: str) -> Path:
    """The folder of a run that was never stopped, with all of its checkpoints."""
    from robustness.running import command, inside

    folder = Path(tempfile.mkdtemp(dir=_MADE.name))
    (folder / "MODEL").symlink_to(model)
    (folder / "r.py").write_text(REWARD)
    (folder / "config.yaml").write_text(
        json.dumps(merged(json.loads(config), {"run": {"keep_checkpoints": STEPS}}))
    )
    with inside(folder):
        command("train", "config.yaml")
    return folder / "out"


def straight(folder: Path, config: Mapping[str, Any]) -> Path:
    return _straight(Path(os.path.realpath(folder / "MODEL")), json.dumps(config))


def lay(folder: Path, config: Mapping[str, Any], *, ended: bool = False) -> None:
    """Lay a run into `folder`/out; but for `ended` it stopped without a word after its third step of four."""
    out = folder / "out"
    shutil.copytree(straight(folder, config), out)
    if ended:
        return
    for left in (out / "model", out / "checkpoints" / f"step-{STEPS:06d}"):
        shutil.rmtree(left)
    for name in ("summary.json", f"rollouts/step-{STEPS:06d}.jsonl"):
        (out / name).unlink()
    rows = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(rows[:LAST]))


def complete(folder: Path) -> None:
    """AssertionError unless out/ holds a run of all steps, with the numbers of one that was never stopped."""
    from helpers.run_folders import metrics_of

    whole(folder)
    other = straight(folder, json.loads((folder / "config.yaml").read_text()))
    assert metrics_of(folder / "out") == metrics_of(other)


def whole(folder: Path) -> None:
    """AssertionError unless out/ holds a summary and a model, and no half of a checkpoint."""
    assert (folder / "out" / "summary.json").is_file() and (folder / "out" / "model").is_dir()
    assert not list((folder / "out" / "checkpoints").glob(".*"))
