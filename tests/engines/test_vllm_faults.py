"""What the vLLM engine refuses, and how it fails: one error that names the row or the cause, and no hang."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from vllm_rig import Rig

from mm_grpo.errors import ConfigError, EngineError, GuardStop
from mm_grpo.rollout.engine import Request, Sampling, requests_for
from mm_grpo.rollout.vllm import internals as vllm_internals
from mm_grpo.rollout.vllm import requests as vllm_requests
from mm_grpo.rollout.vllm.launch import EngineSettings, launch
from mm_grpo.types import EnginePrompt

TWELVE = Sampling(max_tokens=12)


def still_works(rig: Rig) -> None:
    prompts = rig.prompts()
    done = rig.engine.generate(requests_for(prompts, [range(4)] * 3, TWELVE))
    assert rig.gap(prompts, done) <= 1e-5


def test_what_vllm_itself_refuses_names_the_row(one: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_requests, "check_size", lambda *args: None)
    good, bad = one.prompts()[0], one.prompt("row-19", *(tiny.picture(i) for i in range(4)))
    with pytest.raises(EngineError, match=r"\(row-19\): .*At most 3 image"):
        one.engine.generate(requests_for([good, bad], [range(2)] * 2, TWELVE))
    monkeypatch.undo()
    still_works(one)


@pytest.mark.parametrize("fault", ["expanded", "resized"])
@pytest.mark.field_bug("double-expansion")
def test_other_ids_or_another_size_are_caught_by_the_id_contract(one: Rig, fault: str) -> None:
    prompt = one.prompts()[0]
    sent = prompt.engine_prompt
    other = {
        "expanded": EnginePrompt(prompt.token_ids, sent.images),
        "resized": EnginePrompt(sent.token_ids, (tiny.picture(1, 168, 168),)),
    }[fault]
    with pytest.raises(GuardStop, match=r"one: vLLM ran \d+ prompt tokens"):
        one.engine.generate([Request(dataclasses.replace(prompt, engine_prompt=other), 1, TWELVE)])


def test_death_in_mid_step_is_one_error_with_its_cause(one: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = one.engine._handle.llm.llm_engine
    steps, step = [0], engine.step

    def failing() -> Any:
        steps[0] += 1
        if steps[0] == 4:
            raise RuntimeError("worker lost\nsecond line")
        return step()

    with monkeypatch.context() as patched:
        patched.setattr(engine, "step", failing)
        words = r"sampled 12 request\(s\) \(one, two, none\): RuntimeError: worker lost"
        with pytest.raises(EngineError, match=words) as e:
            one.engine.generate(requests_for(one.prompts(), [range(4)] * 3, TWELVE))
    assert isinstance(e.value.__cause__, RuntimeError)
    assert not engine.has_unfinished_requests()
    still_works(one)


def test_log_probs_that_are_no_numbers(one: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    step = vllm_internals.step

    def damaged(*args: Any) -> Any:
        for name, answer in step(*args):
            first = dataclasses.replace(answer.sequences[0], logprobs=(float("nan"),) * 12)
            yield name, dataclasses.replace(answer, sequences=(first,))

    monkeypatch.setattr(vllm_internals, "step", damaged)
    with pytest.raises(GuardStop, match=r"none: vLLM returned 12 log-probs .* not numbers below 0"):
        one.engine.generate([Request(one.prompts()[2], 1, TWELVE)])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("logprobs_mode", "raw_logits", r"engine_kwargs.logprobs_mode = 'raw_logits': mm_grpo sets .* the learner"),
        ("no_such_thing", 1, r"engine_kwargs = .*unexpected keyword argument .no_such_thing"),
    ],
)  # fmt: skip
def test_engine_arguments_that_are_refused(one: Rig, name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        launch(dataclasses.replace(one.settings, engine_kwargs=((name, value),)))


def test_a_rank_without_a_process_group(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(EngineError, match="the vLLM engine must start after the process group"):
        launch(EngineSettings(str(models["qwen2_vl"]), "float32", 256))
