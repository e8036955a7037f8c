"""Weights carried to real vLLM servers: what both hold after many updates, and after faults in the midst of one.

Three servers for the whole file, two in float32 and one in bfloat16. What they sample is tested elsewhere; here they
score fixed completions, text and images, against transformers.
"""

from __future__ import annotations

import base64
import io
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from torch import Tensor
from transformers import AutoModelForImageTextToText
from vllm_rig import Rig

from mm_grpo.processors.base import load_processor, mm_processor_kwargs
from mm_grpo.rollout.engine import Sampling, requests_for
from mm_grpo.rollout.served.client import ServerClient, ServerError
from mm_grpo.rollout.served.command import ServerSettings
from mm_grpo.rollout.served.engine import ServedEngine
from mm_grpo.rollout.served.launch import ServerProcess, serve
from mm_grpo.rollout.served.protocol import Limits, model_sizes
from mm_grpo.rollout.served.transfer import FileTransfer, GlooTransfer, ServedTransfer
from mm_grpo.rollout.vllm.launch import EngineSettings
from mm_grpo.rollout.weights import WeightLedger, digest
from mm_grpo.types import Prompt

pytestmark = pytest.mark.long

IDS = (5, 9, 17, 33)
NEAR = {"float32": 2e-5, "bfloat16": 0.08}
"""Largest gap of a log-prob to transformers' that rounding explains, in nats."""


class Learner(Rig):
    """The learner's half of a rig, with no engine in this process."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.processor = load_processor(str(path))
        self.model = AutoModelForImageTextToText.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
        self.dtype = dtype
        self.settings = EngineSettings(
            str(path),
            dtype,
            512,
            mm_processor_kwargs=tuple(mm_processor_kwargs(self.processor).items()),
            max_images=2,
            engine_kwargs=(("max_num_seqs", 8),),
        )
        self.pictured = self.prompt("one", tiny.picture(1))
        self.told = self.prompt("none", text="say something")

    def digests(self) -> dict[str, str]:
        return {name: digest(tensor) for name, tensor in self.tensors()}

    def gap(self, client: ServerClient) -> float:
        """How far a server's log-probs of a fixed completion are from transformers', with an image and without."""
        found = 0.0
        for prompt in (self.pictured, self.told):
            wanted = self.expected(prompt, IDS, mask=False)
            found = max(found, *(abs(a - b) for a, b in zip(score(client, prompt, IDS), wanted, strict=True)))
        return found


def score(client: ServerClient, prompt: Prompt, ids: Sequence[int]) -> list[float]:
    """A server's log-probs of `ids` after `prompt`."""
    parts = []
    for image in prompt.engine_prompt.images:
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
        parts.append({"type": "image_url", "url": url})
    body: dict[str, Any] = {
        "token_ids": [*prompt.engine_prompt.token_ids, *ids],
        "sampling_params": {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0},
    }
    answer = client.call("/inference/v1/generate", body | ({"content_parts": parts} if parts else {}))
    last = answer["prompt_logprobs"][-len(ids) :]
    return [entry[str(token)]["logprob"] for entry, token in zip(last, ids, strict=True)]


class Fleet:
    """The servers, their clients, and the two learners by dtype."""

    def __init__(self, servers: list[ServerProcess], learners: Mapping[str, Learner]) -> None:
        self.servers, self.learners = servers, learners
        self.clients = [ServerClient(server.url, timeout=60.0) for server in servers]

    def of(self, dtype: str) -> tuple[Learner, list[ServerClient]]:
        return self.learners[dtype], self.clients[:2] if dtype == "float32" else self.clients[2:]


@pytest.fixture(scope="module")
def fleet(models: dict[str, Path]) -> Iterator[Fleet]:
    learners = {dtype: Learner(models["qwen2_5_vl"], dtype) for dtype in NEAR}
    settings = [ServerSettings(learners[d].settings, "gloo") for d in ("float32", "float32", "bfloat16")]
    with serve(settings) as servers:
        found = Fleet(servers, learners)
        yield found
        for client in found.clients:
            client.close()


@pytest.fixture(params=["file", "gloo"])
def transfer(request: pytest.FixtureRequest) -> Iterator[ServedTransfer]:
    made = FileTransfer(timeout=60.0) if request.param == "file" else GlooTransfer(timeout=60.0)
    yield made
    made.close()


class Engine:
    """What a weight ledger sends to; every server has to have received the same."""

    holds_weights = True

    def __init__(self, transfer: ServedTransfer, clients: Sequence[ServerClient]) -> None:
        self.transfer, self.clients = transfer, clients

    def update_weights(self, tensors: Any, version: int) -> Any:
        outcome = self.transfer.send(self.clients, tensors, version)
        for value in outcome.values():
            if isinstance(value, Exception):
                raise value
        first, *others = outcome.values()
        assert all(other == first for other in others)
        return first


DTYPES = pytest.mark.parametrize("dtype", list(NEAR))


@DTYPES
def test_after_twenty_updates_servers_hold_the_learners_weights(
    fleet: Fleet, transfer: ServedTransfer, dtype: str
) -> None:
    learner, clients = fleet.of(dtype)
    ledger, engine = WeightLedger(), Engine(transfer, clients)
    ledger.send(engine, learner.tensors(), 0)  # type: ignore[arg-type]
    held = learner.digests()
    parts = ("visual", "self_attn", "mlp", "lm_head", "norm")
    for version in range(1, 21):
        learner.change(parts[version % 5], scale=0.98 if version % 2 else 1.03)
        sent = ledger.send(engine, learner.tensors(), version)  # type: ignore[arg-type]
        assert sent.digests and sent.skipped_bytes  # whole layers in which something changed, and no others
        held |= sent.digests
        assert held == learner.digests()
        if version % 5 == 0:
            gaps = [learner.gap(client) for client in clients]
            assert max(gaps) < NEAR[dtype], gaps
    for client in clients:
        name = client.call("/weight_info", method="GET")["weight_version"]
        assert name.endswith("20") and not client.call("/is_paused", method="GET")["is_paused"]


