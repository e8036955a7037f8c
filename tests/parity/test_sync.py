"""The run's own checks of its engine: each fault stops the run at the step where it happens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.fake_engines import FakeRemoteEngine

from mm_grpo import GRPOConfig, GRPOTrainer, build
from mm_grpo.data.shapes import shapes_rows
from mm_grpo.errors import GuardStop

ROWS = shapes_rows(split="train", size=6, seed=1, image_size=56)


def letters(completion: str) -> float:
    return len(set(completion)) + len(completion) / 100


def trainer_for(models: dict[str, Path], folder: Path, **run: Any) -> GRPOTrainer:
    config = GRPOConfig.from_dict(
        {
            "model": {"path": str(models["qwen2_5_vl"]), "dtype": "float32"},
            "rollout": {"prompts_per_step": 2, "num_generations": 4, "max_completion_length": 10},
            "optim": {"learning_rate": 1e-3},
            "run": {"dir": str(folder), "max_steps": 2, "seed": 5, "report": False, **run},
        }
    )
    return GRPOTrainer(config, train=ROWS, rewards=[letters])


def rows_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(fault: str = "") -> None:
        monkeypatch.setitem(build.ENGINES, "transformers", lambda c, m, p, r: FakeRemoteEngine(m, p, fault))

    return put


def test_an_engine_with_weights_of_its_own_trains_as_the_embedded_one_does(
    models: dict[str, Path], tmp_path: Path, engine: Any
) -> None:
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
    ("fault", "words"),
    [
        ("old cache", "guard logp_gap: after the weight sync to version 1, .* new samples for train:"),
        ("stale version", "under weight version 0, and the learner is at version 1"),
    ],
)
def test_a_sync_that_fails_stops_the_run_in_its_step(
    fault: str, words: str, models: dict[str, Path], tmp_path: Path, engine: Any
) -> None:
    engine(fault)
    with pytest.raises(GuardStop, match=words):
        trainer_for(models, tmp_path / "r").train()
    assert rows_of(tmp_path / "r") == []  # the first step did not finish
    assert (tmp_path / "r" / "rollouts" / "step-000001.jsonl").exists()


def test_a_wrong_image_stops_the_run_before_its_first_step(
    models: dict[str, Path], tmp_path: Path, engine: Any
) -> None:
    engine("wrong image")
    with pytest.raises(GuardStop, match=r"guard logp_gap: before the first step, .* another image"):
        trainer_for(models, tmp_path / "a").train()
    assert not list((tmp_path / "a" / "rollouts").glob("*.jsonl"))


def test_a_constant_seed_stops_the_run(models: dict[str, Path], tmp_path: Path, engine: Any) -> None:
    engine("constant seed")
    with pytest.raises(GuardStop, match=r"was asked for, and the engine says that it used 7"):
        trainer_for(models, tmp_path / "said", guards={"logp_gap": "off"}).train()
    engine("constant seed, hidden")
    with pytest.raises(GuardStop, match="guard duplicate_completions: train:"):
        trainer_for(models, tmp_path / "hidden").train()
