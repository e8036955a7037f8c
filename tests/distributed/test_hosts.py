"""Two hosts, as two launchers on the loopback: the run of one process, and an end when one host is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
import runs
import several
from folders import assert_the_same_run, write_config
from launches import ACCELERATE, TORCHRUN, TRAIN, children, finished, running

STEPS = 2
TIMEOUT = 15.0
DEADLINE = 150.0


def host(kind: str, number: int, port: int) -> list[object]:
    """What is typed on a host, without the program; examples/cluster/README.md says the same."""
    torchrun = [*TORCHRUN, "--nnodes", 2, "--nproc-per-node", 1]
    if kind == "static":
        return [*torchrun, "--node-rank", number, "--master-addr", "127.0.0.1", "--master-port", port]
    if kind == "c10d":
        point = ["--rdzv-backend", "c10d", "--rdzv-id", "two", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        return [*torchrun, *point, "--local-addr", "127.0.0.1"]
    shared = ["--num_machines", 2, "--num_processes", 2, "--multi_gpu", "--mixed_precision", "no"]
    place = ["--machine_rank", number, "--main_process_ip", "127.0.0.1", "--main_process_port", port]
    return [*ACCELERATE, *shared, *place, "--same_network", "--dynamo_backend", "no"]


@contextmanager
def two_hosts(kind: str, config: Path, folder: Path) -> Iterator[list[Popen[bytes]]]:
    port = several.free_port()
    with ExitStack() as stack:
        yield [
            stack.enter_context(running([*host(kind, n, port), *TRAIN, config], folder / f"host-{n}.txt"))
            for n in (0, 1)
        ]


def said(folder: Path) -> list[str]:
    return [(folder / f"host-{n}.txt").read_text(errors="replace") for n in (0, 1)]


@pytest.fixture(scope="module")
def alone(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    code, words = finished([TORCHRUN[0], *TRAIN, config_of(models, folder)], folder.with_suffix(".txt"))
    assert code == 0, words
    return folder


def config_of(models: dict[str, Path], folder: Path, **run: Any) -> Path:
    settings = {"max_steps": STEPS, "eval_every": 0, "report": False, "process_timeout": TIMEOUT * 4}
    return write_config(models["qwen2_5_vl"], folder, run={**settings, "dir": str(folder), **run})


@pytest.mark.long
@pytest.mark.parametrize("kind", ["static", "c10d", "accelerate"])
def test_two_hosts_make_the_run_of_one_process(
    kind: str, alone: Path, models: dict[str, Path], tmp_path: Path
) -> None:
    config = config_of(models, tmp_path / "run")
    with two_hosts(kind, config, tmp_path) as hosts:
        for launcher in hosts:
            launcher.wait(DEADLINE)
    words = said(tmp_path)
    assert [launcher.returncode for launcher in hosts] == [0, 0], words
    assert "tokens on 2 processes" in words[0] and "step 1/2" not in words[1]
    assert_the_same_run(tmp_path / "run", alone, STEPS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("lost", "how"), [(n, how) for how in (signal.SIGKILL, signal.SIGSTOP) for n in (0, 1)]
)
def test_a_lost_host_ends_the_other_with_a_word(
    lost: int, how: signal.Signals, models: dict[str, Path], tmp_path: Path
) -> None:
    """SIGKILL breaks the connection; SIGSTOP leaves it open and silent, as a host that lost its power does."""
    config = config_of(models, tmp_path / "run", max_steps=500, process_timeout=TIMEOUT)
    with two_hosts("static", config, tmp_path) as hosts:
        end = time.monotonic() + DEADLINE
        while runs.rows_of(tmp_path / "run") < 1 and time.monotonic() < end:
            assert hosts[0].poll() is None and hosts[1].poll() is None, said(tmp_path)
            time.sleep(0.02)
        gone = [hosts[lost].pid, *children(hosts[lost].pid)]
        assert len(gone) == 2
        for pid in gone:
            os.kill(pid, how)
        started = time.monotonic()
        hosts[1 - lost].wait(TIMEOUT + 60)
        waited = time.monotonic() - started
        assert hosts[1 - lost].returncode == 1
        if how == signal.SIGSTOP:
            assert 1 < waited < TIMEOUT + 30  # the launcher takes its time too
        for pid in gone if how == signal.SIGSTOP else []:
            os.kill(pid, signal.SIGKILL)
    words = said(tmp_path)[1 - lost]
    assert f"error: process {1 - lost} of 2 lost another one while exchanging" in words, words[-3000:]
    assert "run.process_timeout" in words
