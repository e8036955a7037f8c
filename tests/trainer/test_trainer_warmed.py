"""Runs that begin with a warmed model: they measure the blind control by themselves, resumed too."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.small_runs import HELDOUT, ROWS, config_for, vowels

from mm_grpo import GRPOTrainer
from mm_grpo.trained.warm_mark import write_mark


@pytest.fixture
def warmed(model: Path, tmp_path: Path) -> Path:
    folder = shutil.copytree(model, tmp_path / "warmed")
    write_mark(folder, config_for(model), base=str(model), answer="answer", steps=3, nll=0.5)
    return folder


def trainer(
    path: Path, folder: Path, heldout: Any = HELDOUT, resume: bool = False, **run: Any
) -> GRPOTrainer:
    run = {"max_steps": 2, "save_every": 1, "report": False, "save_model": False, **run}
    rollout = {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 4}
    config = config_for(path, folder, run=run, rollout=rollout)
    return GRPOTrainer(config, train=ROWS, eval=heldout, rewards=[vowels], resume=resume)


@pytest.mark.slow
def test_a_warmed_model_has_the_blind_control_over_a_resume_too(warmed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = trainer(warmed, run).train()["first_set"]
    assert [first[when]["blind"]["kind"] for when in ("before", "after")] == ["shuffled", "shuffled"]
    assert yaml.safe_load((run / "config.yaml").read_text())["run"]["eval_blind"] == "shuffled"
    resumed = trainer(warmed, run, resume=True, max_steps=3).train()
    assert resumed["steps"] == 3 and resumed["first_set"]["before"] == first["before"]
    assert resumed["first_set"]["after"]["blind"]["rows"] == 3


@pytest.mark.parametrize("eval_blind", [None, "removed"])
def test_the_config_decides_where_it_does(
    eval_blind: str | None, model: Path, warmed: Path, tmp_path: Path
) -> None:
    """Without a mark there is no control, and a control that the config asks for stays."""
    path = model if eval_blind is None else warmed
    made = trainer(path, tmp_path / "run", eval_blind=eval_blind)
    made.close()
    assert made.config.run.eval_blind == eval_blind
    assert len(made.evaluations.controls) == (0 if eval_blind is None else 1)


@pytest.mark.parametrize(("heldout", "kind"), [(HELDOUT, "shuffled"), (None, None), ([HELDOUT[0]] * 2, None)])
def test_a_warmed_model_has_it_where_images_can_be_exchanged(
    heldout: Any, kind: str | None, warmed: Path, tmp_path: Path
) -> None:
    made = trainer(warmed, tmp_path / "run", heldout)
    made.close()
    assert made.config.run.eval_blind == kind and len(made.evaluations.controls) == (0 if kind is None else 1)
