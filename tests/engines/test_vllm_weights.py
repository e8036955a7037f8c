"""Weights reach vLLM whole and verified. Skipped safeties: test_vllm_parity.py and test_vllm_lost_updates.py."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from vllm_rig import Rig

from mm_grpo.errors import EngineError
from mm_grpo.rollout.engine import Request, Sampling, requests_for
from mm_grpo.rollout.vllm.engine import VLLMEngine
from mm_grpo.types import Prompt

TWELVE = Sampling(max_tokens=12)
LIMIT = 1e-5


def sampled_gap(rig: Rig, prompts: list[Prompt]) -> float:
    requests = requests_for(prompts, [range(100 * i, 100 * i + 4) for i in range(len(prompts))], TWELVE)
    return rig.gap(prompts, rig.engine.generate(requests))


def proof(rig: Rig, prompt: Prompt) -> None:
    """A fixed completion has the learner's log-probs, caches and all."""
    ids = [40, 41, 42, 50, 60, 70]
    assert rig.engine.score(prompt, ids) == pytest.approx(rig.expected(prompt, ids, mask=False), abs=LIMIT)


@pytest.mark.parametrize(
    ("changed", "sent"),
    [
        (["visual"], r".*visual.*"),
        # the tied head, and the norm of the same unit
        (["embed_tokens"], r"lm_head\.weight|model\.language_model\.(embed_tokens|norm)\.weight"),
        (["q_proj", "v_proj"], r"model\.language_model\.layers\.[012]\.self_attn\..*"),
    ],
)
def test_whole_units_reach_the_engine(one: Rig, changed: list[str], sent: str) -> None:
    prompts = one.prompts()
    assert sampled_gap(one, prompts) <= LIMIT
    one.change(*changed)
    transfer = one.send(2)
    unit = {name: tensor for name, tensor in one.tensors() if re.fullmatch(sent, name)}
    assert transfer.digests.keys() == unit.keys() and len(unit) > len(changed)
    assert transfer.bytes == sum(tensor.nbytes for tensor in unit.values())
    assert sampled_gap(one, prompts) <= LIMIT
    proof(one, prompts[0])


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake(one: Rig, monkeypatch: pytest.MonkeyPatch, level: int) -> None:
    """The order of calls; a CPU's vLLM takes them and frees nothing, so the engine is made to ask."""
    engine, prompt = one.engine, one.prompts()[0]
    monkeypatch.setattr(VLLMEngine, "_can_sleep", True)
    monkeypatch.setattr(engine, "settings", dataclasses.replace(engine.settings, sleep_level=level))
    calls: list[Any] = []
    llm = engine._handle.llm
    sleep, wake_up = llm.sleep, llm.wake_up
    monkeypatch.setattr(llm, "sleep", lambda level: (calls.append(level), sleep(level=level)))
    monkeypatch.setattr(llm, "wake_up", lambda tags: (calls.append(tags), wake_up(tags)))
    before = engine.generate([Request(prompt, 1, TWELVE)])
    engine.sleep()
    engine.sleep()
    if level == 1:
        assert engine.generate([Request(prompt, 1, TWELVE)])[0].token_ids == before[0].token_ids
        assert calls == [1, ["weights", "kv_cache"]]
        engine.sleep()
        assert one.send(1).digests == {}
        assert calls == [1, ["weights", "kv_cache"], 1, ["weights"], ["kv_cache"]]
    else:
        with pytest.raises(EngineError, match="does not hold this trainer's weights"):
            engine.generate([Request(prompt, 1, TWELVE)])
        assert len(one.send(1).digests) == len(list(one.tensors()))
        assert calls == [2, ["weights"], ["kv_cache"]]
    assert engine.generate([Request(prompt, 1, TWELVE)])[0].token_ids == before[0].token_ids


def test_a_learner_that_fails_half_way(one: Rig) -> None:
    def breaking() -> Any:
        for i, pair in enumerate(one.tensors()):
            if i == 7:
                raise ConnectionError("the learner is gone")
            yield pair

    one.change("")
    with pytest.raises(ConnectionError, match="the learner is gone"):
        one.send(1, breaking())
    with pytest.raises(EngineError, match="does not hold this trainer's weights"):
        one.engine.generate([Request(one.prompts()[0], 1, TWELVE)])
    assert len(one.send(2).digests) == len(list(one.tensors()))
    assert sampled_gap(one, one.prompts()) <= LIMIT


@pytest.mark.field_bug("sampling-defaults")
def test_an_untied_model(untied: tuple[Rig, Any, Any]) -> None:
    rig = untied[0]
    rig.reset()
    rig.change("lm_head")
    assert set(rig.send(1).digests) == {"lm_head.weight"}
    assert sampled_gap(rig, rig.prompts()) <= LIMIT


def test_a_second_trainer_takes_the_engine_over_and_must_send_its_weights(one: Rig) -> None:
    prompt = one.prompts()[0]
    second = VLLMEngine(one.settings, one.processor)
    assert second._handle is one.engine._handle
    with pytest.raises(EngineError, match="does not hold this trainer's weights"):
        second.generate([Request(prompt, 1, TWELVE)])
    with pytest.raises(EngineError, match="another trainer of this process has taken"):
        one.engine.generate([Request(prompt, 1, TWELVE)])
    assert not second.holds_weights and not one.engine.holds_weights
    sent = one.ledger.send(second, one.tensors(), 0)
    assert len(sent.digests) == len(list(one.tensors()))  # everything, though it is what was there
    assert one.gap([prompt], second.generate([Request(prompt, 1, TWELVE)])) <= LIMIT
    second.close()
    with pytest.raises(EngineError, match="does not hold this trainer's weights"):
        second.generate([Request(prompt, 1, TWELVE)])
