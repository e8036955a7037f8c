"""`mm-grpo serve` with a real vLLM server: the key in front of it, and its end when `serve` is killed.

SIGTERM is in test_cli_serve.py, and rollout/test_served_launch.py has processes in the place of vLLM's.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
from helpers.processes import alone, free_port

from mm_grpo.rollout.served.protocol import ENDPOINTS, RECEIVED

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

STARTING = 600.0
"""Seconds in which vLLM starts, with whatever else the machine does; 20 to 150 were measured."""

KEY = "a-key-that-nobody-may-see"


def own_address() -> str:
    """An address of this machine that is not 127.0.0.1: what others reach it by, where it has such a one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.2"


def start(output: Path, *arguments: object, **env: str) -> subprocess.Popen[bytes]:
    with output.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "mm_grpo.cli", *map(str, arguments)],
            env={**alone(), **env},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def wait_for(
    condition: Callable[[], bool], process: subprocess.Popen[bytes], output: Path, seconds: float
) -> None:
    end = time.monotonic() + seconds
    while not condition():
        text = output.read_text(errors="replace")[-3000:]
        assert process.poll() is None, f"ended with {process.returncode}\n{text}"
        assert time.monotonic() < end, f"not within {seconds} s\n{text}"
        time.sleep(0.1)


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def servers_of(pid: int) -> list[psutil.Process]:
    """vLLM's processes below `pid`: servers, and what they started."""
    tops = [one for one in descendants(pid) if "vllm.entrypoints" in " ".join(one.cmdline())]
    return [*tops, *(child for top in tops for child in top.children(recursive=True))]


def gone(processes: list[psutil.Process], seconds: float = 60.0) -> bool:
    _, alive = psutil.wait_procs(processes, seconds)
    return not alive


def test_every_endpoint_wants_the_key(job: Path, tmp_path: Path) -> None:
    """Of a server at an address that others reach."""
    host, port, output = own_address(), free_port(), tmp_path / "output"
    options = ["--host", host, "--port", port, "--logs", tmp_path / "logs"]
    process = start(output, "serve", job, *options, MM_GRPO_SERVER_KEY=KEY)
    try:
        wait_for(lambda: "Ctrl-C ends them" in output.read_text(), process, output, STARTING)
        below = [" ".join(one.cmdline()) for one in descendants(process.pid)]
        servers = servers_of(process.pid)
        assert len(servers) >= 2  # the API server and its engine
        url = f"http://{host}:{port}"
        right = {"authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=url, timeout=10.0, trust_env=False) as client:
            routes = client.get("/openapi.json", headers=right).json()["paths"]
            asked = [(method.upper(), path) for path, methods in routes.items() for method in methods]
            assert {("POST", "/pause"), ("POST", "/update_weights"), ("POST", "/collective_rpc")} <= set(
                asked
            )
            asked += [("GET", "/metrics"), ("GET", "/openapi.json"), ("GET", "/docs"), ("OPTIONS", "/pause")]
            for method, path in asked:
                for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": KEY}):
                    answer = client.request(method, path, headers=headers)
                    assert answer.status_code == 401, (method, path, headers)
            assert client.get("/is_paused", headers=right).json() == {"is_paused": False}
            large = "x" * (8 << 20)
            called = client.post("/collective_rpc", headers=right, json={"method": RECEIVED, "other": large})
            assert called.status_code == 200 and called.json()["results"][0]["finished"]
            unknown = {path for _, path in asked} - ENDPOINTS
            assert "/tokenize" in unknown
            for path in unknown:
                assert client.post(path, headers=right).status_code == 404, path
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
        process.kill()
        process.wait()
        assert gone(servers)
        seen = [output.read_text(), *(f.read_text() for f in (tmp_path / "logs").iterdir()), *below]
        assert not any(KEY in text for text in seen)
        assert f"server 0: {url} is ready" in seen[0] and f"'rollout.server.urls=[{url}]'" in seen[0]
    finally:
        process.kill()
        process.wait()
