"""Whole runs: the same on 1 and 2 processes, and the same when they are killed on the way and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import runs
import several
import torch
from safetensors.torch import load_file

from mm_grpo import GRPOConfig

SCRIPT = Path(runs.__file__)


def write_config(model: Path, folder: Path, **changes: dict[str, Any]) -> Path:
    shapes = {"task": "shapes", "image_size": 56, "kinds": ["colour", "shape"], "max_objects": 1}
    values: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": {
            "train": {**shapes, "split": "train", "size": 40, "seed": 1},
            "eval": {**shapes, "split": "heldout", "size": 5, "seed": 2},
        },
        "rollout": {"prompts_per_step": 5, "num_generations": 4, "max_completion_length": 6},
        # a tiny random model names no colour: length moves it
        "rewards": [{"name": "length", "max_length": 4}],
        "optim": {"learning_rate": 1e-3, "adam_epsilon": 1e-4, "updates_per_step": 2},
        "run": {"dir": str(folder), "max_steps": 5, "eval_every": 2, "report": False},
    }
    for section, fields in changes.items():
        values[section] = {**values.get(section, {}), **fields}
    file = folder.with_suffix(".yaml")
    GRPOConfig.from_dict(values).save(file)
    return file


def run(config: Path, world: int, output: Path, *arguments: object) -> None:
    codes = several.launch(SCRIPT, world, [config, *arguments], output, deadline=280)
    assert codes == [0] * world, several.outputs(output, world)


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Rows of the log without times."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if not k.startswith("time/") and k != "step_time"} for r in rows]


def rollouts_of(folder: Path) -> dict[str, str]:
    return {p.name: p.read_text() for p in sorted((folder / "rollouts").glob("*.jsonl"))}


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


@pytest.mark.long
def test_one_and_two_processes_make_the_same_run(models: dict[str, Path], tmp_path: Path) -> None:
    for world in (1, 2):
        folder = tmp_path / f"of-{world}"
        run(write_config(models["qwen2_5_vl"], folder), world, tmp_path / f"output-{world}")
    one, two = (metrics_of(tmp_path / f"of-{world}") for world in (1, 2))
    # log-probs and advantages are numbers to compare closely; the rest is the same text
    lines = [
        [json.loads(x) for x in "".join(rollouts_of(tmp_path / f"of-{w}").values()).splitlines()]
        for w in (1, 2)
    ]
    assert len(lines[0]) == 5 * 5 * 4 and lines[0] == lines[1]
    assert len({row["completion"] for row in lines[0]}) > 20 and any(row["advantage"] for row in lines[0])
    for mine, theirs in zip(one, two, strict=True):
        assert mine.keys() == theirs.keys()
        for key in ("reward", "reward_std", "num_tokens", "completions/mean_length", "eval/eval/reward"):
            assert mine.get(key) == theirs.get(key), key
        for key in ("loss", "grad_norm", "entropy", "learner/update_norm"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-4), key
    base = load_file(models["qwen2_5_vl"] / "model.safetensors")
    weights = [weights_of(tmp_path / f"of-{world}") for world in (1, 2)]
    for name, first in weights[0].items():
        distance = (weights[1][name] - first).norm() / (first - base[name]).norm().clamp(min=1e-12)
        assert distance <= 1e-3, name  # ten updates, each of which starts from the last


@pytest.mark.long
def test_a_run_that_is_killed_ten_times_is_the_run_that_was_not(
    models: dict[str, Path], tmp_path: Path
) -> None:
    every, steps = 3, 30
    kept = {"run": {"max_steps": steps, "save_every": every, "eval_every": 7, "report": False}}
    for name, kills in (("straight", ()), ("killed", (10,))):
        folder = tmp_path / name
        changes = {
            "run": {**kept["run"], "dir": str(folder)},
            "rollout": {"prompts_per_step": 3, "num_generations": 3, "max_completion_length": 6},
        }
        run(write_config(models["qwen2_5_vl"], folder, **changes), 1, tmp_path / f"output-{name}", *kills)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    kills = json.loads((killed / "kills.json").read_text())
    assert len(kills) == 10 and sum(bool(k["left"]) for k in kills) >= 2  # some in the midst of a checkpoint
    assert all(k["rows"] - k["checkpoint"] <= every for k in kills)
    assert metrics_of(killed) == metrics_of(straight) and len(metrics_of(killed)) == steps
    assert rollouts_of(killed) == rollouts_of(straight)
    for name, weight in weights_of(straight).items():
        assert torch.equal(weights_of(killed)[name], weight), name
    files = {str(p.relative_to(straight)) for p in straight.rglob("*") if p.is_file()}
    assert {str(p.relative_to(killed)) for p in killed.rglob("*") if p.is_file()} == files | {"kills.json"}


@pytest.mark.long
def test_two_processes_that_are_killed_go_on(models: dict[str, Path], tmp_path: Path) -> None:
    kept = {"max_steps": 6, "save_every": 2, "report": False, "eval_every": 0}
    for name in ("straight", "killed"):
        folder = tmp_path / name
        config = write_config(models["qwen2_5_vl"], folder, run={**kept, "dir": str(folder)})
        if name == "killed":
            killed_after(config, folder, 3, tmp_path / "output-first")
        run(config, 2, tmp_path / f"output-{name}")
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert metrics_of(killed) == metrics_of(straight) and len(metrics_of(killed)) == 6
    for name, weight in weights_of(straight).items():
        assert torch.equal(weights_of(killed)[name], weight), name


def killed_after(config: Path, folder: Path, rows: int, output: Path) -> None:
    """Start two processes and kill the second one when the log has so many rows; the first then ends too."""
    codes = several.launch(
        SCRIPT, 2, [config], output, deadline=280, kill=(1, lambda: runs.rows_of(folder) >= rows)
    )
    assert codes[1] == -9 and codes[0] != 0
    said = (output / "rank-0.txt").read_text()
    assert "lost another one while exchanging" in said or "Connection closed" in said, said[-2000:]