def test_an_engine_over_a_server_in_bfloat16_samples_and_scores_as_the_learner(fleet: Fleet) -> None:
    """A group, and one completion alone; what a server is asked when it joins is part of it."""
    dtype = "bfloat16"
    learner, clients = fleet.of(dtype)
    own = [ServerClient(client.url, timeout=60.0) for client in clients]
    sizes = model_sizes(learner.model.config)
    limits = Limits(health_timeout=20.0, wait_timeout=5.0, max_model_len=256, sizes=sizes)
    engine = ServedEngine(own, FileTransfer(timeout=60.0), learner.processor, limits=limits, max_images=2)
    try:
        found = [server.info.sizes for server in engine.pool.servers if server.info is not None]
        assert found == [sizes] * len(clients) and {"model_type", "text_config.hidden_size"} <= sizes.keys()
        WeightLedger().send(engine, learner.tensors(), 0)
        assert len(engine.pool.ready()) == len(clients)
        for prompt, count in ((learner.pictured, 4), (learner.told, 1)):
            done = engine.generate(requests_for([prompt], [range(count)], Sampling(8)))
            assert Rig.gap(learner, [prompt], done) < NEAR[dtype]
            wanted = learner.expected(prompt, done[0].token_ids, mask=False)
            assert engine.score(prompt, done[0].token_ids) == pytest.approx(wanted, abs=NEAR[dtype])
    finally:
        engine.close()


def test_a_server_that_another_models_trainer_spoilt_takes_the_next_whole_update(fleet: Fleet) -> None:
    """It fails within a fused layer, of which one source has arrived."""
    learner, clients = fleet.of("float32")
    tensors = list(learner.tensors())
    at = next(i for i, (name, _) in enumerate(tensors) if "language_model" in name and "k_proj" in name)
    others = [*tensors[:at], (tensors[at][0], torch.ones(24, 40)), *tensors[at + 1 :]]
    stranger, transfer = (FileTransfer(timeout=60.0, chunk_bytes=1 << 14) for _ in range(2))
    try:
        refused = stranger.send(clients, [(n, t.clone() * 1.5) for n, t in others], 0)
        assert all(isinstance(refused[client.url], ServerError) for client in clients)
        learner.change("mlp", scale=1.02)
        sent = transfer.send(clients, learner.tensors(), 1)
        assert sent == {client.url: learner.digests() for client in clients}
        assert max(learner.gap(client) for client in clients) < NEAR["float32"]
    finally:
        stranger.close()
        transfer.close()


def test_a_server_killed_in_mid_transfer_comes_back_with_the_newest_weights(fleet: Fleet) -> None:
    learner, (good, bad) = fleet.of("float32")
    server = fleet.servers[1]
    transfer = GlooTransfer(timeout=120.0, chunk_bytes=1 << 18)
    transfer.send([good, bad], learner.tensors(), 0)
    learner.change("self_attn", scale=1.02)

    def cut(tensors: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for place, pair in enumerate(tensors):
            if place == len(tensors) // 2:
                assert server.pid is not None
                os.killpg(server.pid, signal.SIGKILL)
            yield pair

    started = time.monotonic()
    outcome = transfer.send([good, bad], cut(list(learner.tensors())), 1)
    assert time.monotonic() - started < 60.0  # nobody waited for the deadline
    assert outcome[good.url] == learner.digests() and learner.gap(good) < NEAR["float32"]
    assert isinstance(outcome[bad.url], Exception)
    transfer.close()
    files = FileTransfer(timeout=60.0)
    try:
        learner.change("self_attn", scale=1.02)
        files.send([good], learner.tensors(), 2)
        started = time.monotonic()
        server.start()
        server.wait_ready(120.0)
        ready = time.monotonic()
        caught = files.catch_up([bad])
        print(f"restarted in {ready - started:.1f} s, brought up in {time.monotonic() - ready:.2f} s")
        assert caught == {bad.url: learner.digests()}
        assert learner.gap(bad) < NEAR["float32"]
    finally:
        files.close()


def test_requests_wait_through_an_update_and_go_on_under_the_new_weights(fleet: Fleet) -> None:
    learner, (client, _) = fleet.of("float32")
    transfer = FileTransfer(timeout=60.0)
    transfer.send([client], learner.tensors(), 7)
    prompt = learner.told.engine_prompt
    params = {"max_tokens": 400, "seed": 3, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
    body = {"token_ids": list(prompt.token_ids), "sampling_params": params}
    soon, late = 0.0, 60.0
    delay = 0.3
    for version in range(8, 28):
        asked = client.submit("/inference/v1/generate", body)
        time.sleep(delay)
        learner.change("mlp", scale=1.01)
        transfer.send([client], learner.tensors(), version)
        (choice,) = asked.result(60)["choices"]
        assert len(choice["token_ids"]) == 400
        if len(spans := choice["weight_versions"]) == 2:
            break
        if spans[0]["version"] == transfer.weights_name(version):  # the update came before its first token
            soon = delay
        else:  # after its last
            late = delay
        delay = min(2 * delay, 60.0) if late == 60.0 else (soon + late) / 2
    assert [span["version"] for span in spans] == [
        transfer.weights_name(version - 1),
        transfer.weights_name(version),
    ]
    assert 0 < spans[0]["end"] == spans[1]["start"] < spans[1]["end"] == 400
    assert learner.gap(client) < NEAR["float32"]
    transfer.close()
