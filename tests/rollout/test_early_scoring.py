"""Completions that are scored while others are sampled: a run's numbers do not change, and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from helpers import tiny
from helpers.patience import until
from helpers.run_folders import metrics_of
from helpers.small_runs import HELDOUT, ROWS, config_for, rollouts_of, vowels

from mm_grpo import GRPOTrainer
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.processors.base import load_processor
from mm_grpo.rewards import Scorer
from mm_grpo.rewards.streaming_rewards import StreamedCalls
from mm_grpo.rollout.engine import BatchStream, Request, Sampling
from mm_grpo.rollout.prompts import PromptBuilder, StepPrompts
from mm_grpo.rollout.runner import RolloutRunner
from mm_grpo.rollout.transformers_engine import TransformersStream
from mm_grpo.types import Completion


def run(path: Path, folder: Path, reward: Any) -> None:
    run = {"max_steps": 2, "eval_every": 1}
    config = config_for(path, folder, rollout={"max_completion_length": 8}, run=run)
    trainer = GRPOTrainer(config, train=ROWS, eval=HELDOUT, rewards=[{"name": reward, "as": "vowels"}])
    trainer.engine.max_rows = 3  # a group at a time, so that some end before others begin
    trainer.train()


@pytest.mark.slow
def test_a_run_with_rewards_that_begin_early_is_the_run_without(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    ended: list[int] = []
    before: list[int] = []
    step, add = TransformersStream.step, StreamedCalls.add

    def noted(stream: TransformersStream) -> Any:
        until(lambda: len(called) == len(ended))  # what has ended is scored before the engine goes on
        before.append(len(ended))
        return step(stream)

    def added(calls: StreamedCalls, place: int, *rest: Any) -> None:
        ended.append(place)
        add(calls, place, *rest)

    async def early(completion: str) -> float:
        called.append(completion)
        await asyncio.sleep(0)
        return vowels(completion)

    run(models["qwen2_5_vl"], tmp_path / "together", vowels)
    monkeypatch.setattr(TransformersStream, "step", noted)
    monkeypatch.setattr(StreamedCalls, "add", added)
    run(models["qwen2_5_vl"], tmp_path / "early", early)
    assert len(called) == 2 * 12 + 3 * 3  # each completion of the steps and of the evaluations once
    assert metrics_of(tmp_path / "early") == metrics_of(tmp_path / "together")
    for number in (1, 2):
        assert rollouts_of(tmp_path / "early", number) == rollouts_of(tmp_path / "together", number)
    assert len(ended) == len(called) and before[0] == 0 and before[-1] >= len(ended) - 3


def test_an_engine_that_fails_ends_streamed_calls_and_several_processes_begin_none(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def stream(self) -> BatchStream:
            return BatchStream(self.generate)

        def generate(self, requests: Sequence[Request]) -> list[Completion]:
            raise ConnectionError

    async def reward(completion: str) -> float:
        return 1.0

    scorer, builder = Scorer([reward]), cast("PromptBuilder", None)
    scorer.check([])
    prompt = load_processor(str(models["qwen2_5_vl"])).prompt(tiny.sample("r:0", "what"))
    calls: list[StreamedCalls] = []
    abandon = StreamedCalls.abandon
    monkeypatch.setattr(StreamedCalls, "abandon", lambda begun: calls.append(begun) or abandon(begun))
    runner = RolloutRunner(builder, Broken(), scorer, Ranks())
    with pytest.raises(ConnectionError):
        runner.sample(StepPrompts([1], [prompt], 0), [range(2)], Sampling(1), 1, "rollout", version=0)
    assert len(calls) == 1 and calls[0].over
    assert runner.begin_scoring([prompt], 2, 1) is not None
    assert replace(runner, ranks=Ranks(0, 2)).begin_scoring([prompt], 2, 1) is None
    scorer.close()
