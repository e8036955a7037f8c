"""Servers on the learner's GPUs: they sleep while it works, and wake in the order that their memory needs."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from helpers.fake_vllm import WEIGHTS, FakeVLLM, Made, back, fake_adapters, prompt_of, requests
from helpers.patience import until

from mm_grpo.errors import EngineError
from mm_grpo.rollout.served.engine import ServedEngine
from mm_grpo.rollout.served.transfer import transfer_of
from mm_grpo.rollout.weights import WeightLedger

FACTOR = {"base_model.model.a.q_proj.lora_A.weight": torch.ones(1, 3)}


def asleep(fakes: list[FakeVLLM]) -> list[bool]:
    return [fake.asleep == {"weights", "kv_cache"} for fake in fakes]


def works(engine: ServedEngine, fakes: list[FakeVLLM], version: int) -> None:
    """All servers are awake with these weights, and sample."""
    back(engine)
    assert [fake.asleep or fake.paused for fake in fakes] == [False] * len(fakes)
    assert {c.weight_versions for c in engine.generate(requests(4))} == {((0, version),)}


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("level", [1, 2])
def test_servers_sleep_until_new_weights_come(
    level: int, old: bool, make: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_adapters(monkeypatch)
    engine, fakes = make(sleep_level=level, send=False)
    ledger, tensors = WeightLedger(), {**WEIGHTS, **FACTOR}
    for fake in fakes:
        fake.old = old
    ledger.send(engine, tensors.items(), 0)
    for version in (1, 2):
        expected = engine.generate(requests(4))
        engine.sleep()
        engine.sleep()
        assert asleep(fakes) == [True, True] and engine.holds_weights == (level == 1)
        assert [bool(fake.weights) for fake in fakes] == [level == 1] * 2
        for ask in (engine.generate, engine.replicas[0].generate):
            with pytest.raises(EngineError, match=r"call wake on every|call update_weights"):
                ask(requests(1))
        for fake in fakes:
            fake.calls.clear()
        tensors |= {name: tensor + version for name, tensor in FACTOR.items()}
        sent = ledger.send(engine, tensors.items(), version)
        engine.wake()  # it is awake
        # at level 1 the frozen base is still there
        assert sent.digests.keys() == (FACTOR.keys() if level == 1 else tensors.keys())
        for fake in fakes:
            order = [call for call in fake.calls if call not in ("/collective_rpc", "/weight_info")]
            assert order == [
                "/wake_up?tags=weights", "/pause", "/start_weight_update", "/update_weights", "/finish_weight_update",
                "/wake_up?tags=kv_cache", "/reset_prefix_cache", "/reset_encoder_cache", "/resume", "/is_sleeping",
                "/update_weight_version",
            ]  # fmt: skip
            assert fake.weights.keys() == WEIGHTS.keys() and fake.workers[0].model.adapter
        works(engine, fakes, version)
        assert [c.token_ids for c in engine.generate(requests(4))] == [c.token_ids for c in expected]
    assert engine.pool.losses == 0


def answering(path: str, answer: Callable[[object], object]) -> Callable[[FakeVLLM], None]:
    return lambda fake: fake.faults.update({path: answer})


WAKES = [
    (answering("/wake_up", lambda _: time.sleep(1.2)), "no answer to /wake_up within 1 s"),
    (answering("/wake_up", lambda _: 1 / 0), "/wake_up was answered with HTTP 500: division by zero"),
    (answering("/wake_up", lambda _: {}), "illegal memory access in /start_weight_update"),
    (answering("/is_sleeping", lambda _: {"is_sleeping": True}), "it sleeps on after /wake_up"),
    (FakeVLLM.kill, "connection"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "words"), WAKES)
def test_a_server_that_does_not_wake_is_lost(
    fault: Callable[[FakeVLLM], None], words: str, make: Made, caplog: pytest.LogCaptureFixture
) -> None:
    engine, fakes = make(sleep_level=1, transfer=transfer_of("file", timeout=1.0), wait_timeout=0.3)
    engine.sleep()
    fault(fakes[0])
    engine.update_weights(WEIGHTS.items(), 1)
    assert [server.url for server in engine.pool.ready()] == [fakes[1].url]
    assert {c.weight_versions for c in engine.generate(requests(4))} == {((0, 1),)}
    assert words in caplog.text
    engine.sleep()
    fault(fakes[1])
    with pytest.raises(EngineError, match="no server has been left") as caught:
        engine.update_weights(WEIGHTS.items(), 2)
    assert all(fake.url in str(caught.value) for fake in fakes) and "\n" not in str(caught.value)
    for fake in fakes:  # they wake after all
        fake.faults.clear()
        if not fake.alive:
            fake.restart()
    works(engine, fakes, 2)


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
def test_a_server_that_dies_asleep_sleeps_again_when_it_is_back(level: int, make: Made) -> None:
    engine, fakes = make(sleep_level=level)
    engine.sleep()
    fakes[0].kill()
    fakes[0].calls.clear()
    fakes[0].restart()  # at once, and awake
    until(lambda: asleep(fakes) == [True, True])
    assert "/start_weight_update" not in fakes[0].calls and engine.pool.losses == 1
    engine.update_weights(WEIGHTS.items(), 1)
    works(engine, fakes, 1)
    assert torch.equal(fakes[0].weights["a.k.weight"], WEIGHTS["a.k.weight"])
    engine.sleep()
    fakes[0].kill()
    until(lambda: len(engine.pool.ready()) == 1)
    engine.update_weights(WEIGHTS.items(), 2)
    fakes[0].restart()
    works(engine, fakes, 2)


def test_a_run_finds_servers_asleep_and_leaves_them_awake(make: Made) -> None:
    killed, fakes = make(sleep_level=2)
    killed.sleep()
    killed.pool.close()  # no more than this is left of it
    engine, _ = make(servers=fakes, sleep_level=1)
    works(engine, fakes, 0)
    engine.sleep()
    fakes[0].faults["/wake_up"] = lambda _: 1 / 0
    engine.wake()  # without an update
    assert [server.url for server in engine.pool.ready()] == [fakes[1].url]
    fakes[0].faults.clear()
    works(engine, fakes, 0)
    engine.sleep()
    with pytest.raises(EngineError, match="call wake on every process"):
        engine.score(prompt_of("a", "x"), [50])
    engine.close()
    assert asleep(fakes) == [False, False] and not any(fake.paused for fake in fakes)
