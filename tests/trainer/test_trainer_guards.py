"""Dead signals and rates that blow up through the whole trainer, and a healthy run without either."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.small_runs import ROWS, config_for, rows_of, vowels

from mm_grpo import GRPOTrainer
from mm_grpo.errors import GuardStop

STEPS = 12


def trainer_for(path: Path, folder: Path, reward: Any, guards: Any = None, **changes: Any) -> GRPOTrainer:
    run = {"max_steps": STEPS, "report": False, "guards": guards or {}, **changes.pop("run", {})}
    return GRPOTrainer(config_for(path, folder, run=run, **changes), train=ROWS, rewards=[reward])


def nothing(completion: str) -> None:
    return None


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.message.startswith("guard ")]


@pytest.mark.slow
def test_a_healthy_run_raises_no_alarm(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    changes: dict[str, Any] = {"algorithm": {"beta": 0.1}, "run": {"max_steps": 6}}
    trainer_for(model, tmp_path / "r", vowels, **changes).train()
    assert warnings_of(caplog) == []
    rows = rows_of(tmp_path / "r")
    assert len(rows) == 6 and all(row["kl"] > 0 for row in rows[1:])
    assert all(row["advantages/frac_zero"] < 1 and row["frac_reward_none"] == 0 for row in rows)
    assert all(row["reward_min"] < row["reward"] < row["reward_max"] for row in rows)
    assert [row["step"] for row in rows if "images/logp_change" in row] == [1]
    assert rows[0]["images/logp_change"] > 0
    # of a random model, every token is nearly as likely as any other
    assert all(-10 < row["completions/mean_logprob"] < -1 for row in rows)


@pytest.mark.field_bug("blind-on-both-sides")
def test_images_that_do_not_reach_the_text_stop_the_first_step(model: Path, tmp_path: Path) -> None:
    trainer = trainer_for(model, tmp_path / "r", vowels)
    score = trainer.learner.score

    def blind(prompt: Any, *args: Any, **options: Any) -> Any:
        vision = {k: t * 0 if t.is_floating_point() else t for k, t in prompt.vision.items()}
        return score(replace(prompt, vision=vision), *args, **options)

    trainer.learner.score = blind  # type: ignore[method-assign]
    trainer.config.run.guards["logp_gap"] = "off"  # the engine still sees
    with pytest.raises(GuardStop, match=r"guard unread_images: .* a completion of train:\d"):
        trainer.train()


@pytest.mark.slow
def test_guards_go_on_counting_when_a_run_is_resumed(model: Path, tmp_path: Path) -> None:
    def trainer(max_steps: int, resume: bool) -> GRPOTrainer:
        run = {"max_steps": max_steps, "save_every": 1, "report": False, "guards": {}}
        config = config_for(model, tmp_path / "r", run=run, algorithm={"entropy_coef": 0.01})
        return GRPOTrainer(config, train=ROWS, rewards=[nothing], resume=resume)

    trainer(6, False).train()
    with pytest.raises(GuardStop, match="guard no_reward: for 10 steps"):
        trainer(12, True).train()
    assert len(rows_of(tmp_path / "r")) == 10


OFF = {"update_happens": "off", "logp_gap": "off"}


@pytest.mark.parametrize(
    ("rate", "dtype", "guards"),
    [
        (1e3, "bfloat16", {}),  # every token has probability 1
        (1e15, "float32", OFF),  # logits are NaN, and the engine is to sample from them
    ],
)
@pytest.mark.field_bug("nan-loss")
def test_a_rate_that_is_far_too_large_stops_the_run_with_one_message(
    rate: float, dtype: str, guards: dict[str, str], models: dict[str, Path], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"model": {"dtype": dtype}, "run": {"max_steps": 5, "guards": guards}}
    config = config_for(models["qwen2_5_vl"], tmp_path / "run", optim={"learning_rate": rate}, **settings)
    with pytest.raises(GuardStop, match=r"lower optim\.learning_rate"):
        GRPOTrainer(config, train=ROWS, rewards=[vowels]).train()
