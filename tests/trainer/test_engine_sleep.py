"""The engine sleeps while the learner works and at no other time, and is closed by a run that fails."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fake_engines import FakeRemoteEngine
from helpers.small_runs import HELDOUT, ROWS, config_for, vowels
from torch import Tensor

from mm_grpo import GRPOTrainer, build
from mm_grpo.preflight.out_of_memory import OutOfDeviceMemory
from mm_grpo.rollout.engine import BatchStream, Digest, Request
from mm_grpo.types import Completion, Prompt


class SleepingEngine(FakeRemoteEngine):
    """Writes down what it is asked to do, and refuses to work in its sleep."""

    def __init__(self, model: Any, processor: Any) -> None:
        super().__init__(model, processor)
        self.calls: list[str] = []
        self.asleep = False

    def work(self, name: str) -> None:
        assert not self.asleep, f"{name} while asleep"
        if self.calls[-1:] != [name]:
            self.calls.append(name)

    def stream(self) -> BatchStream:
        return BatchStream(self.generate)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.work("generate")
        return super().generate(requests)

    def score(self, prompt: Prompt, token_ids: Sequence[int]) -> list[float]:
        self.work("score")
        return super().score(prompt, token_ids)

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> Digest:
        self.calls.append("update_weights")  # asleep: it takes back what the weights need
        return super().update_weights(tensors, version)

    def sleep(self) -> None:
        self.work("sleep")
        self.asleep = True

    def wake(self) -> None:
        self.asleep = False
        self.calls.append("wake")

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def trainer(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GRPOTrainer:
    monkeypatch.setitem(build.ENGINES, "transformers", lambda c, m, p, r: SleepingEngine(m, p))
    config = config_for(model, tmp_path / "run", run={"max_steps": 2, "eval_every": 1, "sight_every": 0})
    return GRPOTrainer(config, train=ROWS, eval=HELDOUT, rewards=[vowels])


def calls_of(trainer: GRPOTrainer) -> list[str]:
    engine: Any = trainer.engine
    calls: list[str] = engine.calls
    return calls


def full(*args: Any, **options: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def note_learner(trainer: GRPOTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    update = trainer.learner.update

    def noted(groups: Any) -> Any:
        calls_of(trainer).append("learner")
        return update(groups)

    monkeypatch.setattr(trainer.learner, "update", noted)


def test_the_engine_sleeps_around_the_learner(trainer: GRPOTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    note_learner(trainer, monkeypatch)
    trainer.train()
    # sync, the scale of its checks, parity check, evaluation and rollout
    start = ["update_weights", "wake", "score", "generate", "score", "generate"]
    step = ["sleep", "learner", "update_weights", "wake", "score", "generate"]
    assert calls_of(trainer) == [*start, *step, *step]
    # it evaluates after its run too, and then closes its engine
    assert trainer.evaluate()["eval"].rows == len(HELDOUT)
    assert "close" not in calls_of(trainer)
    trainer.close()
    assert calls_of(trainer)[-1] == "close"


def test_a_failing_learner_closes_the_engine(trainer: GRPOTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    note_learner(trainer, monkeypatch)
    module = trainer.learner.module
    monkeypatch.setattr(module, "forward", full)
    with pytest.raises(OutOfDeviceMemory):
        trainer.train()
    assert calls_of(trainer)[-3:] == ["sleep", "learner", "close"]
    assert module.features is None and module.prompts is None


def test_a_full_gpu_is_explained(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mm_grpo.learner.model.AutoModelForImageTextToText.from_pretrained", full)
    with pytest.raises(OutOfDeviceMemory):
        GRPOTrainer(config_for(model, tmp_path / "run"), train=ROWS, rewards=[vowels]).train()
