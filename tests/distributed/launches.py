"""Commands of launchers, run for real: `running([...])` starts one, and ends what it started."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import STDOUT, Popen

from helpers import processes

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch")
TRAIN = ("-m", "mm_grpo.cli", "train")
NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def running(command: Sequence[object], output: Path, **env: str) -> Iterator[Popen[bytes]]:
    """The command on the CPU, its output in a file. What is left of it at the end is killed."""
    known = {k: v for k, v in processes.environment(0, 1, 0).items() if k not in NUMBERS}
    with output.open("wb") as file:
        arguments = list(map(str, command))
        process = Popen(arguments, cwd=processes.ROOT, env=known | env, stdout=file, stderr=STDOUT)
    try:
        yield process
    finally:
        for pid in [*children(process.pid), process.pid] if process.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
        process.wait()


def children(pid: int) -> list[int]:
    """The processes that a process has started and that have not ended."""
    try:
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
