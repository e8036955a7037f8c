"""The best evaluation of a run: kept in checkpoints and in summary.json, its checkpoint never removed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.configs import small_config
from safetensors.torch import load_file

from mm_grpo import GRPOTrainer
from mm_grpo.data.shapes import shapes_rows
from mm_grpo.rollout.evaluate import RowScores
from mm_grpo.run import evaluations
from mm_grpo.run.paths import EVALUATION, RunPaths
from mm_grpo.run.rollout_log import logged_steps
from mm_grpo.run.summary import summary_lines

ROWS = shapes_rows(split="train", size=4, seed=1, image_size=56)
HELDOUT = {"first": ROWS[:1], "second": ROWS[1:2]}
ACCURACIES = {0: 0.2, 1: 0.5, 2: 0.9, 3: 0.9, 4: 0.1, 5: 0.3}
"""Of the headline set, by step; the second set has 1.0 always."""


@pytest.fixture
def model(models: dict[str, Path]) -> Path:
    return models["qwen2_5_vl"]


def fake_scores(patch: pytest.MonkeyPatch, first: Mapping[int, float], sets: int = 1) -> None:
    """Give each evaluation of the first of so many sets its score by step, and of the others 1."""
    number = count()

    def answers(*arguments: Any, **options: Any) -> list[RowScores]:
        score = first[arguments[3]] if next(number) % sets == 0 else 1.0
        return [RowScores(0, [score], [score], {}, [1], 0, {})]

    patch.setattr(evaluations, "answer_rows", answers)


def test_the_checkpoint_of_the_best_is_kept_between_those_that_are_due(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 2 is the best, and checkpoints are due every fourth."""
    fake_scores(monkeypatch, ACCURACIES)
    summary = run(model, tmp_path / "run", 5, 4, eval={"only": ROWS[:1]})
    assert summary["best_step"] == 2
    assert checkpoint_names(tmp_path / "run") == ["step-000002", "step-000005"]


def run(model: Path, folder: Path, steps: int, save_every: int = 1, **options: Any) -> dict[str, Any]:
    run = {"max_steps": steps, "eval_every": 1, "save_every": save_every, "keep_checkpoints": 1}
    rollout = {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 3}
    run |= {"report": False, "save_model": False}
    config = small_config(model, folder, rollout=rollout, run=run)
    options = {"eval": HELDOUT, **options}
    return GRPOTrainer(config, train=ROWS, rewards=[length], **options).train()


def checkpoint_names(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "checkpoints").iterdir())


def extra_of(folder: Path, step: int) -> dict[str, Any]:
    manifest = json.loads((folder / "checkpoints" / f"step-{step:06d}" / "manifest.json").read_text())
    return dict(manifest["extra"])


def test_the_best_is_kept_over_a_resume(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_scores(monkeypatch, ACCURACIES, sets=2)
    summary = run(model, tmp_path / "run", 3)
    assert (summary["score_best"], summary["best_step"], summary["score_after"]) == (0.9, 2, 0.9)
    assert checkpoint_names(tmp_path / "run") == ["step-000002", "step-000003"]
    assert extra_of(tmp_path / "run", 3)["best"] == {"score": 0.9, "step": 2}

    run(model, tmp_path / "run", 5, resume=True)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["score_best"], summary["best_step"]) == (0.9, 2)
    assert (summary["score_before"], summary["score_after"]) == (0.2, 0.3)
    scores = {when: evaluation["score"] for when, evaluation in summary["first_set"].items()}
    assert scores == {"before": 0.2, "best": 0.9, "after": 0.3}
    assert logged_steps(RunPaths(tmp_path / "run"), EVALUATION) == [0, 2, 5]
    assert checkpoint_names(tmp_path / "run") == ["step-000002", "step-000005"]
    assert extra_of(tmp_path / "run", 5)["best"] == {"score": 0.9, "step": 2}


def test_the_saved_model_is_the_best(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collapses after step 2."""
    fake_scores(monkeypatch, {0: 0.1, 1: 0.1, 2: 0.9, 3: 0.1})
    folder = tmp_path / "run"
    run = {"max_steps": 3, "eval_every": 1, "save_every": 1, "keep_checkpoints": 1, "keep": "best"}
    config = small_config(model, folder, optim={"learning_rate": 0.1}, run={**run, "report": False})
    guard = Watch()
    trainer = GRPOTrainer(config, train=ROWS, eval=ROWS[:1], rewards=[length], callbacks=[guard])
    summary = trainer.train()
    assert summary["model"]["step"] == 2 and "step 2: the best" in summary_lines(summary)[-1]

    weights = load_file(folder / "model" / "model.safetensors")
    for step, expected in guard.weights.items():
        trainer.model.load_state_dict(expected)
        trainer.save(tmp_path / str(step))
        saved = load_file(tmp_path / str(step) / "model.safetensors")
        equal = all(torch.equal(weights[name], tensor) for name, tensor in saved.items() if name in weights)
        assert equal is (step == 2)
    assert "srcdoc" in trainer.show()._repr_html_()


def length(completion: str) -> float:
    return float(len(completion))


class Watch:
    """Keeps the weights after each step."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, Any]] = {}

    def on_step_end(self, trainer: GRPOTrainer, step: int) -> None:
        self.weights[step] = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}

    def on_train_end(self, trainer: GRPOTrainer) -> None:
        last = self.weights[max(self.weights)]
        assert all(torch.equal(last[name], tensor) for name, tensor in trainer.model.state_dict().items())
