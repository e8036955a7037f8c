"""The zoom recipe learns when and where to look."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import processes
from helpers.recipe_scripts import script

from mm_grpo.config import GRPOConfig

RECIPE = Path(__file__).parents[2] / "examples" / "zoom"
PATTERNS = script("zoom/patterns.py")
BOXES = {PATTERNS.place(cell): PATTERNS.bbox(cell) for cell in range(9)}


def run(tmp_path: Path, *overrides: str) -> tuple[dict[str, Any], Path]:
    folder = tmp_path / "run"
    program = ["-m", "mm_grpo.cli", "train", str(RECIPE / "config.yaml"), f"run.dir={folder}"]
    program += ["run.eval_every=0", "run.save_every=0", *overrides]
    code, said = processes.finished(program, tmp_path / "said.txt", deadline=900)
    assert code == 0, said
    return json.loads((folder / "summary.json").read_text()), folder


def rollouts(folder: Path, step: int) -> list[dict[str, Any]]:
    file = folder / f"rollouts/step-{step:06d}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def looks(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Of conversations the share that look at a cut, and of these the share that look into the frame."""
    calls = [(row, row["turns"][1]) for row in rows if len(row["turns"]) == 3]
    framed = [call["arguments"]["bbox"] == BOXES[row["columns"]["place"]] for row, call in calls]
    return len(calls) / len(rows), sum(framed) / len(framed)


def test_the_config_gives_the_model_a_third_of_the_picture() -> None:
    config = GRPOConfig.from_yaml(RECIPE / "config.yaml")
    assert config.data.max_pixels == 84 * 84 and config.rollout.environment == "zoom"
    train, heldout = config.data.train, config.data.eval_sets()["patterns"]
    assert isinstance(train, dict) and isinstance(heldout, dict)
    assert (train["split"], heldout["split"]) == ("train", "heldout")
    assert heldout["size"] % 45 == 0  # each pair of answer and place equally often


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_short_run_learns_where_to_look(tmp_path: Path) -> None:
    steps = 16
    optim = ("optim.lr_scheduler_type=constant", "optim.learning_rate=4e-4", "optim.warmup_steps=2")
    summary, folder = run(tmp_path, f"run.max_steps={steps}", *optim, "data.eval.patterns.size=45")
    print(summary)
    first = looks(rollouts(folder, 1))
    last = looks([row for step in (steps - 2, steps - 1, steps) for row in rollouts(folder, step)])
    assert 0.3 <= first[0] <= 0.7 and first[1] <= 0.25
    assert last[0] >= first[0] + 0.1 and last[1] >= first[1] + 0.15
    assert summary["accuracy_before"] <= 0.45
    assert summary["accuracy_after"] >= summary["accuracy_before"] + 0.15
    shown = [row for row in rollouts(folder, steps) if len(row["turns"]) == 3]
    assert all(
        (folder / "rollouts" / "images" / name).is_file()
        for row in shown
        for name in row["turns"][1]["images"]
    )
    assert all(len(row["turns"][1]["images"]) == 1 and row["turns"][1]["fault"] is None for row in shown)
    assert '"name":"zoom","arguments":{"bbox":[' in (folder / "report.html").read_text()
