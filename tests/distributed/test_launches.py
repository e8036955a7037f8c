"""torchrun and `accelerate launch` on one and on two hosts: processes join, lose each other, or are refused.

The processes are those of peers.py, which train nothing; test_cluster.py has two hosts of accelerate.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import Popen

import peers
import pytest
import yaml
from helpers import processes
from launches import ACCELERATE, TORCHRUN, children, running

SCRIPT = Path(peers.__file__)
DEADLINE = 300.0


def accelerate_file(folder: Path) -> Path:
    """A config of accelerate for two processes under DeepSpeed, as `accelerate config` writes it."""
    values = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"zero_stage": 2, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0},
        "mixed_precision": "no",
        "num_machines": 1,
        "num_processes": 2,
        "machine_rank": 0,
        "main_process_port": processes.free_port(),
        "use_cpu": False,
    }
    file = folder / "accelerate.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def of_two_hosts(launcher: str, number: int, port: int) -> list[object]:
    """What is typed on a host, without the program; examples/cluster/README.md has the same."""
    torchrun = [*TORCHRUN, "--nnodes", 2, "--nproc-per-node", 1]
    if launcher == "static":
        return [*torchrun, "--node-rank", number, "--master-addr", "127.0.0.1", "--master-port", port]
    point = ["--rdzv-backend", "c10d", "--rdzv-id", "two", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    return [*torchrun, *point, "--local-addr", "127.0.0.1"]


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


def assert_two_joined(folder: Path, *local: str) -> None:
    found = peers.joined(folder)
    names = ("rank", "world", "ranks", "sum", "local")
    assert [[one[name] for name in names] for one in found] == [
        [rank, 2, [0, 1], 3.0, local[rank]] for rank in (0, 1)
    ]


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_processes_of_a_launcher_join(launcher: str, tmp_path: Path) -> None:
    commands = {
        "torchrun": [*TORCHRUN, "--standalone", "--nproc-per-node", 2],
        "accelerate": [*ACCELERATE, "--config_file", accelerate_file(tmp_path)],
    }
    output = tmp_path / "output.txt"
    with running([*commands[launcher], SCRIPT, tmp_path], output) as process:
        assert process.wait(DEADLINE) == 0, output.read_text(errors="replace")
    assert_two_joined(tmp_path, "0", "1")


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "lost", "how"), [("c10d", 1, signal.SIGKILL), ("static", 0, signal.SIGSTOP)]
)
def test_two_hosts_join_and_a_lost_one_ends_the_other_with_a_message(
    launcher: str, lost: int, how: signal.Signals, tmp_path: Path
) -> None:
    """SIGKILL breaks the connection; SIGSTOP leaves it open and silent, as a host that lost its power does."""
    with two_hosts(launcher, [SCRIPT, tmp_path, "loop"], tmp_path) as hosts:
        end = time.monotonic() + DEADLINE
        while not (tmp_path / "exchanged").exists() and time.monotonic() < end:
            assert hosts[0].poll() is None and hosts[1].poll() is None, outputs(tmp_path)
            time.sleep(0.02)
        assert_two_joined(tmp_path, "0", "0")
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
    assert f"process {1 - lost} of 2" in output and "run.process_timeout" in output, output[-3000:]
