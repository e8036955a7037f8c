"""torchrun and `accelerate launch` on one and on two hosts: processes join, lose each other, or are refused.

The processes are those of peers.py, which train nothing; test_cluster.py has a whole training by accelerate.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

import peers
import pytest
import yaml
from helpers import processes
from launches import ACCELERATE, TORCHRUN, children, finished, running

SCRIPT = Path(peers.__file__)
DEADLINE = 300.0


def accelerate_file(folder: Path, **fields: Any) -> Path:
    """A config of accelerate as `accelerate config` writes it, for two processes."""
    values = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "mixed_precision": "no",
        "num_machines": 1,
        "num_processes": 2,
        "machine_rank": 0,
        "main_process_port": processes.free_port(),
        "use_cpu": False,
        **fields,
    }
    file = folder / "accelerate.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def deepspeed(folder: Path, **section: Any) -> Path:
    known = {"zero_stage": 2, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
    return accelerate_file(folder, distributed_type="DEEPSPEED", deepspeed_config={**known, **section})


def one_host(launcher: str, folder: Path) -> list[object]:
    if launcher == "torchrun":
        return [*TORCHRUN, "--standalone", "--nproc-per-node", 2]
    file = deepspeed(folder) if launcher == "accelerate-deepspeed" else accelerate_file(folder)
    return [*ACCELERATE, "--config_file", file]


def of_two_hosts(launcher: str, number: int, port: int) -> list[object]:
    """What is typed on a host, without the program; examples/cluster/README.md has the same."""
    torchrun = [*TORCHRUN, "--nnodes", 2, "--nproc-per-node", 1]
    if launcher == "torchrun-static":
        return [*torchrun, "--node-rank", number, "--master-addr", "127.0.0.1", "--master-port", port]
    if launcher == "torchrun-c10d":
        point = ["--rdzv-backend", "c10d", "--rdzv-id", "two", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        return [*torchrun, *point, "--local-addr", "127.0.0.1"]
    shared = ["--num_machines", 2, "--num_processes", 2, "--multi_gpu", "--mixed_precision", "no"]
    place = ["--machine_rank", number, "--main_process_ip", "127.0.0.1", "--main_process_port", port]
    return [*ACCELERATE, *shared, *place, "--same_network", "--dynamo_backend", "no"]


@contextmanager
def two_hosts(launcher: str, program: list[object], folder: Path) -> Iterator[list[Popen[bytes]]]:
    """Two launchers on the loopback, each of one process."""
    port = processes.free_port()
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                running([*of_two_hosts(launcher, n, port), *program], folder / f"host-{n}.txt")
            )
            for n in (0, 1)
        ]


def outputs(folder: Path) -> list[str]:
    return [(folder / f"host-{n}.txt").read_text(errors="replace") for n in (0, 1)]


def assert_two_joined(folder: Path) -> None:
    found = peers.joined(folder)
    assert [(one["rank"], one["world"], one["ranks"], one["sum"]) for one in found] == [
        (0, 2, [0, 1], 3.0),
        (1, 2, [0, 1], 3.0),
    ]


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "accelerate-deepspeed"])
def test_processes_of_a_launcher_join(launcher: str, tmp_path: Path) -> None:
    code, output = finished([*one_host(launcher, tmp_path), SCRIPT, tmp_path], tmp_path / "output.txt")
    assert code == 0, output
    assert_two_joined(tmp_path)
    assert [one["local"] for one in peers.joined(tmp_path)] == ["0", "1"]


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["torchrun-static", "torchrun-c10d", "accelerate"])
def test_processes_of_two_hosts_join(launcher: str, tmp_path: Path) -> None:
    with two_hosts(launcher, [SCRIPT, tmp_path], tmp_path) as hosts:
        for host in hosts:
            host.wait(DEADLINE)
    assert [host.returncode for host in hosts] == [0, 0], outputs(tmp_path)
    assert_two_joined(tmp_path)
    assert [one["local"] for one in peers.joined(tmp_path)] == ["0", "0"]


@pytest.mark.long
@pytest.mark.parametrize(("lost", "how"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (0, signal.SIGSTOP)])
def test_a_lost_host_ends_the_other_with_a_message(lost: int, how: signal.Signals, tmp_path: Path) -> None:
    """SIGKILL breaks the connection; SIGSTOP leaves it open and silent, as a host that lost its power does."""
    with two_hosts("torchrun-static", [SCRIPT, tmp_path, "loop"], tmp_path) as hosts:
        end = time.monotonic() + DEADLINE
        while not (tmp_path / "exchanged").exists() and time.monotonic() < end:
            assert hosts[0].poll() is None and hosts[1].poll() is None, outputs(tmp_path)
            time.sleep(0.02)
        gone = [hosts[lost].pid, *children(hosts[lost].pid)]
        assert len(gone) == 2
        for pid in gone:
            os.kill(pid, how)
        started = time.monotonic()
        hosts[1 - lost].wait(peers.DEADLINE + DEADLINE)  # the launcher takes its time too
        waited = time.monotonic() - started
        assert hosts[1 - lost].returncode == 1
        if how == signal.SIGSTOP:
            assert waited > 1
        for pid in gone if how == signal.SIGSTOP else []:
            os.kill(pid, signal.SIGKILL)
    output = outputs(tmp_path)[1 - lost]
    assert f"error: process {1 - lost} of 2 lost another one while exchanging" in output, output[-3000:]
    assert "run.process_timeout" in output
