"""Server processes: their command lines, who reaches them, when they are ready, and that none outlives its starter."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from helpers.patience import PATIENCE, until
from helpers.processes import alone, free_port

from mm_grpo.errors import ConfigError, EngineError
from mm_grpo.rollout.served import launch
from mm_grpo.rollout.served.launch import ServerProcess, ServerSettings, serve, server_command
from mm_grpo.rollout.vllm.launch import EngineSettings

ROOT = Path(__file__).parents[2]
BASE = ROOT / "examples" / "shapes" / "base"
FAKE = ROOT / "tests" / "helpers" / "fake_server_process.py"
OPTIONS: Any = {"mm_processor_kwargs": (("max_pixels", 3136),), "engine_kwargs": (("max_num_seqs", 16),)}
ENGINE = EngineSettings(str(BASE), "float32", 512, max_images=2, **OPTIONS)
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="the command is that of an installed vLLM")


def alive(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def gone(pids: Sequence[int]) -> bool:
    until(lambda: not any(map(alive, pids)))
    return True


class Fakes:
    """Fake server programs in the place of vLLM's; they write their process ids to `file`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
        self.monkeypatch, self.file = monkeypatch, file
        self.use()

    def use(self, *how: str) -> None:
        def command(settings: ServerSettings) -> list[str]:
            place = f"{settings.host}:{settings.port}" if settings.host else str(settings.socket)
            return [sys.executable, "-S", str(FAKE), place, str(self.file), *how]

        self.monkeypatch.setattr(launch, "server_command", command)

    @property
    def pids(self) -> list[int]:
        return [int(pid) for pid in self.file.read_text().split()]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fakes:
    monkeypatch.setenv("MM_GRPO_SERVER_KEY", "k")
    monkeypatch.setattr(launch, "WATCH_EVERY", 0.02)
    return Fakes(monkeypatch, tmp_path / "pids")


@needs_vllm
def test_a_server_is_started_as_the_engine_in_the_trainer_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MM_GRPO_SERVER_KEY", "secret-of-the-test")
    settings = ServerSettings(ENGINE, transfer="gloo", tensor_parallel=2, host="127.0.0.1", port=8123)
    words = server_command(settings)
    assert words[:3] == [sys.executable, "-P", "-m"] and words[3].startswith("vllm.entrypoints.")
    pairs = dict(pairwise(words))
    wanted = {
        "--model": str(BASE),
        "--dtype": "float32",
        "--max-model-len": "512",
        "--max-num-seqs": "16",
        "--tensor-parallel-size": "2",
        "--limit-mm-per-prompt": '{"image": 2, "video": 0}',
        "--mm-processor-kwargs": '{"max_pixels": 3136}',
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
        "--weight-transfer-config": '{"backend": "mm_grpo_gloo"}',
        "--worker-extension-cls": "mm_grpo.rollout.served.plugin.WorkerExtension",
        "--host": "127.0.0.1",
        "--port": "8123",
        "--middleware": "mm_grpo.rollout.served.server_key.RequireKey",
    }
    assert {name: pairs.get(name) for name in wanted} == wanted
    assert {"--enable-scale-out", "--enforce-eager", "--no-enable-chunked-prefill"} <= set(words)
    assert "--distributed-executor-backend" not in words
    assert not any("secret" in word for word in words)


@needs_vllm
def test_a_server_at_a_socket_needs_no_key_and_has_no_port(tmp_path: Path) -> None:
    words = server_command(ServerSettings(ENGINE, socket=tmp_path / "s"))
    assert words[words.index("--uds") + 1] == str(tmp_path / "s")
    assert not {"--middleware", "--host", "--port"} & set(words)


@needs_vllm
@pytest.mark.parametrize("shares", [False, True])
def test_a_server_beside_the_learner_leaves_it_room(shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    engine = replace(ENGINE, gpu_memory_utilization=0.25, sleep_level=1, engine_kwargs=())
    words = server_command(ServerSettings(engine, share_gpus=shares))
    assert words[words.index("--gpu-memory-utilization") + 1] == "0.25"
    assert ("--enable-sleep-mode" in words, "--max-num-seqs" in words) == (shares, shares)


def test_no_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"rollout\.engine = 'vllm_server'"):
        server_command(ServerSettings(ENGINE))


