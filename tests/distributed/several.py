"""Several processes on one machine, as torchrun would start them: `launch(script, 2, arguments)`.

Every wait has a deadline, and only processes that were started here are ended.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """The environment of one process, on the CPU."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    paths = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "distributed")]
    return {
        **env,
        "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [env.get("PYTHONPATH", "")])]),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(
    script: Path,
    world: int,
    arguments: Sequence[object],
    folder: Path,
    *,
    deadline: float = 240.0,
    env: Mapping[str, str] | None = None,
    kill: tuple[int, Callable[[], bool]] | None = None,
) -> list[int]:
    """Run `script` in `world` processes; returns their exit codes. Output lies in `folder`/rank-N.txt.

    `kill` names a process to be killed once a condition holds. Raises AssertionError with the ends of all
    outputs when the deadline passes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world):
            with (folder / f"rank-{rank}.txt").open("wb") as output:
                command = [sys.executable, str(script), *map(str, arguments)]
                settings = {**environment(rank, world, port), **(env or {})}
                processes.append(
                    subprocess.Popen(command, env=settings, stdout=output, stderr=subprocess.STDOUT)
                )
        end = time.monotonic() + deadline
        while kill and not kill[1]() and time.monotonic() < end and processes[kill[0]].poll() is None:
            time.sleep(0.01)
        if kill:
            processes[kill[0]].kill()
        for process in processes:
            process.wait(max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise AssertionError(f"no end after {deadline} s\n{outputs(folder, world)}") from None
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return [process.returncode for process in processes]


def outputs(folder: Path, world: int) -> str:
    """The end of what each process said."""
    return "\n".join(
        f"--- rank {rank}\n{(folder / f'rank-{rank}.txt').read_text(errors='replace')[-3000:]}"
        for rank in range(world)
    )
