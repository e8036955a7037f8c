"""The served engine over two real vLLM servers: samples, runs, faults. Both serve the base model of the shapes recipe.

The servers are started once for the file; what fails over in which way is tested quickly in
rollout/test_served_faults.py, weights in test_vllm_served_weights.py.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.configs import small_config
from helpers.small_runs import rollouts_of, rows_of
from robustness.http_proxy import Proxy
from transformers import AutoModelForImageTextToText
from vllm_rig import Rig

from mm_grpo import GRPOConfig, GRPOTrainer
from mm_grpo.errors import GuardStop
from mm_grpo.learner.learner import Learner
from mm_grpo.parity.sync import VerifiedSync
from mm_grpo.processors.base import load_processor, mm_processor_kwargs
from mm_grpo.rollout.engine import Request, Sampling, requests_for
from mm_grpo.rollout.served.client import ServerClient
from mm_grpo.rollout.served.command import ServerSettings
from mm_grpo.rollout.served.engine import ServedEngine
from mm_grpo.rollout.served.launch import ServerProcess, serve
from mm_grpo.rollout.served.protocol import Limits
from mm_grpo.rollout.served.transfer import FileTransfer, transfer_of
from mm_grpo.rollout.vllm.engine import VLLMEngine
from mm_grpo.rollout.vllm.launch import EngineSettings
from mm_grpo.rollout.weights import WeightLedger
from mm_grpo.types import Completion, Group

pytestmark = pytest.mark.long

BASE = Path(__file__).parents[2] / "examples/shapes/base"
TWELVE = Sampling(max_tokens=12)


class Served(Rig):
    """The learner's half of a rig over servers; `engine_of` makes an engine over some of them."""

    def __init__(self, servers: list[ServerProcess], settings: EngineSettings) -> None:
        self.servers, self.settings = servers, settings
        self.processor = load_processor(str(BASE))
        self.model = AutoModelForImageTextToText.from_pretrained(BASE, dtype=torch.float32).eval()
        self.engines: list[ServedEngine] = []

    def engine_of(self, urls: Sequence[str], **limits: Any) -> ServedEngine:
        engine = ServedEngine(
            [ServerClient(url, timeout=60, connect_timeout=2) for url in urls],
            transfer_of("file", timeout=60),
            self.processor,
            limits=Limits(**{"health_timeout": 20.0, "wait_timeout": 120.0, "max_model_len": 512, **limits}),
            max_images=3,
        )
        self.engines.append(engine)
        WeightLedger().send(engine, self.tensors(), 0)
        return engine


def settings_of(processor: Any) -> EngineSettings:
    kwargs = tuple(mm_processor_kwargs(processor).items())
    return EngineSettings(str(BASE), "float32", 512, mm_processor_kwargs=kwargs, max_images=3)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    settings = settings_of(load_processor(str(BASE)))
    logs, said = tmp_path_factory.mktemp("logs"), list[str]()
    with serve([ServerSettings(settings)] * 2, log_folder=logs, report=said.append) as servers:
        yield Served(servers, settings)


@pytest.fixture
def served(fleet: Served) -> Iterator[Served]:
    """Both servers; engines that a test makes are closed after it."""
    yield fleet
    while fleet.engines:
        fleet.engines.pop().close()


