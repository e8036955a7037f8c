"""Weights to servers, both ends of it, with vLLM's part faked: what arrives, and what is noticed when it does not."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.fake_vllm import FakeModel, FakeVLLM, LedgerEngine, digests, fake_adapters
from helpers.patience import PATIENCE
from torch import Tensor

from mm_grpo.errors import ConfigError, GuardStop
from mm_grpo.rollout.served import plugin
from mm_grpo.rollout.served import transfer as transfer_module
from mm_grpo.rollout.served.broadcast import chunks
from mm_grpo.rollout.served.client import ServerClient, ServerError, ServerUnreachable
from mm_grpo.rollout.served.plugin import Account
from mm_grpo.rollout.served.transfer import BroadcastTransfer, FileTransfer, ServedTransfer, transfer_of
from mm_grpo.rollout.weights import WeightLedger

NAMES = ("head.weight", "layer.0.attn.q.weight", "layer.0.attn.k.weight", "layer.1.mlp.up.weight")
Both = tuple[ServedTransfer, list[FakeVLLM]]
Serve = Callable[..., FakeVLLM]


def weights(seed: int = 0) -> dict[str, Tensor]:
    """Those of NAMES, and one without an axis and one without an element."""
    torch.manual_seed(seed)
    odd = {"layer.1.scale": torch.rand(()).to(torch.bfloat16), "layer.1.none": torch.empty(0, 4)}
    return {name: torch.randn(6, 8) for name in NAMES} | odd


def equal(held: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return held.keys() == wanted.keys() and all(torch.equal(held[n], t) for n, t in wanted.items())


def clients(servers: Sequence[FakeVLLM]) -> list[ServerClient]:
    return [server.client for server in servers]


@pytest.fixture
def serve(held: ExitStack) -> Serve:
    """Servers that end with the test."""

    def made(kind: str = "file", workers: int = 1) -> FakeVLLM:
        server = FakeVLLM(kind, workers)
        held.callback(server.kill)
        return server

    return made


@pytest.fixture
def files(tmp_path: Path) -> Iterator[FileTransfer]:
    transfer = FileTransfer(str(tmp_path / "shared"), timeout=2 * PATIENCE)
    transfer.chunk_bytes = 200
    yield transfer
    transfer.close()


@pytest.fixture
def gloo() -> Iterator[BroadcastTransfer]:
    transfer = BroadcastTransfer(timeout=2 * PATIENCE)
    transfer.chunk_bytes = 200
    yield transfer
    transfer.close()


@pytest.fixture(params=["file", "gloo"])
def both(request: pytest.FixtureRequest, serve: Serve) -> Both:
    """A kind of transfer and two servers, the second with two workers."""
    servers = [serve(request.param), serve(request.param, workers=2)]
    transfer = request.getfixturevalue({"file": "files", "gloo": "gloo"}[request.param])
    return transfer, servers


def test_every_server_receives_every_tensor_to_the_last_bit(both: Both) -> None:
    transfer, servers = both
    for version in range(2):
        sent = weights(version)
        outcome = transfer.send(clients(servers), sent.items(), version)
        assert outcome == {server.url: digests(sent) for server in servers}
        for server in servers:
            assert all(equal(each.model.weights, sent) for each in server.workers)
    for server in servers:
        assert server.versions == [transfer.weights_name(version) for version in range(2)]
        assert server.caches == ["prefix", "encoder"] * 2
        assert not server.paused
        last = server.calls[-1 - server.calls[::-1].index("/pause") :]
        assert [c for c in last if c not in ("/update_weights", "/collective_rpc", "/weight_info")] == [
            "/pause",
            "/start_weight_update",
            "/finish_weight_update",
            "/reset_prefix_cache",
            "/reset_encoder_cache",
            "/resume",
            "/update_weight_version",
        ]
        assert last.count("/update_weights") == 4  # chunks of 200 bytes


def test_an_update_of_some_layers_or_of_none_leaves_the_others(both: Both) -> None:
    transfer, servers = both
    first = weights()
    transfer.send(clients(servers), first.items(), 0)
    part = {"head.weight": weights(1)["head.weight"]}
    assert transfer.send(clients(servers), part.items(), 1) == {s.url: digests(part) for s in servers}
    assert transfer.send(clients(servers), [], 2) == {server.url: {} for server in servers}
    for server in servers:
        assert server.versions[-1] == transfer.weights_name(2) and equal(server.weights, first | part)
    part = {NAMES[0]: torch.ones(6, 8)}
    assert transfer.send(clients(servers), part.items(), 3) == {s.url: digests(part) for s in servers}


def factors(*layers: int) -> dict[str, Tensor]:
    return {f"base_model.model.layer.{n}.up.lora_{x}.weight": torch.randn(4, 8) for n in layers for x in "AB"}


def test_factors_at_rest_stay_and_those_of_an_old_run_go(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_adapters(monkeypatch)
    transfer, servers = both
    base, held = weights(), factors(0, 1)
    wanted = {server.url: digests(base | held) for server in servers}
    assert transfer.send(clients(servers), (base | held).items(), 0) == wanted
    for version, part in enumerate((factors(1), {NAMES[0]: torch.ones(6, 8)}), 1):
        wanted = {server.url: digests(part) for server in servers}
        assert transfer.send(clients(servers), part.items(), version) == wanted
        held |= {name: tensor for name, tensor in part.items() if name in held}
        assert all(equal(each.model.adapter, held) for server in servers for each in server.workers)
    later = transfer_of(transfer.kind, timeout=2 * PATIENCE)
    fewer = factors(1)
    later.send(clients(servers), (base | fewer).items(), 0)
    for each in (each for server in servers for each in server.workers):
        assert equal(each.model.adapter, fewer) and equal(each.model.weights, base)
    later.close()


def test_an_adapter_is_not_put_into_layers_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_adapters(monkeypatch)
    account, model, sent = Account(), FakeModel(), factors(0)
    for _ in range(2):
        account.begin()
        account.put_factors(model)  # type: ignore[arg-type]
        assert not model.adapter
        for name, tensor in sent.items():
            account.note(name, tensor)
        account.end(model)  # type: ignore[arg-type]
    account.put_factors(model)  # type: ignore[arg-type]
    assert equal(model.adapter, sent) and account.digests == digests(sent)


def test_tensors_that_share_memory_or_lie_in_another_order_arrive(both: Both) -> None:
    transfer, servers = both
    tied = torch.randn(4, 6)
    sent = {"embed.weight": tied, "head.weight": tied, "rows.weight": tied[1:3], "turned.weight": tied.T}
    assert transfer.send(clients(servers), sent.items(), 0) == {s.url: digests(sent) for s in servers}
    tied.zero_()  # the learner goes on
    assert transfer.catch_up(servers[0].client) == digests(servers[1].weights)
    assert all(bool(held.any()) for held in servers[0].weights.values())


def test_a_chunk_is_filled_to_its_last_byte() -> None:
    sizes = {"a": 100, "b": 100, "c": 1, "d": 300, "e": 199}
    made = list(chunks(((name, torch.zeros(n, dtype=torch.uint8)) for name, n in sizes.items()), 200))
    assert [[name for name, _ in chunk] for chunk in made] == [["a", "b"], ["c"], ["d"], ["e"]]


def test_what_left_its_group_is_joined_again(gloo: BroadcastTransfer, serve: Serve) -> None:
    """A worker of two that gave its group up, and a server whose call was cut before its worker knew of it."""
    server = serve("gloo", workers=2)
    to = [server.client]
    gloo.send(to, weights().items(), 0)
    server.workers[1].shutdown()
    ends = {1: None, 2: server.url, 3: None}
    for version, url in ends.items():
        if url is not None:
            ends_at(server, 1, lambda: None)
        outcome, sent = gloo.send(to, weights(version).items(), version)[server.url], weights(version)
        assert isinstance(outcome, ServerError) if url else outcome == digests(sent)
        server.faults.clear()


def test_a_server_for_broadcasts_takes_files(files: FileTransfer, serve: Serve) -> None:
    server, sent = serve("gloo"), weights()
    assert files.send([server.client], sent.items(), 0) == {server.url: digests(sent)}


@pytest.mark.parametrize(("rank", "taken"), [(8, ["a"]), (9, [])])
def test_a_worker_names_its_lora_layers(rank: int, taken: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin.adapters, "supported_layers", lambda model, layers: {"a"} & set(layers))
    worker: Any = plugin.WorkerExtension()
    worker.get_model = lambda: None
    worker.vllm_config = SimpleNamespace(lora_config=SimpleNamespace(max_lora_rank=8))
    assert worker.mm_grpo_adapter_layers(json.dumps([["a", "b"], rank])) == taken
    worker.vllm_config.lora_config = None
    assert worker.mm_grpo_adapter_layers(json.dumps([["a", "b"], rank])) == []


def test_a_late_server_is_brought_to_what_was_sent_last(both: Both) -> None:
    files, (early, late) = both
    first, second = weights(), weights(1)
    files.send([early.client], first.items(), 0)
    part = {name: second[name] for name in NAMES[1:3]}
    files.send([early.client], part.items(), 1)
    assert files.catch_up(late.client) == digests(first | part)
    assert equal(late.weights, first | part) and late.versions == [files.weights_name(1)] and not late.paused


def test_files_go_once_newer_ones_hold_their_tensors(files: FileTransfer, serve: Serve) -> None:
    server = serve()
    for version in range(2):
        files.send([server.client], weights(version).items(), version)
        assert len(list(files.folder.glob("*.safetensors"))) == 4
    files.send([server.client], [(NAMES[0], torch.ones(6, 8))], 3)
    assert len(list(files.folder.glob("*.safetensors"))) == 4
    parent = files.folder.parent
    files.close()
    assert list(parent.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"rollout.server.folder = '.*file/below'"):
        FileTransfer(str(tmp_path / "file" / "below"))


FAULTS = [("file", "stale"), ("file", "altered"), ("gloo", "partial")]


@pytest.mark.parametrize(("both", "fault"), FAULTS, indirect=["both"])
def test_a_transfer_that_is_not_whole_stops_the_run(both: Both, fault: str) -> None:
    transfer, servers = both
    ledger, engine = WeightLedger(), LedgerEngine(transfer, clients(servers))
    ledger.send(engine, weights().items(), 0)  # type: ignore[arg-type]
    for server in servers:
        if fault == "stale":
            update = dict(path=_kept(transfer), names=list(NAMES))
            server.faults["/update_weights"] = lambda body, update=update: body["update_info"].update(update)
        for receiver in server.workers:
            if fault == "partial":
                _wrap(receiver, lambda pairs: [pair for pair in pairs if pair[0] != NAMES[1]])
            if fault == "altered":
                _wrap(receiver, lambda pairs: [(n, t + 1 if n == NAMES[2] else t) for n, t in pairs])
    expected = {
        "partial": f"1 never arrived: '{NAMES[1]}'",
        "stale": "arrived changed",
        "altered": f"1 arrived changed: '{NAMES[2]}'",
    }
    with pytest.raises(GuardStop, match=expected[fault]):
        ledger.send(engine, weights(1).items(), 1)  # type: ignore[arg-type]


def _kept(transfer: Any) -> str:
    """A file of version 0, where no update removes it."""
    from safetensors.torch import save_file

    path = transfer.folder / "older"
    save_file(weights(), path)
    return str(path)


def _wrap(receiver: Any, change: Any) -> None:
    """Let a receiver see other tensors than those that came."""
    for name in ("_from_file", "_from_group"):
        original = getattr(receiver, name)
        setattr(receiver, name, lambda info, original=original: iter(change(list(original(info)))))


def test_what_a_server_made_of_an_update_is_looked_at(files: FileTransfer, serve: Serve) -> None:
    differs, keeps = serve(workers=3), serve(workers=3)
    _wrap(differs.workers[2], lambda pairs: pairs[:-1])
    keeps.faults["/reset_prefix_cache"] = lambda body: {"success": False}
    outcome = files.send(clients([differs, keeps]), weights().items(), 1)
    assert "workers 0 and 2 received different tensors" in str(outcome[differs.url])
    assert "did not reset its prefix cache" in str(outcome[keeps.url])
    assert differs.paused and keeps.paused


def test_a_part_is_not_sent_to_a_server_with_an_older_version(files: FileTransfer, serve: Serve) -> None:
    server = serve()
    for version in (0, 1):
        files.send([server.client], weights(version).items(), version)
    server.versions.append(files.weights_name(0))
    outcome = files.send([server.client], [(NAMES[0], torch.ones(6, 8))], 2)
    assert "needs all of them" in str(outcome[server.url]) and server.versions[-1] == files.weights_name(0)


def ends_at(server: FakeVLLM, count: int, end: Callable[[], None]) -> None:
    """Cut call number `count` of /update_weights, once `end` was called."""
    seen: list[int] = []

    def fault(body: Any) -> None:
        seen.append(1)
        if len(seen) == count:
            end()
            raise ConnectionError

    server.faults["/update_weights"] = fault


def test_a_server_that_dies_in_mid_transfer_is_left_out_and_comes_back(both: Both) -> None:
    transfer, (good, bad) = both
    to = clients([good, bad])
    transfer.send(to, weights().items(), 0)
    ends_at(bad, 2, bad.kill)
    sent, started = weights(1), time.monotonic()
    outcome = transfer.send(to, sent.items(), 1)
    assert outcome[good.url] == digests(sent) and equal(good.weights, sent)
    assert isinstance(outcome[bad.url], ServerUnreachable)
    assert time.monotonic() - started < PATIENCE  # nobody waited for the deadline
    outcome = transfer.send(to, sent.items(), 2)
    assert outcome[good.url] == digests(sent) and "no connection" in str(outcome[bad.url])
    bad.restart()
    bad.faults.clear()
    sent = weights(2)
    assert transfer.send(to, sent.items(), 3) == {good.url: digests(sent), bad.url: digests(sent)}
    assert equal(bad.weights, sent)


@pytest.mark.slow
@pytest.mark.parametrize("of_broadcast", [0.9, 30.0])
def test_a_server_that_hangs_in_a_broadcast_costs_its_deadline(serve: Serve, of_broadcast: float) -> None:
    # the deadline of the broadcast or that of the call to the server: either may end first
    transfer = BroadcastTransfer(timeout=1.0)
    good, bad = serve("gloo"), serve("gloo")
    transfer.send(clients([good, bad]), weights().items(), 0)
    transfer._groups[bad.url].timeout = of_broadcast
    awake = threading.Event()
    bad.faults["/update_weights"] = lambda body: awake.wait(600) and None
    sent, started = weights(1), time.monotonic()
    try:
        outcome = transfer.send(clients([good, bad]), sent.items(), 1)
        assert outcome[good.url] == digests(sent)
        assert isinstance(outcome[bad.url], ServerError) and bad.url in str(outcome[bad.url])
        assert 0.8 < time.monotonic() - started < PATIENCE
    finally:
        awake.set()
        transfer.close()


def test_server_workers_have_ranks_after_the_learner(monkeypatch: pytest.MonkeyPatch, serve: Serve) -> None:
    made: list[tuple[Any, ...]] = []

    class Recorded:
        def __init__(
            self, backend: str, host: str, port: int, *, rank: int, size: int, **options: Any
        ) -> None:
            made.append((backend, host, port, rank, size, options["timeout"]))

        def abort(self) -> None:
            pass

    monkeypatch.setattr(transfer_module, "BroadcastGroup", Recorded)
    monkeypatch.setattr(plugin, "BroadcastGroup", Recorded)
    transfer = BroadcastTransfer("127.0.0.2", timeout=7.0)
    servers = [serve("gloo", workers=4), serve("gloo")]
    for index, each in enumerate(servers[0].workers):  # two replicas of two
        each.parallel_config.world_size, each.parallel_config.rank = 2, index % 2
        each.parallel_config.data_parallel_index = index // 2
    for server in servers:
        transfer.join(server.client, "name")
    transfer.close()
    ports = sorted({port for _, _, port, *_ in made})
    groups = [sorted((rank, size) for _, _, p, rank, size, _ in made if p == port) for port in ports]
    assert sorted(groups) == [[(0, 2), (1, 2)], [(rank, 5) for rank in range(5)]]
    assert {(one[0], one[1], one[5]) for one in made} == {("gloo", "127.0.0.2", 7.0)}


def test_the_transfer_follows_the_config(tmp_path: Path) -> None:
    chosen = [
        transfer_of("auto"),
        transfer_of("auto", device="cuda"),
        transfer_of("auto", device="cuda", folder=str(tmp_path)),
        transfer_of("auto", device="cuda", shared=True),
        transfer_of("gloo"),
    ]
    assert [t.kind for t in chosen] == ["file", "nccl", "file", "file", "gloo"]
    for transfer in chosen:
        transfer.close()
    with pytest.raises(ConfigError, match=r"rollout\.server\.transfer"):
        transfer_of("nccl")
    with pytest.raises(ConfigError, match=r"rollout\.server\.folder"):
        transfer_of("gloo", folder=str(tmp_path))
