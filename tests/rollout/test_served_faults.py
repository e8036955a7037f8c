"""Faults of servers in the midst of a step: kills, cuts, errors, hangs. No sample changes, none is lost or doubled."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from helpers.fake_vllm import WEIGHTS, FakeVLLM, Made, back, cut, fail, in_midst, prompt_of, requests, restart
from helpers.patience import PATIENCE, until

from mm_grpo.errors import ConfigError, EngineError
from mm_grpo.rollout.served.client import in_background, wait
from mm_grpo.rollout.served.protocol import GENERATE, INFO, RPC


@pytest.mark.slow
@pytest.mark.parametrize("fault", [cut, fail, restart])
def test_a_fault_in_midst_of_a_step_changes_nothing(make: Made, fault: Callable[[FakeVLLM], None]) -> None:
    engine, fakes = make()
    expected = engine.generate(requests())
    engine.update_weights(WEIGHTS.items(), 1)
    done = in_midst(engine, fakes, lambda: fault(fakes[0]))
    samples, wanted = ([(c.token_ids, c.logprobs, c.seed) for c in made] for made in (done, expected))
    assert samples == wanted
    assert {c.weight_versions for c in done} == {((0, 1),)}
    back(engine)
    assert fakes[0].name == fakes[1].name and fakes[0].name.endswith(":1")  # a new process was brought up
    assert engine.generate(requests(first=7)) != expected


@pytest.mark.slow
def test_a_server_killed_for_good_is_done_without_and_counted(make: Made) -> None:
    engine, fakes = make()
    expected = engine.generate(requests())
    assert in_midst(engine, fakes, fakes[0].kill) == expected
    assert engine.metrics() == {"served/ready": 1, "served/losses": 1}
    begun = len(fakes[1].asked)
    assert engine.generate(requests()) == expected
    assert len(fakes[1].asked) == begun + 12
    fakes[0].restart()
    back(engine)
    assert engine.metrics() == {"served/ready": 2, "served/losses": 0}


@pytest.mark.slow
@pytest.mark.field_bug("hangs")
def test_a_server_that_answers_nothing_is_left(make: Made, caplog: pytest.LogCaptureFixture) -> None:
    engine, fakes = make(timeout=0.5)
    expected = engine.generate(requests())
    started = time.monotonic()
    assert in_midst(engine, fakes, fakes[0].stuck.set) == expected
    assert 0.5 < time.monotonic() - started < PATIENCE  # it never answers by itself
    assert f"{fakes[0].url} is lost" in caplog.text and "rollout.server.timeout" in caplog.text
    fakes[0].stuck.clear()


@pytest.mark.slow
def test_a_restart_between_steps_is_seen_before_a_request(make: Made) -> None:
    engine, fakes = make()
    expected = engine.generate(requests())
    restart(fakes[0])
    begun = len(fakes[0].asked)
    engine.pool.updating = True  # nothing is taken in for now
    assert engine.generate(requests()) == expected
    assert len(fakes[0].asked) == begun
    engine.pool.updating = False
    back(engine)
    assert fakes[0].name == fakes[1].name


@pytest.mark.parametrize("version", ["x:0", "{run}:1"])
def test_an_answer_under_other_weights_is_not_taken(make: Made, version: str) -> None:
    engine, fakes = make()
    expected = engine.generate(requests())
    engine.pool.updating = True  # nothing is taken in for now
    spans = [{"version": version.format(run=fakes[0].name[:-2]), "start": 0}]
    fakes[0].odd[GENERATE] = lambda answer: {
        **answer, "choices": [{**choice, "weight_versions": spans} for choice in answer["choices"]]
    }  # fmt: skip
    assert engine.generate(requests()) == expected
    assert [server.url for server in engine.pool.ready()] == [fakes[1].url]


@pytest.mark.slow
def test_none_left_names_each_server_and_what_happened(make: Made) -> None:
    engine, fakes = make(wait_timeout=0.5)
    fakes[1].kill()
    with pytest.raises(EngineError) as caught:
        in_midst(engine, fakes, fakes[0].kill)
    assert "rollout.server.wait_timeout" in str(caught.value) and "--resume" in str(caught.value)
    for fake in fakes:
        assert f"{fake.url}: no connection (Connection refused)" in str(caught.value)


@pytest.mark.slow
def test_a_row_that_every_server_fails_on_ends_the_run(make: Made) -> None:
    engine, fakes = make()
    for fake in fakes:
        fake.status = 1000
    words = r"row-0: servers failed 8 times over one request, .*EngineDeadError"
    with pytest.raises(EngineError, match=words):
        engine.generate(requests(1))


def first(**changes: Any) -> Callable[[Any], Any]:
    """The first choice with other fields."""
    return lambda answer: {**answer, "choices": [{**answer["choices"][0], **changes}, *answer["choices"][1:]]}


def worker(**changes: Any) -> Callable[[Any], Any]:
    return lambda answer: {"results": [{**answer["results"][0], **changes}]}


ODD: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("start", "/openapi.json", lambda _: {}),
    ("start", RPC, lambda _: {"results": []}),
    ("update", RPC, worker(digests={"a": 1})),
    ("generate", GENERATE, lambda _: None),
    ("generate", GENERATE, first(weight_versions=[{"version": "x:0"}, {"version": "x:1"}])),
    ("score", GENERATE, lambda answer: {**answer, "prompt_logprobs": None}),
)


@pytest.mark.parametrize(("when", "path", "odd"), ODD)
def test_an_odd_answer_is_one_message(when: str, path: str, odd: Callable[[Any], Any], make: Made) -> None:
    fake = FakeVLLM()
    if when == "start":
        fake.odd[path] = odd
        with pytest.raises(ConfigError, match=re.escape(fake.url)) as caught:
            make(servers=[fake], wait_timeout=0.2)
    else:
        engine, _ = make(servers=[fake], wait_timeout=0.2)
        fake.odd[path] = odd
        with pytest.raises(EngineError, match=re.escape(fake.url)) as caught:
            if when == "generate":
                engine.generate(requests(1))
            elif when == "score":
                engine.score(prompt_of("a", "xyz"), [50, 60])
            else:
                engine.update_weights(WEIGHTS.items(), 1)
    assert path in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "odd", "words"),
    [
        (RPC, worker(model={"hidden_size": 16}), "its hidden_size is 16, and that of model.path is 8"),
        (RPC, worker(logprobs_mode="raw_logprobs"), "--logprobs-mode processed_logprobs"),
        ("/v1/models", lambda _: {"data": [{"id": "b", "max_model_len": 50}]}, "--max-model-len 100"),
    ],
)
def test_a_replaced_server_is_refused(make: Made, path: str, odd: Callable[[Any], Any], words: str) -> None:
    engine, fakes = make(sizes={"hidden_size": 8})
    fakes[0].kill()
    fakes[0].odd[path] = odd
    fakes[0].restart()
    expected = engine.generate(requests())
    until(lambda: words in engine.pool.describe(), engine.pool.describe())
    begun = len(fakes[0].asked)
    assert engine.generate(requests()) == expected
    assert [server.url for server in engine.pool.ready()] == [fakes[1].url]
    assert len(fakes[0].asked) == begun and "/start_weight_update" not in fakes[0].calls[-10:]


def test_a_refusal_of_a_server_that_was_restarted_is_not_the_row_s(make: Made) -> None:
    """It serves another model, which has another name or less room, and says so before it names its weights."""
    engine, fakes = make()
    expected = engine.generate(requests())
    stream = engine.stream()  # the servers are looked at here
    restart(fakes[0])
    fakes[0].refuse = "The model `tiny` does not exist."
    engine.pool.updating = True  # nothing is taken in for now
    with stream:
        numbers = [stream.add_request(request) for request in requests()]
        done: dict[int, Any] = {}
        while stream.unfinished:
            done |= stream.step()
    assert [done[number].token_ids for number in numbers] == [c.token_ids for c in expected]
    assert [server.url for server in engine.pool.ready()] == [fakes[1].url]


@pytest.mark.parametrize("path", [INFO, "/pause", "/v1/models"])
def test_a_run_that_ends_while_a_server_joins_says_nothing_more(
    make: Made, path: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the update is the only one, wherever the server was on its way in."""
    engine, fakes = make(wait_timeout=0.2, servers=[FakeVLLM()])
    entered, ended = threading.Event(), threading.Event()

    def wait_for_end(body: Any) -> None:
        entered.set()
        ended.wait(PATIENCE)

    def close_slowly() -> None:
        close()
        ended.set()  # a large folder is still being removed
        wait(in_background(asyncio.sleep(0.3)))

    close = engine.transfer.close  # type: ignore[union-attr]
    monkeypatch.setattr(engine.transfer, "close", close_slowly)
    fakes[0].faults["/finish_weight_update"] = lambda body: 1 / 0
    with pytest.raises(EngineError, match="/finish_weight_update"):
        engine.update_weights(WEIGHTS.items(), 1)
    fakes[0].faults[path] = wait_for_end
    until(entered.is_set)
    engine.close()
    for path in (INFO, "/finish_weight_update"):
        fakes[0].faults.pop(path, None)
    with pytest.raises(EngineError, match="closed"):
        engine.update_weights(WEIGHTS.items(), 2)
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []
