"""Real vLLM servers: samples, weights, adapters, a key, and a run in which one is killed.

Two for the whole file serve the base model of the shapes recipe in float32, with LoRA layers: one at a socket, and one
at a port with a key. What fails over in which way is tested quickly in rollout/test_served_*.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
import torch
from engines.test_vllm_lost_updates import Run
from helpers import forkserver, processes, tiny
from helpers.fake_vllm import LedgerEngine
from helpers.run_folders import metrics_of
from helpers.run_folders import rollouts_of as texts_of
from helpers.small_runs import rollouts_of
from transformers import AutoModelForImageTextToText
from vllm_rig import Rig

from mm_grpo import GRPOConfig
from mm_grpo.cli.serve import server_settings
from mm_grpo.errors import GuardStop
from mm_grpo.learner.learner import Learner
from mm_grpo.parity.sync import VerifiedSync
from mm_grpo.processors.base import load_processor
from mm_grpo.rollout.engine import Request, Sampling, requests_for
from mm_grpo.rollout.seeds import SeedPlan
from mm_grpo.rollout.served import launch
from mm_grpo.rollout.served.client import ServerClient, ServerError, in_background, wait
from mm_grpo.rollout.served.engine import ServedEngine
from mm_grpo.rollout.served.launch import ServerProcess, serve
from mm_grpo.rollout.served.protocol import RECEIVED, ServerLimits, ask, model_sizes
from mm_grpo.rollout.served.transfer import BroadcastTransfer, FileTransfer, ServedTransfer
from mm_grpo.rollout.vllm.engine import VLLMEngine
from mm_grpo.rollout.vllm.requests import EngineRequest
from mm_grpo.rollout.weights import WeightLedger, digest
from mm_grpo.types import Completion, Group

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
RECIPE, BASE = ROOT / "examples/shapes/config.yaml", ROOT / "examples/shapes/base"
SCRIPT = ROOT / "tests/distributed/runs.py"
STEPS, PROMPTS, GENERATIONS = 3, 8, 4
TWELVE = Sampling(max_tokens=12)
NEAR = 2e-5
"""Largest gap of a log-prob to transformers' that rounding explains, in nats."""
KEY = "the-key-of-this-test"
IDS = (5, 9, 17, 33)
SERVER = (*forkserver.VLLM, "vllm.entrypoints.launchers.api_server.entry", "vllm.v1.engine.async_llm")
"""What a server imports before it starts its engine, in a process of its own that imports it all again."""


class Half(Rig):
    """The learner's half of a rig, and its servers; `engine_of` makes an engine over some of them."""

    shift = 0.0

    def __init__(self, servers: list[ServerProcess], said: list[str]) -> None:
        self.servers, self.said = servers, said
        self.processor = load_processor(str(BASE))
        self.model = AutoModelForImageTextToText.from_pretrained(BASE, dtype=torch.float32).eval()
        self.original = {name: tensor.clone() for name, tensor in self.tensors()}
        self.urls = [server.url for server in servers]
        self.clients = [ServerClient(url, key=KEY, timeout=60.0) for url in self.urls]
        self.engines: list[ServedEngine] = []

    def engine_of(
        self, urls: Sequence[str], transfer: ServedTransfer | None = None, **limits: Any
    ) -> ServedEngine:
        given = {"probe_timeout": 20.0, "wait_timeout": 120.0, "max_model_len": 512, **limits}
        engine = ServedEngine(
            [ServerClient(url, key=KEY, timeout=60) for url in urls],
            transfer or FileTransfer(timeout=60.0),
            self.processor,
            limits=ServerLimits(**given),
            max_media={"image": 3, "video": 1},
        )
        self.engines.append(engine)
        WeightLedger().send(engine, self.tensors(), 0)
        return engine

    def digests(self) -> dict[str, str]:
        return {name: digest(tensor) for name, tensor in self.tensors()}

    def put_back(self) -> None:
        while self.engines:
            self.engines.pop().close()
        for name, tensor in self.tensors():
            tensor.copy_(self.original[name])

    def scored(self, client: ServerClient) -> float:
        """How far a server's log-probs of fixed completions are from transformers', under the weights that it has."""
        found = 0.0
        for prompt in (self.prompt("one", tiny.picture(1)), self.prompt("none", text="say something")):
            sent, params = prompt.engine_prompt, {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
            work = EngineRequest("row", (*sent.token_ids, *IDS), sent.media, params)
            answer = wait(in_background(ask(client, str(BASE), work, 60.0)))
            expected = self.expected(prompt, IDS, mask=False)
            pairs = zip(answer.prompt_logprobs[-len(IDS) :], expected, strict=True)
            found = max(found, *(abs(theirs - ours) for theirs, ours in pairs if theirs is not None))
        return found


def forked(command: list[str], *, env: dict[str, str], stdout: Any, **_: Any) -> forkserver.Forked:
    """In the place of subprocess.Popen: the imports of the server's own process are done."""
    return forkserver.start(command[2:], env=env, cwd=ROOT, stdout=stdout, stderr=stdout, preload=SERVER)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Half]:
    folder, said = tmp_path_factory.mktemp("servers"), list[str]()
    config = GRPOConfig.from_yaml(recipe_config(folder / "unused", ["unix:///unused"]))
    settings = [
        replace(
            one,
            transfer="gloo",
            host=host,
            port=processes.free_port(),
            engine=replace(one.engine, max_model_len=512, max_images=3, max_videos=1, lora_rank=8),
        )
        for one, host in zip(server_settings(config, 2), (None, "127.0.0.1"), strict=True)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MM_GRPO_SERVER_KEY", KEY)
        patch.setattr(launch, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": forked}))
        with serve(settings, log_folder=folder / "logs", report=said.append) as servers:
            yield Half(servers, said)


@pytest.fixture
def half(fleet: Half) -> Iterator[Half]:
    yield fleet
    fleet.put_back()


def many(half: Half, count: int = 12, tokens: int = 12, each: int = 4) -> list[Request]:
    prompts = [half.prompt(f"p{i}", tiny.picture(i)) for i in range(count)]
    return requests_for(prompts, [range(100 * i, 100 * i + each) for i in range(count)], Sampling(tokens))


def test_ids_logprobs_and_scores_are_the_learners(half: Half) -> None:
    sizes = model_sizes(half.model.config)
    engine = half.engine_of(half.urls, sizes=sizes)
    assert {"model_type", "text_config.hidden_size"} <= sizes.keys()
    prompts = half.prompts()
    seeds = [range(1000 * i, 1000 * i + 4) for i in range(3)]
    done = engine.generate(requests_for(prompts, seeds, TWELVE))
    assert half.gap(prompts, done) <= NEAR
    cold = engine.generate(requests_for(prompts, seeds, Sampling(12, temperature=0.3)))
    assert half.gap(prompts, cold, temperature=0.3) <= NEAR / 0.3
    greedy = engine.generate([Request(prompts[0], 9, Sampling(8, temperature=0.0))] * 2)
    assert greedy[0].token_ids == greedy[1].token_ids
    for prompt, completion in zip(prompts, done[::4], strict=True):
        plain = half.expected(prompt, completion.token_ids, mask=False)
        for replica in engine.replicas:
            assert replica.score(prompt, completion.token_ids) == pytest.approx(plain, abs=NEAR)


def test_frames_and_their_times_reach_the_servers(half: Half) -> None:
    """Equal frames at other times have other positions, and other log-probs."""
    slow = tiny.video(1, 6, fps=0.9)
    prompts = [
        half.prompt("film", videos=(tiny.video(1, 6),)),
        half.prompt("slow", videos=(slow,)),
        half.prompt("both", tiny.picture(1), videos=(tiny.video(2, 5, 112, 56, fps=3.0),)),
    ]
    engine = half.engine_of(half.urls)
    done = engine.generate(requests_for(prompts, [range(50 * i, 50 * i + 4) for i in range(3)], TWELVE))
    assert half.gap(prompts, done) <= NEAR
    assert half.gap(prompts[1:2], done[:4]) > 10 * NEAR


def test_which_server_answers_and_in_what_company_changes_no_bit(half: Half) -> None:
    """In float32: one server, the other, both, one request at a time, and the engine in this process."""
    one, other = (half.engine_of([url]) for url in half.urls)
    asked = many(half)
    expected = one.generate(asked)
    assert other.generate(asked) == expected
    both = half.engine_of(half.urls)
    assert both.generate(asked) == expected
    assert both.generate(asked[::-1])[::-1] == expected
    with both.stream() as stream:
        numbers = [stream.add_request(request) for request in asked[:16]]
        found: dict[int, Completion] = {}
        while stream.unfinished:
            found |= stream.step()
    assert [found[n] for n in numbers] == expected[:16]
    inside = VLLMEngine(half.servers[0].settings.engine, half.processor)
    inside.update_weights(half.tensors(), 0)
    assert [c.token_ids for c in inside.generate(asked)] == [c.token_ids for c in expected]
    inside.close()


@pytest.mark.parametrize("kind", [FileTransfer, BroadcastTransfer])
def test_after_many_updates_servers_hold_the_learners_weights(half: Half, kind: type[ServedTransfer]) -> None:
    transfer = kind(timeout=60.0)
    ledger, engine = WeightLedger(), LedgerEngine(transfer, half.clients)
    ledger.send(engine, half.tensors(), 0)  # type: ignore[arg-type]
    held = half.digests()
    for version, part in enumerate(("visual", "self_attn", "mlp", "lm_head", "norm", "visual"), 1):
        half.change(part, scale=0.98 if version % 2 else 1.03)
        sent = ledger.send(engine, half.tensors(), version)  # type: ignore[arg-type]
        # whole layers in which something changed, and no others
        assert 0 < len(sent.digests) < len([*half.tensors()])
        held |= sent.digests
        assert held == half.digests()
    transfer.close()
    for client in half.clients:
        assert half.scored(client) < NEAR
        name = client.call("/weight_info", method="GET")["weight_version"]
        assert name.endswith(":6") and not client.call("/is_paused", method="GET")["is_paused"]


def test_a_server_that_another_models_trainer_spoilt_takes_the_next_whole_update(half: Half) -> None:
    """It fails within a fused layer, of which one source has arrived."""
    tensors = list(half.tensors())
    keys = (i for i, (n, _) in enumerate(tensors) if "language_model" in n and "k_proj.weight" in n)
    at = next(keys)
    others = [*tensors[:at], (tensors[at][0], torch.ones(24, 40)), *tensors[at + 1 :]]
    stranger, transfer = (FileTransfer(timeout=60.0) for _ in range(2))
    stranger.chunk_bytes = transfer.chunk_bytes = 1 << 14
    try:
        refused = stranger.send(half.clients, [(n, t.clone() * 1.5) for n, t in others], 0)
        assert all(isinstance(refused[url], ServerError) for url in half.urls)
        half.change("mlp", scale=1.02)
        sent = transfer.send(half.clients, half.tensors(), 1)
        assert sent == {url: half.digests() for url in half.urls}
        assert max(half.scored(client) for client in half.clients) < NEAR
    finally:
        stranger.close()
        transfer.close()


def test_a_server_that_loaded_nothing_is_caught_before_a_sample(
    half: Half, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that all arrived, and names the new version; the fixed completion that it scores has not moved."""
    engine = half.engine_of(half.urls)
    config = GRPOConfig.from_yaml(recipe_config(tmp_path / "r", ["unix:///unused"]))
    sync = VerifiedSync(engine, Learner(half.model, half.processor, config, 10, None), config)
    sync.start()
    prompt = half.prompt("one", tiny.picture(1))
    sync.calibrate(prompt)
    done = engine.generate(requests_for([prompt], [range(2)], TWELVE))
    group = Group(0, prompt, tuple(done), (0.0, 1.0), (0.0, 0.0))
    canary = sync.canary([group])
    half.change("mlp", scale=1.001)
    assert sync.update(1, canary).problem is None
    canary = sync.canary([group])
    half.change("mlp", scale=1.001)
    bad, send = half.urls[1], FileTransfer.send

    def skips_one(self: Any, clients: Any, tensors: Any, version: int) -> Any:
        outcome = dict(send(self, [c for c in clients if c.url != bad], tensors, version))
        (client,) = [c for c in clients if c.url == bad]
        send(self, [client], [], version)  # the new name alone
        return outcome | {bad: next(iter(outcome.values()))}

    monkeypatch.setattr(FileTransfer, "send", skips_one)
    with pytest.raises(GuardStop, match=rf"weight sync to version 2 on {bad}: .*the same to the last bit"):
        sync.update(2, canary)


def test_servers_run_the_adapters_themselves(half: Half) -> None:
    rollout = {"engine": "vllm_server", "vllm": {"max_model_len": 512}}
    rollout["server"] = {"urls": half.urls, "transfer": "gloo", "share_gpus": True}
    half.clients[0].call("/sleep", params={"level": "1"})  # as a run that was killed leaves it
    run, ids = Run(BASE, 1e-3, "float32", lora=8, rollout=rollout), tuple(range(20, 44))
    assert run.learner.factored == set(run.learner.adapted_layers)
    whole, found = sum(p.numel() * p.element_size() for p in half.model.parameters()), list[list[float]]()
    for version in range(1, 4):
        run.engine.sleep()  # the base stays
        report = run.update(version)
        assert report.problem is None and 0 < report.bytes < whole / 3
        (ours,) = run.learner.score(run.prompts[0], [ids])
        for replica in run.engine.replicas:
            assert replica.score(run.prompts[0], ids) == pytest.approx(ours, abs=NEAR)
        found.append(ours)
    assert max(abs(a - b) for a, b in zip(found[0], found[-1], strict=True)) > 100 * NEAR
    run.engine.close()


def test_every_endpoint_of_a_server_at_a_port_wants_the_key(half: Half) -> None:
    server, client, right = half.servers[1], half.clients[1], {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, timeout=10.0, trust_env=False) as plain:
        routes = plain.get("/openapi.json", headers=right).json()["paths"]
        asked = [(method.upper(), path) for path, methods in routes.items() for method in methods]
        assert {("POST", "/pause"), ("POST", "/update_weights"), ("POST", "/collective_rpc")} <= set(asked)
        asked += [("GET", "/metrics"), ("GET", "/openapi.json"), ("GET", "/docs"), ("OPTIONS", "/pause")]
        for method, path in asked:
            for headers in ({}, {"authorization": "Bearer wrong"}):
                answer = plain.request(method, path, headers=headers)
                assert answer.status_code == 401, (method, path, headers)
        assert plain.get("/is_paused", headers=right).json() == {"is_paused": False}
    assert client.call("/collective_rpc", {"method": RECEIVED, "other": "x" * (8 << 20)})["results"]
    assert KEY not in str((psutil.Process(server.pid).cmdline(), server.log.read_text()))


def recipe_config(
    folder: Path, urls: list[str], *, stage: int = 2, lora: dict[str, Any] | None = None, **run: Any
) -> Path:
    values = GRPOConfig.from_yaml(RECIPE).model_dump()
    values["data"]["eval"] = None
    values["model"] |= {"dtype": "float32", "device": "cpu", "lora": lora}
    values["rollout"] |= {
        "engine": "vllm_server", "prompts_per_step": PROMPTS, "num_generations": GENERATIONS,
    }  # fmt: skip
    values["rollout"]["server"] |= {"urls": urls, "timeout": 60.0, "share_gpus": "shared" in folder.name}
    values["optim"] |= {"zero_stage": stage, "adam_epsilon": 1e-4}
    values["run"] |= {
        "dir": str(folder), "max_steps": STEPS, "eval_every": 0, "save_every": 0, "report": False, "sight_every": 0,
        "eval_blind": None, "expected_curve": None, "headline": None, **run,
    }  # fmt: skip
    file = folder.with_suffix(".yaml")
    GRPOConfig.from_dict(values).save(file)
    return file


def held_by(client: ServerClient) -> tuple[str, dict[str, str]]:
    """The name of the weights that a server holds, and the digests of what its worker received."""
    (account,) = client.call("/collective_rpc", {"method": "mm_grpo_received"})["results"]
    return client.call("/weight_info", method="GET")["weight_version"], account["digests"]


def test_two_ranks_of_stage_3_are_killed_and_resumed(half: Half, tmp_path: Path) -> None:
    """The servers run the adapters; both ranks end by SIGKILL when three rows are logged."""
    engine = half.engine_of(half.urls)
    # an earlier run left another base, so this run sends its own once
    engine.update_weights([(name, tensor + 0.01) for name, tensor in half.tensors()], 1)
    assert engine.base_replaced
    for name in ("straight", "killed"):
        folder, log = tmp_path / name, tmp_path / name / "metrics.jsonl"
        changes = {"stage": 3, "lora": {"rank": 8}, "max_steps": 5, "save_every": 2, "sight_every": 1}
        config = recipe_config(folder, half.urls, **changes)
        if name == "killed":
            kill = (None, lambda log=log: log.exists() and log.read_bytes().count(b"\n") > 3)
            codes = processes.launch(SCRIPT, 2, [config], tmp_path / "of-killed", deadline=300, kill=kill)
            assert codes == [-signal.SIGKILL] * 2 and len(texts_of(folder)) < 5
        codes = processes.launch(SCRIPT, 2, [config], tmp_path / f"of-{name}", deadline=300)
        assert codes == [0, 0], processes.outputs(tmp_path / f"of-{name}", 2)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert len(texts_of(straight)) == 5 and texts_of(killed) == texts_of(straight)
    assert metrics_of(killed) == metrics_of(straight)
    sizes = [row["sync/bytes"] for row in metrics_of(straight) if "sync/bytes" in row]
    assert max(sizes) < 4 * sum(p.numel() for p in half.model.parameters()) / 3


def test_two_ranks_that_lose_a_server_make_the_run_of_one(half: Half, tmp_path: Path) -> None:
    """Two ranks under DeepSpeed ZeRO-2 over two servers that sleep, or of which one is killed after two steps."""
    log, ended = tmp_path / "killed" / "metrics.jsonl", threading.Event()

    def kill() -> None:
        while not ended.wait(0.01):
            if log.exists() and log.read_bytes().count(b"\n") >= 2:
                os.killpg(half.servers[0].pid or 0, signal.SIGKILL)
                return

    killer = threading.Thread(target=kill, daemon=True)
    for name, world in (("one", 1), ("shared", 2), ("killed", 2)):
        config = recipe_config(tmp_path / name, half.urls)
        if name == "killed":
            killer.start()
        codes = processes.launch(SCRIPT, world, [config], tmp_path / f"of-{name}", deadline=600)
        assert codes == [0] * world, processes.outputs(tmp_path / f"of-{name}", world)
        model = AutoModelForImageTextToText.from_pretrained(tmp_path / name / "model", dtype=torch.float32)
        learned = {key: digest(t.detach()) for key, t in model.named_parameters(remove_duplicate=False)}
        for version, digests in map(held_by, half.clients[name == "killed" :]):
            assert version.endswith(f":{STEPS}")
            assert len(digests) > 90 and digests.items() <= learned.items()
    ended.set()
    killer.join()
    assert "it is restarted" in half.said[0]
    plan = SeedPlan(run_seed=0, prompts=PROMPTS, generations=GENERATIONS, attempts=1, max_steps=STEPS)
    for step in range(1, STEPS + 1):
        rows = rollouts_of(tmp_path / "killed", step)
        assert [r["seed"] for r in rows] == [s for slot in range(PROMPTS) for s in plan.group(step, slot)]
        assert {json.dumps(row["weight_versions"]) for row in rows} == {f"[[0, {step - 1}]]"}
        file = f"rollouts/step-{step:06d}.jsonl"
        bytes_of = {n: (tmp_path / n / file).read_bytes() for n in ("one", "shared", "killed")}
        assert bytes_of["one"] == bytes_of["shared"] == bytes_of["killed"]
    for server in half.servers:  # asked to sleep and to wake
        assert "POST /sleep?level=2" in server.log.read_text()
    killed = metrics_of(tmp_path / "killed")
    assert sum(row["served/losses"] for row in killed) == 1
    for mine, alone in zip(killed, metrics_of(tmp_path / "one"), strict=True):
        assert (mine["reward"], mine["num_tokens"]) == (alone["reward"], alone["num_tokens"])
        assert mine["learner/update_norm"] == pytest.approx(alone["learner/update_norm"], rel=1e-3)
