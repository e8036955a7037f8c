"""Server processes: their command lines, who reaches them, when they are ready, and that none outlives its starter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import torch
from helpers.patience import PATIENCE, until
from helpers.processes import alone

from mm_grpo.errors import ConfigError, EngineError
from mm_grpo.rollout.served import launch
from mm_grpo.rollout.served.launch import (
    ServerProcess,
    ServerSettings,
    serve,
    server_command,
    server_environment,
)
from mm_grpo.rollout.vllm.launch import EngineSettings

ROOT = Path(__file__).parents[2]
BASE = ROOT / "examples" / "shapes" / "base"
FAKE = ROOT / "tests" / "helpers" / "fake_server_process.py"
ENGINE = EngineSettings(
    str(BASE),
    "float32",
    512,
    mm_processor_kwargs=(("max_pixels", 3136),),
    max_images=2,
    engine_kwargs=(("max_num_seqs", 16),),
)
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="the command is that of an installed vLLM")


def alive(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def gone(pids: Sequence[int]) -> bool:
    until(lambda: not any(map(alive, pids)))
    return True


def fake(monkeypatch: pytest.MonkeyPatch, pids: Path, *how: str) -> None:
    def command(settings: ServerSettings) -> list[str]:
        return [sys.executable, "-S", str(FAKE), str(settings.socket), str(pids), *how]

    monkeypatch.setattr(launch, "server_command", command)


def started(pids: Path) -> list[int]:
    return [int(pid) for pid in pids.read_text().split()]


# the command and its environment --------------------------------------------------------------


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


def test_no_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"rollout\.engine = 'vllm_server'"):
        server_command(ServerSettings(ENGINE))


def test_a_server_is_in_none_of_the_trainers_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "RANK",
        "WORLD_SIZE",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "VLLM_ENABLE_V1_MULTIPROCESSING",
    ):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MASTER_KEY", "the user's own")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    found = server_environment(ServerSettings(ENGINE, gpus=("2", "3")))
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & found.keys()
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


# processes -----------------------------------------------------------------------------------


def test_servers_end_with_their_block_and_with_what_they_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake(monkeypatch, tmp_path / "pids")
    with serve([ServerSettings(ENGINE)] * 2) as servers:
        sockets = [server.settings.socket for server in servers]
        assert [server.url for server in servers] == [f"unix://{socket}" for socket in sockets]
        folder = sockets[0].parent
        assert folder.stat().st_mode & 0o777 == 0o700  # no other user reaches the sockets
        pids = started(tmp_path / "pids")
        assert len(pids) == 4 and all(map(alive, pids))
        assert [server.poll() for server in servers] == [None, None]
    assert gone(pids) and not folder.exists()


def test_a_server_that_ignores_sigterm_or_is_stopped_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake(monkeypatch, tmp_path / "pids", "stubborn")
    server = ServerProcess(ServerSettings(ENGINE, socket=tmp_path / "s"), tmp_path / "log")
    server.start()
    server.wait_ready(PATIENCE)
    pids = started(tmp_path / "pids")
    os.kill(pids[0], signal.SIGSTOP)
    server.stop(0.3)
    assert gone(pids) and server.poll() is None


def test_a_server_that_ends_before_it_is_ready_shows_the_end_of_its_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake(monkeypatch, tmp_path / "pids", "broken")
    with (
        pytest.raises(EngineError, match=r"exited with code 1 (?s:.*) there is no such model"),
        serve([ServerSettings(ENGINE)]),
    ):
        raise AssertionError("it never was ready")


def test_a_server_that_ends_is_started_anew_and_given_up_when_it_never_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launch, "WATCH_EVERY", 0.02)
    fake(monkeypatch, tmp_path / "pids")
    said: list[str] = []
    with serve([ServerSettings(ENGINE)], report=said.append) as (server,):
        first, url = started(tmp_path / "pids"), server.url
        os.kill(first[0], signal.SIGKILL)
        until(lambda: len(started(tmp_path / "pids")) == 4 and server.ready)
        assert server.url == url and gone(first)  # its worker too
        assert len(said) == 1 and f"{url} was ended by SIGKILL" in said[0] and "started anew" in said[0]
        fake(monkeypatch, tmp_path / "pids", "broken")
        os.kill(started(tmp_path / "pids")[2], signal.SIGKILL)
        until(lambda: len(said) == 1 + launch.RESTARTS)
    assert "is not started again" in said[-1] and "there is no such model" in said[-1]
    assert gone(started(tmp_path / "pids"))


PARENT = """
import sys, time
from pathlib import Path
from mm_grpo.rollout.served import launch
from mm_grpo.rollout.served.launch import ServerSettings
from mm_grpo.rollout.vllm.launch import EngineSettings
fake, pids, *how = sys.argv[1:]
launch.server_command = lambda s: [sys.executable, "-S", fake, str(s.socket), pids, *how]
if __name__ == "__main__":
    with launch.serve([ServerSettings(EngineSettings("x", "float32", 64))]):
        Path(pids + ".ready").touch()
        time.sleep(300)
"""


@pytest.mark.slow
def test_servers_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    script, pids = tmp_path / "parent.py", tmp_path / "pids"
    script.write_text(PARENT)
    command = [sys.executable, script, FAKE, pids, "stubborn"]
    parent = subprocess.Popen(command, env=alone(), stderr=subprocess.DEVNULL)
    try:
        until(lambda: Path(f"{pids}.ready").exists() or parent.poll() is not None)
        servers = started(pids)
        assert all(map(alive, servers))
        parent.kill()
        parent.wait(PATIENCE)
        assert gone(servers)
    finally:
        parent.kill()
        parent.wait()
