"""Ctrl-C, SIGTERM and SIGHUP: the run ends after the running step, with a checkpoint, and goes on as if nothing was."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.run_folders import metrics_of, weights_of
from helpers.small_runs import ROWS, config_for, vowels

from mm_grpo import GRPOTrainer
from mm_grpo.errors import ConfigError
from mm_grpo.run.stop_signals import STOPPING, RunInterrupted, StopSignals


class Send:
    """A callback that sends a signal to this process in the midst of the loop."""

    def __init__(self, number: int, step: int) -> None:
        self.number, self.step = number, step

    def on_step_end(self, trainer: GRPOTrainer, metrics: dict[str, Any]) -> None:
        if trainer.sync.version == self.step:
            os.kill(os.getpid(), self.number)


@pytest.mark.slow
def test_a_signal_ends_the_run_after_the_step(models: dict[str, Path], tmp_path: Path) -> None:
    def trainer(name: str, callbacks: Any = (), resume: bool = False) -> GRPOTrainer:
        run = {"max_steps": 3, "save_every": 3, "report": False}
        config = config_for(models["qwen2_vl"], tmp_path / name, run=run)
        return GRPOTrainer(config, train=ROWS, rewards=[vowels], callbacks=callbacks, resume=resume)

    before = [signal.getsignal(n) for n in STOPPING]
    with pytest.raises(RunInterrupted) as caught:
        trainer("stopped", [Send(signal.SIGTERM, 2)]).train()
    assert caught.value.code == 128 + signal.SIGTERM
    assert "stopped by SIGTERM after step 2" in str(caught.value)
    assert [signal.getsignal(n) for n in STOPPING] == before
    trainer("stopped", resume=True).train()
    trainer("straight").train()
    assert metrics_of(tmp_path / "stopped") == metrics_of(tmp_path / "straight")
    straight = weights_of(tmp_path / "straight")
    assert all(torch.equal(w, straight[n]) for n, w in weights_of(tmp_path / "stopped").items())


def test_a_trainer_trains_once(models: dict[str, Path], tmp_path: Path) -> None:
    config = config_for(models["qwen2_vl"], tmp_path / "r", run={"max_steps": 1, "overwrite": True})
    trainer = GRPOTrainer(config, train=ROWS, rewards=[vowels])
    trainer.train()
    before = (tmp_path / "r" / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"^train\(\) was called on this trainer before, .*resume=True"):
        trainer.train()
    assert (tmp_path / "r" / "metrics.jsonl").read_bytes() == before


def test_a_second_ctrl_c_ends_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # a scheduler may send it again
        assert signals.number == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    said = "\nSIGTERM: the run ends after this step; Ctrl-C once more ends it at once\n"
    assert capsys.readouterr().err == said


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with StopSignals(quiet=True) as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.number == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