def ids_of(done: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [c.token_ids for c in done]


def many(served: Served, count: int = 12, tokens: int = 12, each: int = 4) -> list[Request]:
    prompts = [served.prompt(f"p{i}", tiny.picture(i)) for i in range(count)]
    return requests_for(prompts, [range(100 * i, 100 * i + each) for i in range(count)], Sampling(tokens))


# samples -------------------------------------------------------------------------------------


def test_ids_logprobs_and_scores_are_the_learners(served: Served) -> None:
    engine = served.engine_of([s.url for s in served.servers])
    prompts = served.prompts()
    seeds = [range(1000 * i, 1000 * i + 4) for i in range(3)]
    done = engine.generate(requests_for(prompts, seeds, TWELVE))
    assert served.gap(prompts, done) <= 1e-5
    cold = engine.generate(requests_for(prompts, seeds, Sampling(12, temperature=0.3)))
    assert served.gap(prompts, cold, temperature=0.3) <= 1e-5
    greedy = engine.generate([Request(prompts[0], 9, Sampling(8, temperature=0.0))] * 2)
    assert greedy[0].token_ids == greedy[1].token_ids
    for prompt, completion in zip(prompts, done[::4], strict=True):
        plain = served.expected(prompt, completion.token_ids, mask=False)
        for replica in engine.replicas:
            assert replica.score(prompt, completion.token_ids) == pytest.approx(plain, abs=1e-5)


def test_which_server_answers_and_in_what_company_changes_no_bit(served: Served) -> None:
    """In float32: one server, the other, both, one request at a time, and the engine in this process."""
    one, other = (served.engine_of([s.url]) for s in served.servers)
    asked = many(served)
    expected = one.generate(asked)
    assert other.generate(asked) == expected
    both = served.engine_of([s.url for s in served.servers])
    assert both.generate(asked) == expected
    assert both.generate(asked[::-1])[::-1] == expected
    with both.stream() as stream:
        numbers = [stream.add_request(request) for request in asked[:16]]
        found: dict[int, Completion] = {}
        while stream.unfinished:
            found |= stream.step()
    assert [found[n] for n in numbers] == expected[:16]
    inside = VLLMEngine(served.settings, served.processor)
    inside.update_weights(served.tensors(), 0)
    assert ids_of(inside.generate(asked)) == ids_of(expected)


# runs ----------------------------------------------------------------------------------------


def short_run(folder: Path, engine: str, urls: Sequence[str] = ()) -> GRPOConfig:
    task = {
        "task": "shapes",
        "split": "train",
        "size": 200,
        "seed": 1,
        "kinds": ["colour", "shape"],
        "max_objects": 1,
    }
    return small_config(
        BASE,
        folder,
        data={"train": task},
        rewards=["exact_match"],
        rollout={
            "engine": engine,
            "server": {"urls": list(urls)},
            "prompts_per_step": 8,
            "num_generations": 4,
        },
        optim={"learning_rate": 1e-4},
        run={"max_steps": 3, "seed": 0, "report": False, "save_model": False},
    )


def test_runs_ask_for_the_same_samples_and_vllm_gives_the_same_completions(
    served: Served, tmp_path: Path
) -> None:
    urls = [s.url for s in served.servers]
    runs = {"transformers": (), "vllm": (), "one": urls[:1], "two": urls}
    for name, own in runs.items():
        trainer = GRPOTrainer(short_run(tmp_path / name, "vllm_server" if own else name, own))
        trainer.train()
        trainer.close()
    for step in (1, 2, 3):
        logged = {name: rollouts_of(tmp_path / name, step) for name in runs}
        seeds = [[row["seed"] for row in logged[name]] for name in runs]
        assert seeds[0] and all(own == seeds[0] for own in seeds)
        texts = {name: [row["completion"] for row in logged[name]] for name in runs}
        assert texts["one"] == texts["two"] == texts["vllm"]
    rewards = {name: [row["reward"] for row in rows_of(tmp_path / name)] for name in runs}
    assert rewards["one"] == rewards["two"] == rewards["vllm"]


def test_a_server_that_loaded_nothing_is_caught_before_a_sample(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that all arrived, and names the new version; the fixed completion that it scores has not moved."""
    engine = served.engine_of([s.url for s in served.servers])
    config = short_run(tmp_path, "vllm_server", ["unix:///unused"])
    learner = Learner(served.model, served.processor, config, 10, None)
    sync = VerifiedSync(engine, learner, config)
    sync.start()
    prompt = served.prompt("one", tiny.picture(1))
    done = engine.generate(requests_for([prompt], [range(2)], TWELVE))
    group = Group(0, prompt, tuple(done), (0.0, 1.0), (0.0, 0.0))
    original = {name: tensor.clone() for name, tensor in served.tensors()}
    try:
        canary = sync.canary([group])
        served.change("mlp", scale=1.001)
        assert sync.update(1, canary).problem is None
        canary = sync.canary([group])
        served.change("mlp", scale=1.001)
        bad = engine.pool.servers[1].url
        send = FileTransfer.send

        def skips_one(self: Any, clients: Any, tensors: Any, version: int) -> Any:
            outcome = dict(send(self, [c for c in clients if c.url != bad], tensors, version))
            (client,) = [c for c in clients if c.url == bad]
            send(self, [client], [], version)  # the new name alone
            return outcome | {bad: next(iter(outcome.values()))}

        monkeypatch.setattr(FileTransfer, "send", skips_one)
        with pytest.raises(
            GuardStop, match=rf"weight sync to version 2 on {bad}: .*the same to the last bit"
        ):
            sync.update(2, canary)
    finally:
        with torch.no_grad():
            for name, tensor in served.tensors():
                tensor.copy_(original[name])


# faults --------------------------------------------------------------------------------------


def faulty(engine: ServedEngine, asked: Sequence[Request], fault: Any) -> tuple[list[Completion], float]:
    """The completions of a step in which a fault comes when the first server is at work; and its seconds."""

    def later() -> None:
        while not engine.pool.servers[0].running:
            time.sleep(0.005)
        time.sleep(0.2)
        fault()

    thread = threading.Thread(target=later)
    started = time.monotonic()
    thread.start()
    done = engine.generate(asked)
    seconds = time.monotonic() - started
    thread.join()
    return done, seconds


def back(engine: ServedEngine, seconds: float = 150.0) -> float:
    """Wait until all servers are ready again; the seconds that the last one was lost."""
    end = time.monotonic() + seconds
    while len(engine.pool.ready()) < len(engine.pool.servers):
        assert time.monotonic() < end, engine.pool.describe()
        time.sleep(0.05)
    return engine.pool.recoveries[-1][1]


@pytest.fixture
def long_answers(served: Served) -> Iterator[None]:
    """Weights under which hardly a completion ends."""
    head = served.model.lm_head.weight
    kept = head.detach().clone()
    with torch.no_grad():
        head[sorted(served.processor.stop_token_ids)] = 0.0
    yield
    with torch.no_grad():
        head.copy_(kept)


@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("long_answers")
def test_kill_restart_stop_and_cut_change_no_sample(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    first = served.servers[0]
    proxy = Proxy(first.url)
    engine = served.engine_of([proxy.url, served.servers[1].url], health_timeout=4.0)
    asked = many(served, tokens=200, each=8)
    expected = engine.generate(asked)
    assert sum(len(c.token_ids) for c in expected) > 10_000
    said = []

    def kill() -> None:
        os.killpg(first.pid or 0, signal.SIGKILL)  # `serve` starts it anew

    def stop() -> None:
        os.killpg(first.pid or 0, signal.SIGSTOP)

    def go_on() -> None:
        os.killpg(first.pid or 0, signal.SIGCONT)

    for name, fault, ends in (
        ("stopped", stop, go_on),
        ("cut off", lambda: setattr(proxy, "silent", True), proxy.heal),
        ("killed", kill, lambda: None),
    ):
        done, seconds = faulty(engine, asked, fault)
        ends()
        assert done == expected, name  # ids, seeds, log-probs to the last bit, version
        said.append(f"{name}: the step took {seconds:.1f} s, the server was lost for {back(engine):.1f} s")
        assert seconds < 240, name  # the restart is not waited for for ever
    names = {
        ServerClient(s.url, timeout=10).call("/weight_info", method="GET")["weight_version"]
        for s in served.servers
    }
    assert len(names) == 1  # the new process was given the run's weights
    assert engine.generate(asked) == expected
    assert len(engine.pool.recoveries) >= 3  # more where a busy machine is late with an answer
    proxy.close()
    with capsys.disabled():
        print("\n  " + "\n  ".join(said))
