"""The served engine over servers without a model: requests, streams, weights. Real ones are in engines/."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from helpers import fake_vllm, tiny
from helpers.configs import small_config
from helpers.fake_vllm import FIVE, WEIGHTS, FakeVLLM, Made, back, prompt_of, requests, restart
from helpers.patience import PATIENCE

from mm_grpo.build import build_engine
from mm_grpo.errors import ConfigError, DataError, EngineError, GuardStop
from mm_grpo.rollout.engine import ReplicaLost, Request, Sampling
from mm_grpo.rollout.served import pool
from mm_grpo.rollout.served.protocol import ENDPOINTS
from mm_grpo.rollout.served.transfer import transfer_of
from mm_grpo.types import Completion


def test_one_server_and_two_answer_alike_and_share_the_work(make: Made) -> None:
    one, _ = make(1)
    two, fakes = make(2)
    asked = requests()
    done = two.generate(asked)
    assert done == one.generate(asked)
    assert [c.seed for c in done] == [r.seed for r in asked]
    assert len({c.token_ids for c in done}) == 48 and {len(c.token_ids) for c in done} == {5}
    assert {(c.weight_versions, c.ids_compared == 0) for c in done} == {(((0, 0),), False)}
    assert sorted(len(fake.asked) for fake in fakes)[0] >= 3  # of 12 groups
    body = fakes[0].asked[0]
    params = body["sampling_params"]
    assert params["n"] == 4 and params["seed"] % 100 == 0 and params["logprobs"] == 0
    assert body["token_ids"].count(fake_vllm.IMAGE) == 1 and len(body["content_parts"]) == 1


def test_only_consecutive_seeds_are_asked_for_together(make: Made) -> None:
    engine, (fake,) = make(1)
    prompt = prompt_of("a", "say a")
    asked = [Request(prompt, seed, FIVE) for seed in (3, 4, 6, 8, 7)]
    alone = [engine.generate([request])[0] for request in asked]
    fake.asked.clear()
    assert engine.generate(asked) == alone
    params = [body["sampling_params"] for body in fake.asked]
    assert sorted((each["seed"], each["n"]) for each in params) == [(3, 2), (6, 1), (7, 1), (8, 1)]


def test_rows_that_do_not_fit_or_are_refused(make: Made) -> None:
    engine, fakes = make()
    engine.generate([Request(prompt_of("fits", "x" * 95), 0, FIVE)])
    three = prompt_of("three", "x", *[tiny.picture(1, 8, 8)] * 3)
    with pytest.raises(DataError, match=r"long: .*rollout\.vllm\.max_model_len = 100"):
        engine.generate([Request(prompt_of("long", "x" * 96), 0, FIVE)])
    with pytest.raises(DataError, match=r"three: .*rollout\.vllm\.max_images"):
        engine.generate([Request(three, 0, FIVE)])
    with pytest.raises(ConfigError, match=r"temperature = 0\.001"):
        engine.generate([Request(prompt_of("a", "x"), 0, Sampling(2, temperature=0.001))])
    for fake in fakes:
        fake.refuse = "At most 1 image(s) may be provided"
    with pytest.raises(DataError, match=r"a: vLLM refuses the prompt: http://.*At most 1 image"):
        engine.generate([Request(prompt_of("a", "x"), 0, FIVE)])
    assert engine.pool.losses == 0  # nothing was the servers' fault


def test_other_ids_than_the_learners_stop_the_run(make: Made) -> None:
    engine, fakes = make(1)
    fakes[0].expanded = 4
    with pytest.raises(GuardStop, match=r"row-0: vLLM ran 9 prompt tokens where the learner trains on 8"):
        engine.generate(requests(1))


def test_scores_are_those_of_the_completion_after_its_prompt(make: Made) -> None:
    engine, _ = make()
    prompt = prompt_of("a", "xyz", tiny.picture(1, 8, 8))
    assert engine.score(prompt, [50, 60]) == [-0.05, -0.06]
    assert engine.score(prompt, []) == []
    assert [replica.score(prompt, [50, 60]) for replica in engine.replicas] == [[-0.05, -0.06]] * 2


def test_requests_go_to_the_adapter_where_every_server_has_layers_for_it(make: Made) -> None:
    servers = [FakeVLLM(), FakeVLLM()]
    for server, layers in zip(servers, ({"a", "b"}, {"b", "c"}), strict=True):
        server.lora = layers, 8
    engine, _ = make(servers=servers, lora_rank=8)
    assert engine.adapter_layers(()) == frozenset()
    assert engine.adapter_layers(["a", "b", "d"]) == {"b"}
    # a query changes nothing, and no layer in common is none for all
    for layers, model in ((None, "tiny"), ({"b"}, "policy"), ((), "tiny")):
        if layers is not None:
            engine.use_adapters(frozenset(layers))
        engine.generate(requests(4))
        assert {body["model"] for server in servers for body in server.asked} == {model}
        for server in servers:
            server.asked.clear()


@pytest.mark.slow
def test_hundreds_of_requests_wait_without_their_bodies(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MAX_SEQUENCES", 16)
    engine, fakes = make()
    for fake in fakes:
        fake.delay = 0.005
    asked = requests(300, each=1)
    done = engine.generate(asked)
    assert [c.seed for c in done] == [r.seed for r in asked]
    assert sum(len(fake.asked) for fake in fakes) == 300
    seeds = [body["sampling_params"]["seed"] for fake in fakes for body in fake.asked]
    assert len(set(seeds)) == 300  # none twice
    assert max(fake.most for fake in fakes) <= 16


def test_a_stream_answers_each_as_it_ends(make: Made) -> None:
    engine, fakes = make()
    fakes[0].stuck.set()
    prompt = prompt_of("a", "x")
    with engine.stream() as stream:
        asked = [Request(prompt, seed, FIVE) for seed in (3, 4)]
        numbers = [stream.add_request(request) for request in asked]
        first = stream.step()
        assert len(first) == 1 and stream.unfinished == 1  # the other server is at work
        fakes[0].stuck.clear()
        second = stream.step()
        assert {n for n, _ in first + second} == set(numbers)
    assert [c for _, c in sorted(first + second)] == engine.generate(asked)
    with engine.stream() as stream:
        stream.add_request(Request(prompt, 9, FIVE))
    assert stream.unfinished == 0


@pytest.mark.slow
def test_a_server_that_missed_an_update_is_brought_up_to_all_of_it(make: Made) -> None:
    engine, fakes = make(transfer=transfer_of("gloo", timeout=5.0), servers=[FakeVLLM("gloo") for _ in "ab"])
    new = torch.full((4,), 2.0)
    fakes[0].faults["/update_weights"] = lambda body: 1 / 0
    learners = new.clone()
    received = engine.update_weights({"b.weight": learners}.items(), 1)  # a part, as the ledger sends it
    assert received.keys() == {"b.weight"}
    learners.zero_()  # it goes on
    assert [server.url for server in engine.pool.ready()] == [fakes[1].url]
    assert [c.weight_versions for c in engine.generate(requests(2))] == [((0, 1),)] * 8
    fakes[0].faults.clear()
    back(engine)
    for fake in fakes:
        assert torch.equal(fake.weights["b.weight"], new)
        assert torch.equal(fake.weights["a.q.weight"], WEIGHTS["a.q.weight"])


@pytest.mark.slow
def test_a_server_that_failed_at_the_end_of_an_update_is_sent_it_again(make: Made) -> None:
    engine, fakes = make()
    fakes[0].faults["/reset_encoder_cache"] = lambda body: 1 / 0
    engine.update_weights({"b.weight": torch.ones(4)}.items(), 1)
    assert fakes[0].name != fakes[1].name and fakes[0].paused  # its caches are of the old ones
    fakes[0].faults.clear()
    fakes[0].caches.clear()
    back(engine)
    assert fakes[0].caches == ["prefix", "encoder"] and not fakes[0].paused


@pytest.mark.slow
def test_all_servers_lost_in_an_update_are_waited_for(make: Made) -> None:
    engine, fakes = make()
    for fake in fakes:
        fake.kill()
    threading.Timer(0.3, fakes[1].restart).start()
    engine.update_weights({"b.weight": torch.ones(4)}.items(), 1)
    assert torch.equal(fakes[1].weights["b.weight"], torch.ones(4))
    assert torch.equal(fakes[1].weights["a.k.weight"], torch.ones(2))
    assert {c.weight_versions for c in engine.generate(requests(2))} == {((0, 1),)}


@pytest.mark.parametrize("worker", [0, 1, 2])
def test_a_server_that_loads_something_else_stops_the_run(make: Made, worker: int) -> None:
    servers = [FakeVLLM(), FakeVLLM(workers=3)]
    engine, fakes = make(servers=servers)
    model = fakes[1].workers[worker].model
    load = model.load_weights
    model.load_weights = lambda tensors: load([(name, tensor + 1) for name, tensor in tensors])
    with pytest.raises(GuardStop, match=rf"{fakes[1].url}: of 1 tensors 1 arrived changed: 'b"):
        engine.update_weights({"b.weight": torch.ones(4)}.items(), 1)


def test_nothing_is_sampled_before_weights_were_sent(make: Made) -> None:
    engine, _ = make(send=False)
    assert not engine.holds_weights
    with pytest.raises(EngineError, match="call update_weights with every tensor first"):
        engine.generate(requests(1))


def test_a_server_that_fails_a_check_is_left_out_of_it(make: Made) -> None:
    engine, fakes = make()
    replicas = engine.replicas
    fakes[0].kill()
    with pytest.raises(ReplicaLost, match="no connection"):
        replicas[0].score(prompt_of("a", "x"), [50])
    assert replicas[1].score(prompt_of("a", "x"), [50]) == [-0.05]


class ThreadRanks:
    """Two processes that train together, as threads."""

    def __init__(self, rank: int, barrier: threading.Barrier, held: dict[str, Any]) -> None:
        self.rank, self.first, self.barrier, self.held = rank, rank == 0, barrier, held

    @contextmanager
    def fail_together(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.held["error"] = error
        self.barrier.wait(PATIENCE)
        if error := self.held.get("error"):
            raise error

    def broadcast(self, value: Any, what: str) -> Any:
        if self.first:
            self.held[what] = value
        self.barrier.wait(PATIENCE)
        return self.held[what]


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1, 2])
def test_of_two_processes_the_first_sends_and_both_sample(level: int, make: Made, held: ExitStack) -> None:
    alone, fakes = make()
    expected = alone.generate(requests())
    barrier, shared = threading.Barrier(2), dict[str, Any]()
    engines = [
        fake_vllm.engine_of(
            fakes,
            transfer_of("file", timeout=5.0) if rank == 0 else None,
            ranks=ThreadRanks(rank, barrier, shared),
            wait_timeout=5.0,
            sleep_level=level,
        )
        for rank in (0, 1)
    ]
    for engine in engines:
        held.callback(engine.close)
    asked = requests()
    received: dict[int, Any] = {}
    done: dict[int, list[Completion]] = {}

    def process(rank: int) -> None:
        engines[rank].sleep()
        received[rank] = engines[rank].update_weights(iter(WEIGHTS.items()), 0)
        done[rank] = engines[rank].generate(asked[24 * rank : 24 * rank + 24])

    def both() -> None:
        threads = [threading.Thread(target=process, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)

    both()
    for fake in fakes:
        fake.calls.clear()
    assert received[0] == received[1] and received[0].keys() == WEIGHTS.keys()
    assert done[0] + done[1] == expected
    restart(fakes[0])  # the first process alone may bring it up; the other waits for that
    both()
    for engine in engines:
        back(engine)
    assert done[0] + done[1] == expected
    assert fakes[0].name == fakes[1].name
    assert [c for c in fakes[1].calls if "sleep?" in c] == [f"/sleep?level={level}"] * (level > 0)


def server_with(**values: Any) -> FakeVLLM:
    fake = FakeVLLM()
    for name, value in values.items():
        setattr(fake.workers[0].account if hasattr(fake.workers[0].account, name) else fake, name, value)
    return fake


OTHER = {"model_type": "other", "text_config.hidden_size": 64}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"missing": (ENDPOINTS[0],)}, ENDPOINTS[0]),
        ({"max_model_len": 50}, r"rollout\.vllm\.max_model_len"),
        ({"model": OTHER}, r"another model: its text_config\.hidden_size is 64"),
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
        ({"key": "right"}, "MM_GRPO_SERVER_KEY"),
        ({"missing": ("/sleep",)}, "/sleep"),
        ({"sleep_mode": False}, "--enable-sleep-mode"),
    ],
)
def test_a_server_that_lacks_something_is_refused(make: Made, values: Any, words: str) -> None:
    fake = server_with(**values)
    with pytest.raises(ConfigError, match=rf"rollout\.server\.urls: {fake.url} .*{words}") as caught:
        make(servers=[fake], key="wrong", sleep_level=1, sizes={**OTHER, "text_config.hidden_size": 32})
    assert "wrong" not in str(caught.value) and "/pause" not in fake.calls


@pytest.mark.slow
def test_servers_that_come_late_are_waited_for(make: Made, held: ExitStack) -> None:
    fakes = [FakeVLLM(), FakeVLLM()]
    for fake in fakes:
        fake.kill()
    threading.Timer(0.3, fakes[1].restart).start()
    engine, _ = make(servers=fakes)
    expected = engine.generate(requests(2))
    fakes[0].restart()
    back(engine)
    assert engine.generate(requests(2)) == expected
    assert fakes[0].name == fakes[1].name


def test_no_urls_is_the_configs_fault() -> None:
    config = small_config("unused", rollout={"engine": "vllm_server"})
    with pytest.raises(ConfigError, match=r"rollout\.server\.urls = \[\]"):
        build_engine(config, None, fake_vllm.Processor())  # type: ignore[arg-type]


def test_no_server_at_all_is_the_configs_fault(make: Made) -> None:
    fake = FakeVLLM()
    fake.kill()
    with pytest.raises(ConfigError, match=r"no server answers within 0\.3 s"):
        make(servers=[fake], wait_timeout=0.3)
