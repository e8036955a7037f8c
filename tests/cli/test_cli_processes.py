"""`mm-grpo train --processes N`: one run in several processes that ends with one message and one exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from mm_grpo import cli
from mm_grpo.cli_launch import verdict
from mm_grpo.learner.distributed import RankLost
from mm_grpo.learner.parting import lost_another

PATIENCE = 150.0


@pytest.fixture
def job(tmp_path: Path, models: dict[str, Path]) -> Path:
    """A config of four rows, and a reward that notes the environment of the process that calls it."""
    for i in range(4):
        tiny.picture(i).save(tmp_path / f"{i}.png")
    rows = [{"prompt": "what is it", "image": f"{i}.png"} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "mine.py").write_text(
        "import os, pathlib\n"
        "def mine(completion):\n"
        f"    pathlib.Path({str(tmp_path / 'threads')!r}).write_text(os.environ['OMP_NUM_THREADS'])\n"
        "    return len(set(completion))\n"
    )
    config = {
        "model": {"path": str(models["qwen2_5_vl"])},
        "data": {"train": str(tmp_path / "rows.jsonl")},
        "rollout": {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 4},
        "rewards": [f"{tmp_path}/mine.py:mine"],
        "optim": {"learning_rate": 1e-3},
        "run": {"dir": str(tmp_path / "run"), "max_steps": 2},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@contextmanager
def started(job: Path, *arguments: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """`mm-grpo train JOB --processes 2 ARGUMENTS`; killed with its processes when the test goes wrong."""
    command = [sys.executable, "-m", "mm_grpo.cli", "train", str(job), "--processes", "2", *arguments]
    known = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    paths = os.pathsep.join([str(Path(cli.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        command,
        env={**known, "PYTHONPATH": paths, "DS_ACCELERATOR": "cpu", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        for pid in [*ranks_of(process).values(), process.pid] if process.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
        process.wait()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def ranks_of(process: subprocess.Popen[str]) -> dict[int, int]:
    """The processes that a launcher has started: pid by rank."""
    found = {}
    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        found |= {int(v.removeprefix("RANK=")): int(pid) for v in variables if v.startswith("RANK=")}
    return found


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "the moment never came"
        time.sleep(0.02)


def rows(job: Path) -> int:
    file = job.parent / "run" / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.mark.long
def test_two_processes_are_one_run(job: Path) -> None:
    with started(job) as process:
        code, out, err = ended(process)
    assert code == 0, err
    assert out.count("done: 2 steps") == 1 and "tokens on 2 processes -> 1 update" in out
    assert rows(job) == 2 and (job.parent / "run" / "model" / "model.safetensors").exists()
    assert (job.parent / "threads").read_text() == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert "is deprecated" not in err and "Traceback" not in err


@pytest.mark.long
def test_a_mistake_that_is_found_late_is_said_once(job: Path) -> None:
    with started(job, "optim.max_tokens_per_pack=8") as process:
        code, _, err = ended(process)
    assert code == 2
    assert err.count("error: ") == 1 and err.count("optim.max_tokens_per_pack = 8") == 1, err
    assert "Traceback" not in err and "elastic" not in err, err


@pytest.mark.long
def test_a_guard_ends_the_run_with_3_and_the_report_is_written(job: Path) -> None:
    settings = "run.max_logp_gap=1e-12", "run.parity_check=false"
    with started(job, *settings, OMP_NUM_THREADS="5") as process:
        code, _, err = ended(process)
    assert code == 3, err
    assert (job.parent / "threads").read_text() == "5"  # what the user has set stays
    assert err.count("stopped: guard logp_gap") == 1 and "Traceback" not in err, err
    assert (job.parent / "run" / "report.html").stat().st_size > 2000


@pytest.mark.long
def test_a_killed_process_is_named_and_leaves_no_other(job: Path) -> None:
    with started(job, "run.max_steps=500") as process:
        wait_for(lambda: rows(job) >= 1 or process.poll() is not None)
        ranks = ranks_of(process)
        assert sorted(ranks) == [0, 1]
        os.kill(ranks[1], signal.SIGKILL)
        code, _, err = ended(process)
    assert code == 1
    assert f"error: process 1 of 2 (pid {ranks[1]}) was ended by SIGKILL" in err, err
    assert "Traceback" not in err and "elastic" not in err, err
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())


@pytest.mark.long
def test_ctrl_c_ends_all_with_130(job: Path) -> None:
    with started(job, "run.max_steps=500") as process:
        wait_for(lambda: rows(job) >= 1 or process.poll() is not None)
        ranks = ranks_of(process)
        process.send_signal(signal.SIGINT)
        code, _, err = ended(process)
    assert (code, err.strip()) == (130, "interrupted")
    assert len(ranks) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--processes", "0"], "--processes 0: must be at least 1"),
        (["--processes", "-3"], "--processes -3: must be at least 1"),
        (["--processes", "2", "--smoke"], "--processes 2: --smoke runs in one process"),
        (["--processes", "3"], "--processes 3: 2 GPUs are visible here, and each process needs its own; ask"),
        (["--processes", "2", "rollout.num_generations=1"], "num_generations counts completions per prompt"),
    ],
)
def test_what_cannot_work_is_told_before_anything_starts(
    arguments: list[str], words: str, command: Any, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(cli, "launch", lambda *_: pytest.fail("a process was started"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    result = command("train", job, *arguments)
    assert result.code == 2 and words in result.err and result.err.count("\n") == 1
    assert not (job.parent / "run").exists()


def test_inside_a_launch_there_is_no_second_one(
    command: Any, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    result = command("train", job, "--processes", "4")
    assert result.code == 2
    assert (
        "--processes 4: this process was started by torchrun or `accelerate launch` (WORLD_SIZE" in result.err
    )


def test_what_is_passed_on(command: Any, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    calls: list[Any] = []
    monkeypatch.setattr(cli, "launch", lambda *given: calls.append(given) or 3)
    result = command("train", job, "model.device=cpu", "--resume", "--processes", "2")
    assert result.code == 3
    assert calls == [(2, ["train", str(job), "model.device=cpu", "--resume"])]


def test_one_process_is_a_plain_run(command: Any, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(cli, "launch", lambda *_: pytest.fail("a launcher was started"))
    result = command("train", job, "run.max_steps=1", "--processes", "1")
    assert result.code == 0 and "tokens on 1 process ->" in result.out


def failures(*ends: tuple[int, int, int]) -> dict[int, ProcessFailure]:
    """By rank, from (rank, exit code, second)."""
    made = {rank: ProcessFailure(rank, 1000 + rank, code, "") for rank, code, _ in ends}
    for rank, _, second in ends:
        made[rank].timestamp = second
    return made


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ([(0, 2, 5), (1, 2, 5)], 2, ""),
        ([(1, 1, 5), (0, 3, 6)], 3, ""),  # what it lost was a process that a guard had stopped
        ([(0, -15, 6), (1, 2, 5)], 2, ""),  # the launcher ended the first
        ([(0, 1, 5), (1, -15, 5)], 1, ""),  # a fault, and its traceback
        ([(0, -15, 6), (1, -15, 5)], 1, "process 1 of 2 (pid 1001) was ended by SIGTERM; the others"),
        ([(0, 1, 7), (1, -9, 7)], 1, "process 1 of 2 (pid 1001) was ended by SIGKILL; the system does so"),
        ([(0, -11, 4), (1, 1, 7)], 1, "process 0 of 2 (pid 1000) was ended by SIGSEGV; the others"),
    ],
)
def test_the_verdict(ends: list[tuple[int, int, int]], code: int, said: str) -> None:
    found, message = verdict(failures(*ends), 2)
    assert found == code and said in message and bool(said) == bool(message)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RankLost("process 0 of 2 lost another one"), "process 0 of 2 lost another one"),
        (
            RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4\nmore"),
            "this process lost another one while exchanging 'gradients' ([../gloo/transport/tcp/pair.cc:553] "
            "Connection closed by peer [127.0.0.1]:4): it failed, ended, or took longer than run.process_timeout; "
            "its own output says why",
        ),
        (RuntimeError("CUDA out of memory"), None),
    ],
)
def test_a_lost_connection_is_told_from_a_fault(error: RuntimeError, said: str | None) -> None:
    assert lost_another(error) == said
