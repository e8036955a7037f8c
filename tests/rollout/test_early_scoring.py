"""Completions that are scored while others are sampled: a run's numbers do not change, and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny
from helpers.patience import until
from helpers.run_folders import metrics_of
from helpers.small_runs import HELDOUT, ROWS, config_for, rollouts_of, vowels

from mm_grpo import GRPOTrainer
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.errors import GuardStop
from mm_grpo.processors.base import load_processor
from mm_grpo.rewards import Scorer
from mm_grpo.rewards.streaming_rewards import StreamedCalls
from mm_grpo.rollout.collect import begin_scoring, sample
from mm_grpo.rollout.engine import Request, RequestStream, Sampling, answered, requests_for
from mm_grpo.rollout.prompts import StepPrompts
from mm_grpo.rollout.transformers_engine import TransformersStream
from mm_grpo.types import Completion


def run(path: Path, folder: Path, reward: Any) -> None:
    config = config_for(
        path, folder, rollout={"max_completion_length": 8}, run={"max_steps": 2, "eval_every": 1}
    )
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


class FakeStream(RequestStream):
    """Answers the last request first; `wrong` is the place of one with another seed."""

    def __init__(self, wrong: int | None) -> None:
        self.wrong, self.waiting, self.released = wrong, dict[int, Request](), list[int]()

    @property
    def unfinished(self) -> int:
        return len(self.waiting)

    def add_request(self, request: Request, follows: Any = None) -> int:
        self.waiting[100 + len(self.waiting)] = request
        return 99 + len(self.waiting)

    def step(self) -> list[tuple[int, Completion]]:
        number, request = self.waiting.popitem()
        seed = request.seed + (number - 100 == self.wrong)
        return [(number, Completion((number,), (-1.0,), str(seed), "stop", seed, ((0, 7),)))]

    def release(self, number: int) -> None:
        self.released.append(number)

    def close(self) -> None:
        self.waiting.clear()


class FakeEngine:
    def __init__(self, wrong: int | None = None) -> None:
        self.made = FakeStream(wrong)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return answered(self.made, requests)

    def stream(self) -> FakeStream:
        return self.made


@pytest.fixture
def asked(models: dict[str, Path]) -> StepPrompts:
    processor = load_processor(str(models["qwen2_5_vl"]))
    prompts = [processor.prompt(tiny.sample(f"r:{i}", "what")) for i in (0, 1)]
    named = [replace(p, sample=replace(p.sample, columns={"box": 1})) for p in prompts]
    return StepPrompts([1, 2], named, 0)


def test_answers_are_checked_and_handed_on_as_they_come(asked: StepPrompts) -> None:
    order: list[str] = []

    async def noted(completion: str) -> float:
        order.append(completion)
        return float(completion)

    scorer = Scorer([noted])
    scorer.check(["box"])
    requests = requests_for(asked.prompts, [range(10, 12), range(20, 22)], Sampling(1))
    scoring = begin_scoring(scorer, asked, 2, 1, Ranks())
    engine: Any = FakeEngine()
    found = sample(engine, requests, scoring, version=7)
    assert [c.seed for c in found] == [10, 11, 20, 21] and engine.made.released == [103, 102, 101, 100]
    assert scoring is not None
    scores = scorer.score([p for p in asked.prompts for _ in range(2)], found, 1, scoring)
    assert scores.totals == [10.0, 11.0, 20.0, 21.0] and order == ["21", "20", "11", "10"]

    bad: Any = FakeEngine(wrong=1)
    scoring = begin_scoring(scorer, asked, 2, 2, Ranks())
    with pytest.raises(GuardStop, match=r"seed 11 was asked for, .* used 12"):
        sample(bad, requests, scoring, version=7)
    assert scoring is not None and scoring.over
    scorer.close()


def test_several_processes_score_when_all_completions_are_there(asked: StepPrompts) -> None:
    async def reward(completion: str) -> float:
        return 1.0

    scorer = Scorer([reward])
    scorer.check(["box"])
    assert begin_scoring(scorer, asked, 3, 1, Ranks(0, 2)) is None
    scorer.close()
