"""Scripts in several ranks on one machine, as torchrun would start them: `launch(script, 2, arguments)`.

The ranks are forks of the fork server (see forkserver.py), which saves each its imports. Every wait has a
deadline, and only processes that were started here are ended.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from helpers import forkserver

ROOT = Path(__file__).parents[2]


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """The environment of one rank, on the CPU."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
    return {**alone(), "MASTER_ADDR": "127.0.0.1", **{name: str(n) for name, n in numbers.items()}}


def alone() -> dict[str, str]:
    """The environment of a program that is no rank, on the CPU."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    paths = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "distributed")]
    paths += filter(None, [env.get("PYTHONPATH", "")])
    return {**env, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


def free_port() -> int:
    """A port below those that the system hands out, so that no connection takes it before it is used."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextmanager
def refusing_port() -> Iterator[int]:
    """A port of the loopback that refuses connections: it is taken, so no other test gets it, and nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield int(taken.getsockname()[1])


def start(
    program: Sequence[object],
    output: Path,
    env: Mapping[str, str],
    *,
    cwd: Path = ROOT,
    preload: Sequence[str] = (),
) -> forkserver.Forked:
    """Start `python PROGRAM` in a fork; what it prints goes to a file."""
    with output.open("wb") as file:
        return forkserver.start(program, env=env, cwd=cwd, stdout=file, stderr=file, preload=preload)


def finished(
    program: Sequence[object],
    output: Path,
    *,
    deadline: float = 400.0,
    cwd: Path = ROOT,
    preload: Sequence[str] = (),
    **env: str,
) -> tuple[int, str]:
    """Exit code and output of `python PROGRAM` in a fork; AssertionError when it takes longer."""
    process = start(program, output, {**alone(), **env}, cwd=cwd, preload=preload)
    try:
        process.wait(deadline)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"no end after {deadline} s\n{end_of(output)}") from None
    finally:
        process.end()
    return process.returncode or 0, output.read_text(errors="replace")


def launch(
    script: Path | Sequence[object],
    world: int,
    arguments: Sequence[object],
    folder: Path,
    *,
    deadline: float = 500.0,
    env: Mapping[str, str] | None = None,
    kill: tuple[int | None, Callable[[], bool]] | None = None,
    preload: Sequence[str] = (),
) -> list[int]:
    """Run `script` in `world` ranks; returns their exit codes. Output lies in `folder`/rank-N.txt. `script` is a
    file, or what stands in its place: ("-m", "module"). `kill` names a rank, or all by None, to be killed once a
    condition holds. Raises AssertionError with the ends of all outputs when the deadline (seconds) passes."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    program = [script] if isinstance(script, Path) else script
    ranks: list[forkserver.Forked] = []
    try:
        for rank in range(world):
            settings = {**environment(rank, world, port), **(env or {})}
            output = folder / f"rank-{rank}.txt"
            ranks.append(start([*program, *arguments], output, settings, preload=preload))
        end = time.monotonic() + deadline
        chosen = [] if kill is None else ranks if kill[0] is None else [ranks[kill[0]]]
        while kill and not kill[1]() and time.monotonic() < end and chosen[0].poll() is None:
            time.sleep(0.01)
        for process in chosen:
            process.kill()
        return [process.wait(max(0.1, end - time.monotonic())) for process in ranks]
    except subprocess.TimeoutExpired:
        raise AssertionError(f"no end after {deadline} s\n{outputs(folder, world)}") from None
    finally:
        for process in ranks:
            process.end()


def outputs(folder: Path, world: int) -> str:
    """The end of what each rank wrote."""
    return "\n".join(f"--- rank {rank}\n{end_of(folder / f'rank-{rank}.txt')}" for rank in range(world))


def end_of(output: Path) -> str:
    return output.read_text(errors="replace")[-3000:]
