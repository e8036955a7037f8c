"""Kill a run at random moments, and let it go to its end.

The run is `mm-grpo train CONFIG --processes WORLD --resume`, in processes of its own. At a random moment the command,
and with two processes sometimes only one of them, is killed by SIGKILL; the first time that is while a checkpoint
is written. After each kill no process may be left.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from helpers import processes
from helpers.forkserver import Forked
from helpers.sessions import stat
from launches import NUMBERS, TRAIN
from runs import rows_of

from mm_grpo import GRPOConfig

PATIENCE = 240.0


def kill_until_done(config: Path, world: int, kills: int, seed: int) -> list[tuple[int | None, list[int]]]:
    """The exit code before each kill, None where it was under way, and the processes that were left after it; then the
    run is let go to its end."""
    folder, rng = Path(GRPOConfig.from_yaml(config).run.dir), random.Random(seed)
    log: list[tuple[int | None, list[int]]] = []
    for number in range(kills):
        before, begun = _writing(folder), _written(folder / "config.yaml")
        wanted = _newest(folder) + rng.randrange(1, 5)
        with _started(config, world) as command:
            if number == 0:  # while a checkpoint is written
                _wait(lambda before=before: bool(_writing(folder) - before), command)  # type: ignore[misc]
            else:  # a run that goes on first cuts the rows after its checkpoint
                _wait(
                    lambda begun=begun, wanted=wanted: (  # type: ignore[misc]
                        _written(folder / "config.yaml") != begun and rows_of(folder) >= wanted
                    ),
                    command,
                )
            time.sleep(rng.uniform(0.0, 0.4 if number else 0.1))
            tree = _tree(command.pid)
            one = world > 1 and rng.random() < 0.5
            victim = rng.choice([p for p in tree if p != command.pid]) if one else command.pid
            if (ended := command.poll()) is None:
                os.kill(victim, signal.SIGKILL)
            command.wait(PATIENCE)
        end = time.monotonic() + 60
        while (left := [p for p in tree if stat(p)[0] != "Z"]) and time.monotonic() < end:
            time.sleep(0.01)
        log.append((ended, left))
    _go_to_the_end(config, world)
    return log


def _go_to_the_end(config: Path, world: int) -> None:
    """In forks, which need no imports; those that are killed are the command's own processes."""
    program, output = ("-m", "mm_grpo.cli"), config.with_suffix(".ranks")
    if world == 1:
        code, said = processes.finished(
            [*TRAIN, config, "--resume"], config.with_suffix(".log"), deadline=PATIENCE
        )
        assert code == 0, said
    else:
        codes = processes.launch(program, world, ["train", config, "--resume"], output, deadline=PATIENCE)
        assert codes == [0] * world, processes.outputs(output, world)


@contextmanager
def _started(config: Path, world: int) -> Iterator[subprocess.Popen[bytes] | Forked]:
    """The command; of one process in a fork, whose start takes no time."""
    known = {k: v for k, v in processes.environment(0, 1, 0).items() if k not in NUMBERS}
    program = [*TRAIN, str(config), "--resume", "--processes", str(world)]
    log = config.with_suffix(".log")
    if world == 1:
        process = processes.start(program, log, known)
        try:
            yield process
        finally:
            process.end()
    else:
        with log.open("ab") as output:
            command = [sys.executable, *program]
            with subprocess.Popen(
                command, cwd=processes.ROOT, env=known, stdout=output, stderr=output
            ) as started:
                yield started


def _wait(wanted: Callable[[], bool], command: subprocess.Popen[bytes] | Forked) -> None:
    end = time.monotonic() + PATIENCE
    while not wanted() and command.poll() is None:
        assert time.monotonic() < end, "the moment never came"
        time.sleep(0.002)


def _writing(folder: Path) -> set[tuple[str, int]]:
    """Checkpoints that are being written, or were when a process was killed: name and inode."""
    found = set()
    for path in (folder / "checkpoints").glob(".step-*.new"):
        with suppress(FileNotFoundError):
            found.add((path.name, path.stat().st_ino))
    return found


def _written(file: Path) -> int:
    return file.stat().st_mtime_ns if file.exists() else 0


def _newest(folder: Path) -> int:
    return max((int(p.name[5:]) for p in (folder / "checkpoints").glob("step-*")), default=0)


def _tree(pid: int) -> list[int]:
    """A process and all that it started."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        found = [int(c) for task in tasks for c in (task / "children").read_text().split()]
    except OSError:
        found = []
    return [pid, *(p for child in found for p in _tree(child))]
