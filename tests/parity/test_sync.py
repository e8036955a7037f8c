"""The run's own checks of its engine: each fault stops the run at the step where it happens."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.fake_engines import use_engine
from helpers.small_runs import ROWS, config_for, rows_of, vowels

from mm_grpo import GRPOTrainer
from mm_grpo.errors import GuardStop


def trainer_for(models: dict[str, Path], folder: Path, **run: Any) -> GRPOTrainer:
    config = config_for(
        models["qwen2_5_vl"],
        folder,
        model={"dtype": "float32"},
        rollout={"prompts_per_step": 2, "num_generations": 4, "max_completion_length": 10},
        run={"max_steps": 2, "report": False, **run},
    )
    return GRPOTrainer(config, train=ROWS, rewards=[vowels])


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    return partial(use_engine, monkeypatch)


def test_remote_engines_train_as_embedded_ones(models: dict[str, Path], tmp_path: Path, engine: Any) -> None:
    trainer_for(models, tmp_path / "shared").train()
    engine()
    trainer = trainer_for(models, tmp_path / "own")
    trainer.train()
    size = sum(4 * t.numel() for _, t in trainer.learner.named_tensors())
    shared, own = rows_of(tmp_path / "shared"), rows_of(tmp_path / "own")
    assert len(shared) == len(own) == 2
    for one, other in zip(shared, own, strict=True):
        assert (one["sync/bytes"], other["sync/bytes"]) == (0, size)
        assert 0 <= other["sync/logp_gap"] < 1e-5
        assert other["time/sync"] > 0 and one["reward"] == other["reward"]
    assert 0 <= shared[0]["sync/logp_gap"] < 1e-5  # at the first step and at every 50th alone
    assert "sync/logp_gap" not in shared[1]


@pytest.mark.parametrize(
    ("fault", "guards", "steps", "words"),
    [
        ("wrong image", {}, 0, "guard logp_gap: before the first step, .* another image"),
        ("old cache", {}, 1, "guard logp_gap: after the weight sync to version 1, .* new samples for train:"),
        ("stale version", {}, 1, "under weight version 0, and the learner is at version 1"),
        ("constant seed", {"logp_gap": "off"}, 0, "was asked for, and the engine says that it used 7"),
        ("constant seed, hidden", {}, 1, "guard duplicate_completions: train:"),
        ("image dropped later", {}, 1, "guard logp_gap: after the weight sync to version 1, "),
        ("batch sent twice", {}, 2, "guard logp_gap: the engine's log-probs of the tokens that it sampled"),
        ("wrong after wake", {}, 1, "guard logp_gap: after the weight sync to version 1, "),
    ],
)
@pytest.mark.field_bug("blind-rollout", "one-seed", "seed-again", "wrong-after-sleep")
def test_an_engine_with_a_fault_stops_its_run(
    fault: str, guards: Any, steps: int, words: str, models: dict[str, Path], tmp_path: Path, engine: Any
) -> None:
    engine(fault)
    with pytest.raises(GuardStop, match=words):
        trainer_for(models, tmp_path / "r", guards=guards).train()
    # the step that wrote its rollouts last did not finish
    assert (tmp_path / "r" / "metrics.jsonl").exists() == (steps > 1)
    assert len(list((tmp_path / "r" / "rollouts").glob("*.jsonl"))) == steps
