"""`mm-grpo serve` and `train --serve`: what servers are started with, and what is refused before one is."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mm_grpo.build import processor_of
from mm_grpo.cli import serve, train
from mm_grpo.cli.configs import load_config
from mm_grpo.errors import ConfigError
from mm_grpo.processors.base import mm_processor_kwargs
from mm_grpo.rollout.served import launch

FAKE = Path(__file__).parents[1] / "helpers" / "fake_server_process.py"


def test_servers_are_started_with_the_settings_of_vllm(config_path: Path, models: dict[str, Path]) -> None:
    fields = ["data.max_pixels=3136", "rollout.vllm.engine_kwargs={max_num_seqs: 7}"]
    loaded = load_config(str(config_path), fields)
    one, two = serve.server_settings(loaded, 2)
    assert one == two
    assert one.engine.model == str(models["qwen2_5_vl"])
    assert (one.engine.dtype, one.engine.max_model_len, one.engine.max_images) == ("float32", 256, 1)
    assert dict(one.engine.mm_processor_kwargs) == mm_processor_kwargs(processor_of(loaded))
    assert "3136" in str(one.engine.mm_processor_kwargs)
    assert one.engine.engine_kwargs == (("max_num_seqs", 7),)
    assert one.engine.gpu_memory_utilization == serve.GPU_SHARE  # the server has the GPU alone
    assert (one.transfer, one.gpus, one.tensor_parallel) == ("file", None, 1)
    fields = ["rollout.vllm.gpu_memory_utilization=0.5", "rollout.server.transfer=gloo"]
    (one,) = serve.server_settings(load_config(str(config_path), fields), 1)
    assert (one.engine.gpu_memory_utilization, one.transfer) == (0.5, "gloo")


@pytest.mark.parametrize(
    ("shares", "gpus", "share", "transfer"),
    [(False, ("4", "5"), 0.9, "nccl"), (True, ("a", "b"), 0.3, "file")],
)
def test_a_server_shares_the_trainers_gpus_or_follows_them(
    shares: bool, gpus: Any, share: float, transfer: str, config_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mm_grpo.learner.model.resolve_device", lambda device: torch.device("cuda"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "a,b,2,3,4,5")
    loaded = load_config(str(config_path), [f"rollout.server.share_gpus={shares}"])
    (one,) = serve.server_settings(loaded, 1, tensor_parallel=2, processes=4)
    assert (one.gpus, one.engine.gpu_memory_utilization) == (gpus, share)
    assert (one.share_gpus, one.transfer) == (shares, transfer)


def test_each_server_gets_gpus_of_its_own_after_the_trainers() -> None:
    eight = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,GPU-a,5,6,7"}
    assert serve.gpus_of(2, 2, 4, eight) == [("GPU-a", "5"), ("6", "7")]
    assert serve.gpus_of(1, 1, 0, eight) == [("0",)]
    with pytest.raises(ConfigError, match=r"5 of the trainer need 9 GPUs, and 8"):
        serve.gpus_of(2, 2, 5, eight)
    with pytest.raises(ConfigError, match="need 1 GPUs, and 0 are visible"):
        serve.gpus_of(1, 1, 0, {"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize(
    ("arguments", "world", "message"),
    [
        ("train --serve 2 --smoke", None, "--serve 2: --smoke"),
        ("train --serve 1 rollout.server.urls=[http://127.0.0.1:1]", None, "--serve 1: rollout.server.urls"),
        ("train --serve 1 rollout.engine=vllm", None, "--serve 1: rollout.engine = 'vllm'"),
        ("train --serve 1", "2", "--serve 1: each process of a launcher"),
        ("serve --tensor-parallel 2", None, "--tensor-parallel 2"),
        ("train --tensor-parallel 2", None, "--tensor-parallel 2: is for servers"),
    ],
)
def test_impossible_servers_are_refused_in_one_message(
    arguments: str,
    world: str | None,
    message: str,
    command: Any,
    config_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if world is not None:
        monkeypatch.setenv("WORLD_SIZE", world)
    name, *rest = arguments.split()
    done = command(name, config_path, *rest)
    assert done.code == 2 and done.err.startswith("error: ") and message in done.err
    assert done.err.count("\n") == 1


def test_ports_that_cannot_be_had_are_refused_before_a_server_is_started(
    command: Any, config_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MM_GRPO_SERVER_KEY", "k")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for first, count, named in ((port, 1, port), (port - 1, 2, port), (65535, 2, 65536)):
            done = command("serve", config_path, "--port", first, "--servers", count)
            assert done.code == 2 and done.err.count("\n") == 1
            assert f"--port {named}: " in done.err or (named == port and f"--port {port - 1}: " in done.err)


def test_a_run_gets_the_urls_of_its_servers_and_they_end_with_it(
    config_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fake(settings: Any) -> list[str]:
        return [sys.executable, "-S", str(FAKE), str(settings.socket), str(tmp_path / "pids")]

    monkeypatch.setattr(launch, "server_command", fake)
    with serve.servers_for_run(load_config(str(config_path), []), 2, 1, 1) as fields:
        urls = fields["rollout.server.urls"]
        assert len(set(urls)) == 2 and all(url.startswith("unix:///") for url in urls)
        changed = load_config(str(config_path), []).with_values(fields)
        assert changed.rollout.engine == "vllm_server" and changed.rollout.server.urls == urls
    assert not any(Path(url.removeprefix("unix://")).exists() for url in urls)


def test_servers_end_at_a_signal(config_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ended: list[str] = []

    @contextmanager
    def none(settings: Any, **options: Any) -> Iterator[list[Any]]:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            yield []
        finally:
            ended.append("with their folder")

    monkeypatch.setattr(launch, "serve", none)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    try:
        with pytest.raises(KeyboardInterrupt) as stopped:
            serve.serve(str(config_path))
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGHUP), before, strict=True):
            signal.signal(number, handler)
    assert getattr(stopped.value, "code", None) == 143 and ended == ["with their folder"]


def test_a_run_is_trained_over_the_servers_that_train_starts(
    command: Any, config_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    @contextmanager
    def beside(config: Any, *counts: int) -> Iterator[dict[str, Any]]:
        try:
            urls = ["unix:///{}/{}/{}".format(*counts)]
            yield {"rollout.engine": "vllm_server", "rollout.server.urls": urls}
        finally:
            asked.append("ended")

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(train, "servers_for_run", beside)
    monkeypatch.setattr(train, "_train", lambda config, overrides, loaded, *_: asked.append(loaded.rollout))
    monkeypatch.setattr(train, "launch", lambda count, program: asked.append(program) or 0)
    for options in ((), ("--processes", 2)):
        assert command("train", config_path, "--serve", 2, "--tensor-parallel", 3, *options).code == 0
    rollout, _, program, _ = asked
    assert (rollout.engine, rollout.server.urls) == ("vllm_server", ["unix:///2/3/1"])
    assert program[-2:] == ['rollout.engine="vllm_server"', 'rollout.server.urls=["unix:///2/3/2"]']
    assert asked[1::2] == ["ended"] * 2
