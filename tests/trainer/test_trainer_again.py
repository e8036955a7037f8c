"""One config, run again: the same run; and what a resume refuses that no config shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.run_folders import metrics_of
from helpers.small_runs import HELDOUT, ROWS, config_for, vowels

from mm_grpo import GRPOTrainer
from mm_grpo.errors import ConfigError


@pytest.mark.slow
def test_adapters_start_from_the_runs_seed(model: Path, tmp_path: Path) -> None:
    def run(name: str) -> list[dict[str, Any]]:
        fields = {"max_steps": 1, "report": False, "save_model": False}
        config = config_for(model, tmp_path / name, model={"lora": {"rank": 4}}, run=fields)
        drawn = torch.get_rng_state()
        trainer = GRPOTrainer(config, train=ROWS, rewards=[vowels])
        assert torch.equal(torch.get_rng_state(), drawn)  # the caller's random numbers are left alone
        trainer.train()
        return metrics_of(tmp_path / name)

    first = run("first")
    torch.rand(7)
    assert run("again") == first


@pytest.mark.slow
def test_what_a_resume_cannot_go_on_with(model: Path, tmp_path: Path) -> None:
    def trainer(heldout: Any, resume: bool, max_steps: int, rows: Any = ROWS) -> GRPOTrainer:
        run = {"max_steps": max_steps, "save_every": 1, "report": False, "save_model": False}
        config = config_for(model, tmp_path / "r", run=run)
        return GRPOTrainer(config, train=rows, eval=heldout, rewards=[vowels], resume=resume)

    heldout = {"a": HELDOUT[:1], "b": HELDOUT[1:2]}
    trainer(heldout, False, 2).train()
    with pytest.raises(ConfigError, match=r"eval: .* was made with the sets a, b, and these are a;"):
        trainer({"a": HELDOUT[:1]}, True, 3).train()
    with pytest.raises(ConfigError, match=r"run.max_steps = 1: .* has 2 finished steps"):
        trainer(heldout, True, 1).train()
    more = [*ROWS, ROWS[0]]
    with pytest.raises(ConfigError, match=rf"^data.train: .* other rows \({len(ROWS)} then, {len(more)}"):
        trainer(heldout, True, 3, more).train()
    other = [*ROWS[:-1], dict(ROWS[-1], answer="another")]
    with pytest.raises(ConfigError, match=r"^data.train: .* other rows"):
        trainer(heldout, True, 3, other).train()
    with pytest.raises(ConfigError, match=r"^data.eval.b: .* was made with other rows"):
        trainer({"a": HELDOUT[:1], "b": HELDOUT[2:3]}, True, 3).train()
    assert trainer(heldout, True, 2).train()["steps"] == 2  # the end once more, with nothing left to do
    assert trainer(heldout, True, 3).train()["steps"] == 3