def test_a_server_is_in_none_of_the_trainers_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    of_a_launcher = ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    for name in (*of_a_launcher, "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MASTER_KEY", "the user's own")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    found = launch.server_environment(ServerSettings(ENGINE, gpus=("2", "3")))
    assert not {*of_a_launcher} & found.keys()
    assert found["MASTER_KEY"] == "the user's own"
    if not torch.cuda.is_available():  # engine and worker are one process, whatever the trainer's is
        assert found["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert found["CUDA_VISIBLE_DEVICES"] == "2,3" and found["VLLM_SERVER_DEV_MODE"] == "1"
    assert found["PYTHONPATH"] == f"{ROOT}:/somewhere"


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1", "::"])
def test_at_an_address_a_key_is_needed(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MM_GRPO_SERVER_KEY", raising=False)
    with pytest.raises(ConfigError, match=rf"--host {host}: .* MM_GRPO_SERVER_KEY"):
        ServerProcess(ServerSettings(ENGINE, host=host), Path("/dev/null")).start()
    monkeypatch.setenv("MM_GRPO_SERVER_KEY", "k")
    launch.require_key(host)


def test_servers_end_with_their_block_and_with_what_they_started(fakes: Fakes) -> None:
    with serve([ServerSettings(ENGINE)] * 2) as servers:
        sockets = [server.settings.socket for server in servers]
        assert [server.url for server in servers] == [f"unix://{socket}" for socket in sockets]
        folder = sockets[0].parent
        assert folder.stat().st_mode & 0o777 == 0o700  # no other user reaches the sockets
        pids = fakes.pids
        assert len(pids) == 4 and all(map(alive, pids))
        assert [server.poll() for server in servers] == [None, None]
    assert gone(pids) and not folder.exists()


def test_a_server_that_ignores_sigterm_or_is_stopped_is_killed(tmp_path: Path, fakes: Fakes) -> None:
    fakes.use("stubborn")
    server = ServerProcess(ServerSettings(ENGINE, socket=tmp_path / "s"), tmp_path / "log")
    server.start()
    server.wait_ready(PATIENCE)
    pids = fakes.pids
    os.kill(pids[0], signal.SIGSTOP)
    server.stop(0.3)
    assert gone(pids) and server.poll() is None


def test_a_broken_server_shows_the_end_of_its_log(fakes: Fakes) -> None:
    fakes.use("broken")
    words = r"exited with code 1 (?s:.*) there is no such model"
    with pytest.raises(EngineError, match=words), serve([ServerSettings(ENGINE)]):
        raise AssertionError("it never was ready")


def test_a_server_that_ends_is_restarted_and_at_last_given_up(fakes: Fakes) -> None:
    said: list[str] = []
    with serve([ServerSettings(ENGINE)], report=said.append) as (server,):
        first, url = fakes.pids, server.url
        os.kill(first[0], signal.SIGKILL)
        until(lambda: len(fakes.pids) == 4 and server.ready)
        assert server.url == url and gone(first)  # its worker too
        assert len(said) == 1 and f"{url} was ended by SIGKILL" in said[0] and "restarted" in said[0]
        fakes.use("broken")
        os.kill(fakes.pids[2], signal.SIGKILL)
        until(lambda: len(said) == 1 + launch.RESTARTS)
    assert "is not started again" in said[-1] and "there is no such model" in said[-1]
    assert gone(fakes.pids)


@contextmanager
def other_server(host: str) -> Iterator[int]:
    """The port of another program that answers /health."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

    with ThreadingHTTPServer((host, 0), Handler) as other:
        threading.Thread(target=other.serve_forever, args=(0.01,), daemon=True).start()
        yield other.server_port
        other.shutdown()


def at(host: str, port: int) -> ServerSettings:
    return ServerSettings(ENGINE, host=host, port=port)


@pytest.mark.parametrize("other", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost", "::"])
def test_a_taken_port_is_refused_before_a_server_is_started(host: str, other: str, fakes: Fakes) -> None:
    with (
        other_server(other) as port,
        pytest.raises(ConfigError, match=rf"--port {port}: "),
        serve([at(host, port)]),
    ):
        raise AssertionError("it never was ready")
    assert not fakes.file.exists()


def test_answers_of_another_program_are_not_ready(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fakes: Fakes
) -> None:
    """One that took the port after it was asked for."""
    monkeypatch.setattr(launch, "require_free", lambda host, port: None)
    fakes.use("silent")
    with other_server("127.0.0.1") as port:
        server = ServerProcess(at("127.0.0.1", port), tmp_path / "log")
        server.start()
        try:
            until(fakes.file.exists)
            assert not server.ready
            with pytest.raises(EngineError, match="not ready"):
                server.wait_ready(0.1)
        finally:
            server.stop()
        fakes.use("broken")
        server.start()
        with pytest.raises(EngineError, match="there is no such model"):
            server.wait_ready(PATIENCE)
        server.stop()


def test_servers_at_ports_are_ready_and_started_anew(fakes: Fakes) -> None:
    ports, said = [free_port(), free_port()], list[str]()
    with serve([at("127.0.0.1", port) for port in ports], report=said.append) as servers:
        assert [server.url for server in servers] == [f"http://127.0.0.1:{port}" for port in ports]
        os.kill(servers[0].pid or 0, signal.SIGKILL)
        assert not servers[0].ready or len(said) == 1
        until(lambda: len(fakes.pids) == 6 and servers[0].ready)
        assert [server.ready for server in servers] == [True, True]
    assert gone(fakes.pids) and not any(server.ready for server in servers)


def test_servers_are_watched_whatever_becomes_of_a_log_or_a_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fakes: Fakes
) -> None:
    said: list[str] = []
    logs = tmp_path / "logs"
    with serve([ServerSettings(ENGINE)] * 2, log_folder=logs, report=said.append) as servers:
        assert {path.name for path in logs.iterdir()} == {"server-0.log", "server-1.log"}
        shutil.rmtree(logs)
        for number in (1, 2):
            os.kill(servers[0].pid or 0, signal.SIGKILL)
            until(lambda n=number: len(fakes.pids) == 4 + 2 * n and servers[0].ready)  # type: ignore[misc]
        (lost,) = [line for line in said if f"{logs}/server-0.log" in line]
        assert "No such file" in lost
        monkeypatch.setattr(launch, "server_command", lambda settings: ["/no/such/program"])
        os.kill(servers[0].pid or 0, signal.SIGKILL)
        until(lambda: "/no/such/program" in said[-1])
        fakes.use()
        os.kill(servers[1].pid or 0, signal.SIGKILL)
        until(lambda: len(fakes.pids) == 10 and servers[1].ready)
    assert gone(fakes.pids)


PARENT = """
import sys, time, signal
from pathlib import Path
from mm_grpo.cli.serve import _interrupt
from mm_grpo.rollout.served import launch
from mm_grpo.rollout.served.launch import ServerSettings
from mm_grpo.rollout.vllm.launch import EngineSettings
fake, pids, *how = sys.argv[1:]
launch.server_command = lambda s: [sys.executable, "-S", fake, str(s.socket), pids, *how]
launch.STOP_TIMEOUT = 3600.0
if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    with launch.serve([ServerSettings(EngineSettings("x", "float32", 64))] * 2):
        Path(pids + ".ready").touch()
        time.sleep(300)
"""


@pytest.mark.slow
@pytest.mark.parametrize("again", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_servers_that_hang_end_with_a_parent_that_is_ended(again: signal.Signals, tmp_path: Path) -> None:
    script, pids = tmp_path / "parent.py", tmp_path / "pids"
    script.write_text(PARENT)
    command = [sys.executable, script, FAKE, pids, "stubborn"]
    parent = subprocess.Popen(command, env=alone(), stderr=subprocess.DEVNULL)
    try:
        until(lambda: Path(f"{pids}.ready").exists() or parent.poll() is not None)
        servers = [int(pid) for pid in pids.read_text().split()]
        assert len(servers) == 4 and all(map(alive, servers))
        if again != signal.SIGKILL:
            parent.terminate()
            until(lambda: all(Path(f"{pids}.{pid}").exists() for pid in servers[::2]))
            assert parent.poll() is None and alive(servers[0])
        parent.send_signal(again)
        parent.wait(PATIENCE)
        assert gone(servers)
    finally:
        parent.kill()
        parent.wait()
