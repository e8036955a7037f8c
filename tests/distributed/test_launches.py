"""torchrun on two hosts: processes join, and lose each other."""

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
from helpers import processes
from launches import TORCHRUN, children, running

pytestmark = pytest.mark.lowest

SCRIPT = Path(peers.__file__)
DEADLINE = 300.0


def of_two_hosts(number: int, port: int) -> list[object]:
    """What is typed on a host, without the program; examples/cluster/README.md has the same."""
    torchrun = [*TORCHRUN, "--nnodes", 2, "--nproc-per-node", 1, "--node-rank", number]
    return [*torchrun, "--master-addr", "127.0.0.1", "--master-port", port]


@contextmanager
def two_hosts(program: list[object], folder: Path) -> Iterator[list[Popen[bytes]]]:
    """Two launchers on the loopback, each of one process."""
    port = processes.free_port()
    starts = [running([*of_two_hosts(n, port), *program], folder / f"host-{n}.txt") for n in (0, 1)]
    with ExitStack() as stack:
        yield [stack.enter_context(host) for host in starts]


def outputs(folder: Path) -> list[str]:
    return [(folder / f"host-{n}.txt").read_text(errors="replace") for n in (0, 1)]


@pytest.mark.long
def test_two_hosts_join_and_a_lost_one_ends_the_other_with_a_message(tmp_path: Path) -> None:
    """The first one, whose launcher holds the store; test_ranks.py has one that falls silent."""
    with two_hosts([SCRIPT, tmp_path, "loop"], tmp_path) as hosts:
        end = time.monotonic() + DEADLINE
        while not (tmp_path / "exchanged").exists() and time.monotonic() < end:
            assert hosts[0].poll() is None and hosts[1].poll() is None, outputs(tmp_path)
            time.sleep(0.02)
        names = ("rank", "world", "ranks", "sum", "local")
        answers = [[answer[name] for name in names] for answer in peers.joined(tmp_path)]
        assert answers == [[rank, 2, [0, 1], 3.0, "0"] for rank in (0, 1)]
        gone = [hosts[0].pid, *children(hosts[0].pid)]
        assert len(gone) == 2
        for pid in gone:
            os.kill(pid, signal.SIGKILL)
        hosts[1].wait(DEADLINE)
        assert hosts[1].returncode == 1
    output = outputs(tmp_path)[1]
    assert "process 1 of 2" in output and "run.process_timeout" in output, output[-3000:]
