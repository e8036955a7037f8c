"""`mm-grpo train --processes N`: one run in several processes that ends with one message and one exit code.

One training is whole; where only the end matters, the processes are those of tests/distributed/peers.py.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import forkserver, processes
from helpers.sessions import stat
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from mm_grpo.cli import train as train_module
from mm_grpo.distributed import ray_launch
from mm_grpo.distributed.exit_message import lost_another
from mm_grpo.distributed.launch import exit_code
from mm_grpo.distributed.ranks import RankLost

DEADLINE = 300.0
PEERS = processes.ROOT / "tests" / "distributed" / "peers.py"
NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
LAUNCH = "import sys; from mm_grpo.distributed.launch import launch; sys.exit(launch(2, sys.argv[1:]))"


@contextmanager
def started(folder: Path, *arguments: object, **env: str) -> Iterator[forkserver.Forked]:
    """`python ARGUMENTS` in a fork; it and its processes are killed when the test goes wrong. See `ended`."""
    known = {k: v for k, v in processes.environment(0, 1, 0).items() if k not in NUMBERS}
    with (folder / "out.txt").open("wb") as out, (folder / "err.txt").open("wb") as err:
        process = forkserver.start(arguments, env=known | env, cwd=processes.ROOT, stdout=out, stderr=err)
    try:
        yield process
    finally:
        for pid in ranks_of(process).values() if process.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
        process.end()


def peers(folder: Path, mode: str) -> list[object]:
    """What starts two processes of peers.py as `mm-grpo train --processes 2` starts trainings."""
    return ["-c", LAUNCH, PEERS, folder, mode]


def ended(process: forkserver.Forked, folder: Path) -> tuple[int, str]:
    """The exit code, and what was written to standard error."""
    return process.wait(DEADLINE), (folder / "err.txt").read_text()


def ranks_of(process: forkserver.Forked) -> dict[int, int]:
    """The processes that a launcher has started: pid by rank."""
    found = {}
    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        with suppress(OSError):  # a child that ends while it is read
            variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
            found |= {int(v.removeprefix("RANK=")): int(pid) for v in variables if v.startswith("RANK=")}
    return found


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "the moment never came"
        time.sleep(0.02)


def threads(folder: Path) -> list[str]:
    return [json.loads((folder / f"rank-{rank}.json").read_text())["threads"] for rank in (0, 1)]


@pytest.mark.long
def test_a_guard_ends_the_run_with_3_and_the_report_is_written(tmp_path: Path) -> None:
    with started(tmp_path, *peers(tmp_path, "guard"), OMP_NUM_THREADS="5") as process:
        code, err = ended(process, tmp_path)
    assert (code, err) == (3, "stopped: guard logp_gap: too far\n")
    assert threads(tmp_path) == ["5", "5"]  # what the user has set stays
    assert (tmp_path / "report").read_text() == "whole"


@contextmanager
def exchanging_peers(tmp_path: Path) -> Iterator[tuple[forkserver.Forked, dict[int, int]]]:
    with started(tmp_path, *peers(tmp_path, "loop")) as process:
        wait_for(lambda: (tmp_path / "exchanged").exists() or process.poll() is not None)
        ranks = ranks_of(process)
        assert sorted(ranks) == [0, 1]
        yield process, ranks


@pytest.mark.long
@pytest.mark.field_bug("hangs")
def test_a_killed_process_is_named_and_leaves_no_other(tmp_path: Path) -> None:
    with exchanging_peers(tmp_path) as (process, ranks):
        os.kill(ranks[1], signal.SIGKILL)
        code, err = ended(process, tmp_path)
    assert code == 1
    assert f"error: process 1 of 2 (pid {ranks[1]}) was ended by SIGKILL" in err, err
    assert "Traceback" not in err and "elastic" not in err, err
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())


@pytest.mark.long
def test_a_killed_launcher_leaves_no_process(tmp_path: Path) -> None:
    with exchanging_peers(tmp_path) as (process, ranks):
        process.kill()
        process.wait(DEADLINE)
        wait_for(lambda: not any(stat(pid)[0] != "Z" for pid in ranks.values()))


@pytest.mark.long
def test_two_processes_make_one_run_that_goes_on_after_a_stop(config_path: Path, tmp_path: Path) -> None:
    """Also where something left aborts the process when the interpreter is taken down, as threads of gloo may do."""
    last = "import os\nclass Last:\n    def __del__(self, abort=os.abort):\n        abort()\nlast = Last()\n"
    (config_path.parent / "mine.py").write_text((config_path.parent / "mine.py").read_text() + last)
    run, number = tmp_path / "run", signal.SIGTERM
    arguments = ("-m", "mm_grpo.cli", "train", config_path, "--processes", "2", "run.max_steps=400")
    with started(tmp_path, *arguments) as process:
        wait_for(lambda: (run / "metrics.jsonl").exists() or process.poll() is not None)
        process.send_signal(number)
        code, err = ended(process, tmp_path)
    assert code == 128 + number, err
    (newest,) = (run / "checkpoints").iterdir()
    step = int(newest.name[5:])
    lines = err.strip().splitlines()[-3:]
    assert lines[-1].startswith(f"stopped by {number.name} after step {step}; "), err
    assert str(run) in lines[-1], err
    assert err.count("the run ends after this step") == 1 and "Traceback" not in err
    assert (run / "report.html").exists()
    rows = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row for row in rows if row] == list(range(1, step + 1))
    program = ("-m", "mm_grpo.cli", "train", config_path, f"run.max_steps={step + 1}", "--resume")
    codes = processes.launch(program, 2, [], tmp_path / "resumed", deadline=DEADLINE)  # as it starts them
    out = "".join((tmp_path / "resumed" / f"rank-{rank}.txt").read_text() for rank in (0, 1))
    assert codes == [0, 0] and out.count(f"done: {step + 1} steps") == 1, out
    assert "a step on 2 processes -> 1 update" in out and (run / "model" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "world", "words"),
    [
        (["--processes", "2", "--smoke"], "", "--processes 2: --smoke runs in one process"),
        (["--processes", "3"], "", "--processes 3: 2 GPUs are visible here"),
        (["--processes", "2", "rollout.num_generations=1"], "", "num_generations"),
        (["--processes", "4"], "4", "--processes 4: this process was started by torchrun"),
    ],
)
def test_processes_that_cannot_work_are_refused_before_any_starts(
    arguments: list[str],
    world: str,
    words: str,
    command: Any,
    config_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    if not world:
        monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(train_module, "launch", lambda *_: pytest.fail("a process was started"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    result = command("train", config_path, *arguments)
    assert result.code == 2 and words in result.err and result.err.count("\n") == 1
    assert not (config_path.parent / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ray", "127.0.0.1:PORT"], "Connection refused); give HOST:PORT of its head"),
        (["--ray", "somewhere"], "--ray somewhere: no Ray cluster answers there"),
        (["--ray", "x:1", "--smoke"], "--ray x:1: --smoke runs in one process"),
        (["--ray", "x:1", "--serve", "1", "--share-gpus"], "--ray x:1: its servers share no GPUs"),
        (["--ray", "x:1", "--processes", "0"], "--processes 0: must be at least 1"),
        (["--retries", "2"], "--retries 2: only --ray tries again"),
        (["--ray", "127.0.0.1:PORT", "uninstalled"], "Ray is not installed; install mm_grpo[ray]"),
    ],
)
def test_what_ray_cannot_run_is_refused_in_one_message(
    arguments: list[str], words: str, command: Any, config_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if arguments[-1] == "uninstalled":
        monkeypatch.setattr(ray_launch, "find_spec", lambda _: None)
    with processes.refusing_port() as port:
        given = [word.replace("PORT", str(port)) for word in arguments if word != "uninstalled"]
        result = command("train", config_path, *given)
    assert result.code == 2 and words in result.err and result.err.count("\n") == 1
    assert not (config_path.parent / "run").exists()


def test_what_the_launcher_gets(command: Any, config_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    calls: list[Any] = []
    monkeypatch.setattr(train_module, "launch", lambda *given: calls.append(given) or 3)
    result = command("train", config_path, "model.device=cpu", "--resume", "--processes", "2")
    assert result.code == 3
    monkeypatch.setattr(train_module, "_train", lambda *given: calls.append("a plain run"))
    assert command("train", config_path, "--processes", "1").code == 0
    again = (2, ["-m", "mm_grpo.cli", "train", str(config_path), "model.device=cpu", "--resume"])
    assert calls == [again, "a plain run"]


def failures(*ends: tuple[int, int, int]) -> dict[int, ProcessFailure]:
    """By rank, from (rank, exit code, second)."""
    made = {rank: ProcessFailure(rank, 1000 + rank, code, "") for rank, code, _ in ends}
    for rank, _, second in ends:
        made[rank].timestamp = second
    return made


@pytest.mark.parametrize(
    ("ends", "code", "printed"),
    [
        ([(1, 1, 5), (0, 3, 6)], 3, ""),  # what it lost was a process that a guard had stopped
        ([(0, -15, 6), (1, 2, 5)], 2, ""),  # the launcher ended the first
        ([(0, 1, 5), (1, -15, 5)], 1, ""),  # a fault, and its traceback
        ([(0, 1, 7), (1, -9, 7)], 1, "process 1 of 2 (pid 1001) was ended by SIGKILL; "),
        ([(1, 130, 4), (0, -15, 7)], 130, ""),  # it stopped after a whole step, and printed so
    ],
)
def test_the_exit_code_of_a_launch(ends: list[tuple[int, int, int]], code: int, printed: str) -> None:
    found, message = exit_code(failures(*ends), 2)
    assert found == code and printed in message and bool(printed) == bool(message)


def test_the_exit_code_of_a_launch_that_a_signal_ended() -> None:
    assert exit_code(failures((0, -9, 5), (1, -2, 5)), 2, signal.SIGINT) == (130, "interrupted")
    assert exit_code(failures((0, -9, 5), (1, -2, 5)), 2, signal.SIGTERM) == (143, "ended by SIGTERM")
    assert exit_code(failures((0, 3, 5), (1, -2, 5)), 2, signal.SIGINT) == (3, "")


def test_a_lost_connection_is_distinguished_from_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # of a test before
    assert lost_another(RankLost("process 0 of 2 lost another one")) == "process 0 of 2 lost another one"
    gloo = RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4\nmore")
    assert "lost another one while exchanging 'gradients' ([../gloo" in str(lost_another(gloo))
    assert lost_another(RuntimeError("CUDA out of memory")) is None
