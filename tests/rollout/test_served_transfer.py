"""Weights to servers, both ends of it, with vLLM's part faked: what arrives, and what is noticed when it does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fake_servers import FakeServer
from helpers.patience import PATIENCE
from torch import Tensor

from mm_grpo.errors import ConfigError, EngineError, GuardStop
from mm_grpo.rollout.served import plugin_engines
from mm_grpo.rollout.served import transfer as transfer_module
from mm_grpo.rollout.served.chunks import Meta, chunks, pack, unpack
from mm_grpo.rollout.served.client import ServerError, ServerUnreachable
from mm_grpo.rollout.served.transfer import FileTransfer, GroupTransfer, ServedTransfer, transfer_of
from mm_grpo.rollout.weights import WeightLedger, digest

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
NAMES = ("head.weight", "layer.0.attn.q.weight", "layer.0.attn.k.weight", "layer.1.mlp.up.weight")


def weights(dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn(6, 8).to(dtype) for name in NAMES}


def digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in tensors.items()}


def equal(held: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return held.keys() == wanted.keys() and all(torch.equal(held[n], t) for n, t in wanted.items())


@pytest.fixture
def files(tmp_path: Path) -> Iterator[FileTransfer]:
    transfer = FileTransfer(str(tmp_path / "shared"), timeout=2 * PATIENCE, chunk_bytes=200)
    yield transfer
    transfer.close()


@pytest.fixture
def gloo() -> Iterator[GroupTransfer]:
    transfer = GroupTransfer("gloo", timeout=2 * PATIENCE, chunk_bytes=200)
    yield transfer
    transfer.close()


def two(kind: str = "file", workers: int = 1) -> list[FakeServer]:
    return [FakeServer(f"http://fake:{port}", kind, workers) for port in (1, 2)]


@pytest.fixture(params=["file", "gloo"])
def both(request: pytest.FixtureRequest) -> tuple[ServedTransfer, list[FakeServer]]:
    """A kind of transfer and two servers that joined it, the second with two workers."""
    servers = [
        FakeServer("http://fake:1", request.param),
        FakeServer("http://fake:2", request.param, workers=2),
    ]
    transfer = request.getfixturevalue({"file": "files", "gloo": "gloo"}[request.param])
    transfer.connect(servers)
    return transfer, servers


class Engine:
    """What the weight ledger sends to: the first server's digests are the engine's."""

    holds_weights = True

    def __init__(self, transfer: ServedTransfer, servers: list[FakeServer]) -> None:
        self.transfer, self.servers = transfer, servers

    def update_weights(self, tensors: Any, version: int) -> Any:
        outcome = self.transfer.send(self.servers, tensors, version)  # type: ignore[arg-type]
        for value in outcome.values():
            if isinstance(value, Exception):
                raise value
        return outcome[self.servers[0].url]


# what arrives --------------------------------------------------------------------------------


@DTYPES
def test_every_server_receives_every_tensor_to_the_last_bit(
    both: tuple[ServedTransfer, list[FakeServer]], dtype: torch.dtype
) -> None:
    transfer, servers = both
    for version in range(3):
        sent = weights(dtype, version)
        outcome = transfer.send(servers, sent.items(), version)  # type: ignore[arg-type]
        assert outcome == {server.url: digests(sent) for server in servers}
        for server in servers:
            assert all(equal(each.model.weights, sent) for each in server.workers)
    for server in servers:
        assert server.versions == [transfer.weights_name(version) for version in range(3)]
        assert server.caches == ["prefix", "encoder"] * 3
        assert not server.paused
        last = server.calls[-1 - server.calls[::-1].index("/pause") :]
        assert [c for c in last if c not in ("/update_weights", "/collective_rpc")] == [
            "/pause",
            "/start_weight_update",
            "/finish_weight_update",
            "/reset_prefix_cache",
            "/reset_encoder_cache",
            "/resume",
        ]
        assert last.count("/update_weights") == (4 if dtype == torch.float32 else 2)  # chunks of 200 bytes


def test_an_update_of_some_layers_leaves_the_others(both: tuple[ServedTransfer, list[FakeServer]]) -> None:
    transfer, servers = both
    first, second = weights(torch.float32), weights(torch.float32, 1)
    transfer.send(servers, first.items(), 0)  # type: ignore[arg-type]
    part = {"head.weight": second["head.weight"]}
    assert transfer.send(servers, part.items(), 1) == {s.url: digests(part) for s in servers}  # type: ignore[arg-type]
    assert all(equal(server.weights, first | part) for server in servers)


def test_an_update_in_which_nothing_changed_names_the_weights_anew(
    both: tuple[ServedTransfer, list[FakeServer]],
) -> None:
    transfer, servers = both
    sent = weights(torch.float32)
    transfer.send(servers, sent.items(), 0)  # type: ignore[arg-type]
    assert transfer.send(servers, [], 1) == {server.url: {} for server in servers}  # type: ignore[arg-type]
    for server in servers:
        assert server.versions[-1] == transfer.weights_name(1) and equal(server.weights, sent)
        assert {each.account.weights_name for each in server.workers} == {transfer.weights_name(1)}
    part = {NAMES[0]: torch.ones(6, 8)}
    assert transfer.send(servers, part.items(), 2) == {s.url: digests(part) for s in servers}  # type: ignore[arg-type]


def test_chunks_hold_every_dtype_and_shape_and_no_more_than_their_limit() -> None:
    tensors = {
        "scalar": torch.tensor(3.5),
        "half": torch.randn(3, 5).to(torch.bfloat16),
        "none": torch.empty(0, 4),
        "strided": torch.arange(24.0).view(4, 6).t(),
        "flags": torch.tensor([True, False, True]),
        "large": torch.randn(100),
        "whole": torch.arange(7),
    }
    parts = list(chunks(tensors.items(), limit=128))
    assert [[name for name, _ in part] for part in parts] == [
        ["scalar", "half", "none"],
        ["strided", "flags"],
        ["large"],
        ["whole"],
    ]
    for part in parts:
        metas = [Meta.from_json(Meta.of(name, tensor).as_json()) for name, tensor in part]
        for name, tensor in unpack(pack(part, "cpu"), metas):
            assert tensor.dtype == tensors[name].dtype and tensor.shape == tensors[name].shape
            assert torch.equal(tensor, tensors[name])
    with pytest.raises(ValueError, match="a chunk of 16 bytes was announced, and 15 came"):
        list(unpack(torch.zeros(15, dtype=torch.uint8), [Meta("x", "float32", (3,))]))


# files ---------------------------------------------------------------------------------------


def test_a_late_server_is_brought_to_what_was_sent_last(files: FileTransfer) -> None:
    early, late = two()
    assert files.catch_up([late]) is None  # nothing was sent
    files.connect([early])
    first, second = weights(torch.float32), weights(torch.float32, 1)
    files.send([early], first.items(), 0)  # type: ignore[list-item]
    part = {name: second[name] for name in NAMES[1:3]}
    files.send([early], part.items(), 1)  # type: ignore[list-item]
    files.connect([late])
    assert files.catch_up([late]) == {late.url: digests(first | part)}  # type: ignore[list-item]
    assert equal(late.weights, first | part) and late.versions == [files.weights_name(1)] and not late.paused


def test_files_go_once_newer_ones_hold_their_tensors_and_all_in_the_end(files: FileTransfer) -> None:
    (server, _) = two()
    files.connect([server])

    def held() -> int:
        return len(list(files.folder.glob("*.safetensors")))

    for version in range(3):
        files.send([server], weights(torch.float32, version).items(), version)  # type: ignore[list-item]
        assert held() == 4
    files.send([server], [(NAMES[0], torch.ones(6, 8))], 3)  # type: ignore[list-item]
    assert held() == 4
    parent = files.folder.parent
    assert list(parent.iterdir()) == [files.folder]
    files.close()
    assert list(parent.iterdir()) == []


def test_a_folder_that_the_server_does_not_share_is_refused(files: FileTransfer) -> None:
    server = FakeServer()
    (files.folder / "token").write_text("of another host")
    with pytest.raises(ServerError, match="has to be shared by both"):
        files.connect([server])


def test_a_folder_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"rollout.server.folder = '.*file/below': Not a directory; it has to be"
    ):
        FileTransfer(str(tmp_path / "file" / "below"))


# what does not arrive ------------------------------------------------------------------------


FAULTS = [
    ("file", "skipped"),
    ("file", "stale"),
    *((k, f) for k in ("file", "gloo") for f in ("partial", "altered")),
]
"""A broadcast has no older file, and one that is skipped ends at its deadline."""


@DTYPES
@pytest.mark.parametrize(("both", "fault"), FAULTS, indirect=["both"])
def test_a_transfer_that_is_not_whole_stops_the_run(
    both: tuple[ServedTransfer, list[FakeServer]], dtype: torch.dtype, fault: str
) -> None:
    transfer, servers = both
    ledger, engine = WeightLedger(), Engine(transfer, servers)
    ledger.send(engine, weights(dtype).items(), 0)  # type: ignore[arg-type]
    kept: list[Any] = []
    for server in servers:
        receivers = server.workers
        if fault == "skipped":
            server.faults["/update_weights"] = lambda body: {}
        elif fault == "stale":
            update = dict(path=_keep(transfer, kept), names=list(NAMES), version=1)
            server.faults["/update_weights"] = lambda body, update=update: body["update_info"].update(update)
        for receiver in receivers:
            if fault == "partial":
                _wrap(receiver, lambda pairs: [pair for pair in pairs if pair[0] != NAMES[1]])
            if fault == "altered":
                _wrap(receiver, lambda pairs: [(n, t + 1 if n == NAMES[2] else t) for n, t in pairs])
    expected = {
        "skipped": "4 never arrived",
        "partial": f"1 never arrived: '{NAMES[1]}'",
        "stale": "4 arrived changed",
        "altered": f"1 arrived changed: '{NAMES[2]}'",
    }
    with pytest.raises(GuardStop, match=expected[fault]):
        ledger.send(engine, weights(dtype, 1).items(), 1)  # type: ignore[arg-type]


def _keep(transfer: ServedTransfer, kept: list[Any]) -> str:
    """A file of version 0, where no update removes it."""
    from safetensors.torch import save_file

    assert isinstance(transfer, FileTransfer)
    path = transfer.folder / "older"
    save_file(weights(torch.float32), path)
    return str(path)


def _wrap(receiver: Any, change: Any) -> None:
    """Let a receiver see other tensors than those that came."""
    for name in ("_from_file", "_from_group"):
        original = getattr(receiver, name)
        setattr(receiver, name, lambda info, original=original: iter(change(list(original(info)))))


def test_an_older_version_is_not_taken_for_the_one_that_was_sent(files: FileTransfer) -> None:
    server = FakeServer()
    files.connect([server])
    server.faults["/update_weights"] = lambda body: body["update_info"].update(version=0)
    outcome = files.send([server], weights(torch.float32).items(), 1)  # type: ignore[list-item]
    assert "received version 0 where 1 was sent" in str(outcome[server.url])
    assert server.paused and server.caches == []


def test_a_part_is_not_sent_to_a_server_that_holds_an_older_version(files: FileTransfer) -> None:
    server = FakeServer()
    for version in (0, 1):
        files.send([server], weights(torch.float32, version).items(), version)  # type: ignore[list-item]
    server.workers[0].account.weights_name = files.weights_name(0)
    part = [(NAMES[0], torch.ones(6, 8))]
    outcome = files.send([server], part, 2)  # type: ignore[list-item]
    assert "needs all of them" in str(outcome[server.url]) and server.versions[-1] == files.weights_name(1)


def test_workers_of_a_server_that_received_different_tensors_are_noticed(files: FileTransfer) -> None:
    server = FakeServer(workers=3)
    files.connect([server])
    _wrap(server.workers[2], lambda pairs: pairs[:-1])
    outcome = files.send([server], weights(torch.bfloat16).items(), 0)  # type: ignore[list-item]
    assert "workers 0 and 2 received different tensors" in str(outcome[server.url])


def test_a_prefix_cache_that_vllm_did_not_reset_is_noticed(files: FileTransfer) -> None:
    server = FakeServer()
    server.faults["/reset_prefix_cache"] = lambda body: {"success": False}
    outcome = files.send([server], weights(torch.float32).items(), 0)  # type: ignore[list-item]
    assert "did not reset its prefix cache" in str(outcome[server.url]) and server.paused


def test_a_server_without_the_extension_is_named() -> None:
    server = FakeServer()
    server.faults["/collective_rpc"] = lambda body: {"results": ["None"]}
    with pytest.raises(ServerError, match=r"fake:1: .*/collective_rpc .*mm_grpo"):
        FileTransfer().connect([server])  # type: ignore[list-item]


# servers that fail ---------------------------------------------------------------------------


def dies_at(server: FakeServer, count: int) -> None:
    """Let a server be gone from its call number `count` of /update_weights on."""
    seen: list[int] = []

    def fault(body: Any) -> None:
        seen.append(1)
        if len(seen) == count:
            server.dead = True
            raise ServerUnreachable(server.url, "the connection was cut")

    server.faults["/update_weights"] = fault


@DTYPES
def test_a_server_that_dies_in_mid_transfer_is_left_out_and_comes_back(
    both: tuple[ServedTransfer, list[FakeServer]], dtype: torch.dtype
) -> None:
    transfer, (good, bad) = both
    transfer.send([good, bad], weights(dtype).items(), 0)  # type: ignore[list-item]
    dies_at(bad, 2)
    sent, started = weights(dtype, 1), time.monotonic()
    outcome = transfer.send([good, bad], sent.items(), 1)  # type: ignore[list-item]
    assert outcome[good.url] == digests(sent) and equal(good.weights, sent)
    assert isinstance(outcome[bad.url], ServerUnreachable)
    assert time.monotonic() - started < PATIENCE  # nobody waited for the deadline
    outcome = transfer.send([good, bad], sent.items(), 2)  # type: ignore[list-item]
    assert outcome[good.url] == digests(sent) and "no connection" in str(outcome[bad.url])
    bad.restart()
    bad.faults.clear()
    sent = weights(dtype, 2)
    outcome = transfer.send([good, bad], sent.items(), 3)  # type: ignore[list-item]
    assert outcome == {good.url: digests(sent), bad.url: digests(sent)}
    assert equal(bad.weights, sent)


def test_an_update_that_was_given_up_needs_one_that_brings_everything(files: FileTransfer) -> None:
    server = FakeServer()
    files.connect([server])
    files.send([server], weights(torch.float32).items(), 0)  # type: ignore[list-item]
    dies_at(server, 2)
    files.send([server], weights(torch.float32, 1).items(), 1)  # type: ignore[list-item]
    server.dead = False  # it was cut off, and lives: vLLM still waits for the rest
    server.faults.clear()
    assert server.paused
    part = [(NAMES[3], torch.ones(6, 8))]
    outcome = files.send([server], part, 2)  # type: ignore[list-item]
    assert "an earlier update was given up half-way" in str(outcome[server.url]) and server.paused
    sent = weights(torch.float32, 3)
    outcome = files.send([server], sent.items(), 3)  # type: ignore[list-item]
    assert outcome == {server.url: digests(sent)} and equal(server.weights, sent) and not server.paused


@DTYPES
def test_a_server_that_a_stranger_spoilt_takes_the_next_whole_update(
    both: tuple[ServedTransfer, list[FakeServer]], dtype: torch.dtype, tmp_path: Path
) -> None:
    transfer, servers = both
    transfer.send(servers, weights(dtype).items(), 0)  # type: ignore[arg-type]
    stranger = FileTransfer(str(tmp_path / "stranger"), timeout=2 * PATIENCE)
    names = {"strange.weight": torch.ones(2), NAMES[0]: torch.ones(6, 8).to(dtype)}
    outcome = stranger.send(servers, names.items(), 0)  # type: ignore[arg-type]
    assert all("strange.weight" in str(outcome[server.url]) for server in servers)
    stranger.close()
    # a run that held the server sends what changed, and then all; a new one all
    lost = transfer.send(servers, [(NAMES[3], torch.ones(6, 8))], 1)  # type: ignore[arg-type]
    assert all(isinstance(lost[server.url], ServerError) for server in servers)
    for index, run in enumerate((transfer, FileTransfer(str(tmp_path / "next"), timeout=2 * PATIENCE))):
        sent = weights(dtype, 2 + index)
        assert run.send(servers, sent.items(), 2) == {s.url: digests(sent) for s in servers}  # type: ignore[arg-type]
        assert all(equal(server.weights, sent) and not server.paused for server in servers)
        run.close()


@pytest.mark.slow
def test_a_server_that_hangs_in_a_broadcast_costs_its_deadline_alone() -> None:
    transfer = GroupTransfer("gloo", timeout=2.0)
    good, bad = two("gloo")
    transfer.connect([good, bad])
    awake = threading.Event()
    bad.faults["/update_weights"] = lambda body: awake.wait(600) and None
    sent, started = weights(torch.float32), time.monotonic()
    try:
        outcome = transfer.send([good, bad], sent.items(), 0)  # type: ignore[list-item]
        assert outcome[good.url] == digests(sent)
        assert isinstance(outcome[bad.url], EngineError) and bad.url in str(outcome[bad.url])
        assert 1.5 < time.monotonic() - started < PATIENCE
    finally:
        awake.set()
        transfer.close()


def test_a_server_that_refuses_to_join_is_not_waited_for() -> None:
    transfer = GroupTransfer("gloo", timeout=2 * PATIENCE)
    server = FakeServer(kind="file")  # its receiver joins no group
    server.faults["/init_weight_transfer_engine"] = lambda body: (_ for _ in ()).throw(
        ServerUnreachable(server.url, "no")
    )
    started = time.monotonic()
    with pytest.raises(ServerError, match="no"):
        transfer.connect([server])  # type: ignore[list-item]
    assert time.monotonic() - started < PATIENCE
    transfer.close()


@pytest.mark.parametrize("kind", ["gloo", "nccl"])
def test_every_worker_of_a_server_has_a_rank_after_the_learners(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Any, ...]] = []

    class Recorded:
        def __init__(
            self, backend: str, host: str, port: int, *, rank: int, size: int, **options: Any
        ) -> None:
            made.append((backend, host, port, rank, size, options["timeout"]))

        def abort(self) -> None:
            pass

    monkeypatch.setattr(transfer_module, "Group", Recorded)
    monkeypatch.setattr(plugin_engines, "Group", Recorded)
    transfer = GroupTransfer(kind, "127.0.0.2", timeout=7.0)
    servers = [FakeServer("http://fake:1", kind, workers=4), FakeServer("http://fake:2", kind, workers=1)]
    for index, each in enumerate(servers[0].workers):  # two replicas of two
        each.parallel_config.world_size, each.parallel_config.rank = 2, index % 2
        each.parallel_config.data_parallel_index = index // 2
    transfer.connect(servers)  # type: ignore[arg-type]
    transfer.close()
    ports = sorted({port for _, _, port, *_ in made})
    groups = [sorted((rank, size) for _, _, p, rank, size, _ in made if p == port) for port in ports]
    assert sorted(groups) == [[(0, 2), (1, 2)], [(rank, 5) for rank in range(5)]]
    assert {(one[0], one[1], one[5]) for one in made} == {(kind, "127.0.0.2", 7.0)}


# the choice ----------------------------------------------------------------------------------


def test_the_transfer_follows_the_config(tmp_path: Path) -> None:
    chosen = [
        transfer_of("auto"),
        transfer_of("auto", device="cuda"),
        transfer_of("auto", device="cuda", folder=str(tmp_path)),
        transfer_of("gloo"),
    ]
    assert [t.backend for t in chosen] == ["mm_grpo_file", "mm_grpo_nccl", "mm_grpo_file", "mm_grpo_gloo"]
    for transfer in chosen:
        transfer.close()
    with pytest.raises(
        ConfigError, match=r"rollout.server.transfer = 'ipc': must be one of auto, file, gloo, nccl"
    ):
        transfer_of("ipc")
    with pytest.raises(ConfigError, match="it needs a learner on a GPU; write file, or gloo"):
        transfer_of("nccl")
    with pytest.raises(ConfigError, match="the transfer 'gloo' writes no files"):
        transfer_of("gloo", folder=str(tmp_path))
