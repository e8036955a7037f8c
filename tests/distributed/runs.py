"""Run as a script: whole runs of a config, in as many processes as were launched.

`runs.py CONFIG` trains, and resumes where there is something to resume. `runs.py CONFIG KILLS` does it in child
processes, of which the first KILLS are killed: while they roll out, learn or write a checkpoint.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from transformers.utils import logging

from mm_grpo import GRPOConfig, GRPOTrainer
from mm_grpo.rollout import evaluate

PATIENCE = 240.0


def train(config: str) -> None:
    logging.disable_progress_bar()
    evaluate.CHUNK = 1  # so that an evaluation of a few rows takes several, which grow
    GRPOTrainer(GRPOConfig.from_yaml(config), resume=True).train()


def rows_of(folder: Path) -> int:
    """Rows of the log; that of step 0 is the first evaluation."""
    file = folder / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    return sum(line.endswith(b"\n") and not line.startswith(b'{"step": 0,') for line in lines)


def newest(folder: Path) -> int:
    """The step of the newest checkpoint that has its name, 0 when there is none."""
    return max((int(p.name[5:]) for p in (folder / "checkpoints").glob("step-*")), default=0)


def kill_and_resume(config: str, kills: int) -> None:
    folder = Path(GRPOConfig.from_yaml(config).run.dir)
    rng = random.Random(3)
    log: list[dict[str, object]] = []
    for number in range(kills):
        before = rows_of(folder)
        pid = os.fork()
        if pid == 0:
            train(config)
            os._exit(0)
        if number % 3 == 0:  # while a checkpoint is written
            moment, wanted = 0.0, lambda: bool(list((folder / "checkpoints").glob(".step-*.new")))
        else:  # anywhere in a step; it begins with cutting the rows that will be made again
            first, more = newest(folder), rng.randrange(1, 4)
            moment = rng.uniform(0.0, 0.3)
            wanted = _grown(folder, first + more)
        _wait(wanted, pid)
        time.sleep(moment)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        left = sorted(p.name for p in (folder / "checkpoints").glob(".step-*.new"))
        log.append({"before": before, "rows": rows_of(folder), "checkpoint": newest(folder), "left": left})
    pid = os.fork()
    if pid == 0:
        train(config)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    (folder / "kills.json").write_text(json.dumps(log))


def _grown(folder: Path, rows: int) -> Callable[[], bool]:
    """Whether the log first lost the rows after the checkpoint, if any, and then reached `rows`."""
    stamp = (folder / "config.yaml").stat().st_mtime_ns if (folder / "config.yaml").exists() else 0

    def grown() -> bool:
        file = folder / "config.yaml"
        return file.exists() and file.stat().st_mtime_ns != stamp and rows_of(folder) >= rows

    return grown


def _wait(wanted: Callable[[], bool], pid: int) -> None:
    end = time.monotonic() + PATIENCE
    while not wanted():
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended or time.monotonic() > end:
            if not ended:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"the run ended or stood still before its moment came (status {status})")
        time.sleep(0.0005)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        kill_and_resume(sys.argv[1], int(sys.argv[2]))
    else:
        train(sys.argv[1])
