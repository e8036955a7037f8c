"""`mm-grpo train CONFIG --processes N`: the same command in N processes of this machine.

torch's elastic launcher starts them, sets their ranks and ends all when one fails; none is restarted. This module adds
checks before a process starts, the run's exit code, and a message that names a process that was killed.
Several hosts need a launcher on each: see examples/cluster/.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_grpo.errors import ConfigError
from mm_grpo.files import temporary_folder

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig

RUN_ID = "mm_grpo-"
"""Beginning of a launch's id, which its processes find in TORCHELASTIC_RUN_ID."""
SPECIFIC_CODES = (2, 3, 130, 143, 129)
"""Exit codes of a user's error, of a guard, and of a run that SIGINT, SIGTERM or SIGHUP ended after a whole step; a
process that ends because another did has 1."""
PR_SET_PDEATHSIG = 1


def launched_here() -> bool:
    """Return True in a process that `launch` started; `launch` prints the last message for it."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(RUN_ID)


def check_processes(processes: int, config: GRPOConfig, *, smoke: bool, here: bool = True) -> None:
    """Raise ConfigError if so many processes cannot run, `here` on this machine."""
    option = f"--processes {processes}"
    if processes < 1:
        raise ConfigError(f"{option}: must be at least 1; one process per GPU is common")
    if "WORLD_SIZE" in os.environ:
        raise ConfigError(
            f"{option}: this process was started by torchrun or `accelerate launch` (WORLD_SIZE = "
            f"{os.environ['WORLD_SIZE']}), which set their number; leave --processes out"
        )
    if processes == 1:
        return
    if smoke:
        raise ConfigError(f"{option}: --smoke runs in one process; leave one of the two out")
    if here and config.model.device != "cpu":
        import torch

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else None
        if gpus is not None and processes > gpus:
            raise ConfigError(
                f"{option}: {gpus} GPU{'s are' if gpus != 1 else ' is'} visible here, and each process needs its own; "
                f"ask for at most {gpus}, or set model.device=cpu"
            )


def launch(processes: int, arguments: Sequence[str]) -> int:
    """Run `python ARGUMENTS` in so many processes; return the exit code of the run.

    The first SIGINT, SIGTERM or SIGHUP is passed on, and the processes end after the running step; a Ctrl-C after it
    kills them. Then the exit code is 128 plus the signal's number. OMP_NUM_THREADS becomes cores divided by processes
    unless the user has set it.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from mm_grpo.distributed.ranks import STORE

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # torch's store listens at every address
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    logging.disable(logging.CRITICAL)  # the launcher's own report; ours is below
    signals: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        if not (pids := _children()):
            raise SignalException("no process was started yet", signal.Signals(number))
        if not signals or number == signal.SIGINT:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if signals else number)
            signals.append(number)

    # torch's own handlers would end the processes within 30 s, in the midst of a step
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number in (n for n, handler in handlers.items() if handler is not signal.SIG_IGN):
        signal.signal(number, pass_on)
    try:
        with temporary_folder("launch") as folder:
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=processes,
                run_id=f"{RUN_ID}{os.getpid()}-{uuid.uuid4()}",
                rdzv_backend="c10d",
                rdzv_endpoint=str(folder / "rendezvous"),
                rdzv_configs={"store_type": "file"},
                local_addr="localhost",
                max_restarts=0,
                logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
                signals_to_handle="SIGQUIT",
            )
            os.environ[STORE] = str(folder / "store")
            elastic_launch(config, sys.executable)("-P", *arguments)  # see import_path.library_first
    except ChildFailedError as error:
        code, message = exit_code(error.failures, processes, signals[0] if signals else None)
    except SignalException as stop:
        code, message = _ended_by(stop.sigval)
    else:
        code, message = 0, ""
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        logging.disable(logging.NOTSET)
    if message:
        print(message, file=sys.stderr)
    return code


def end_with_launcher() -> None:
    """Let the system kill this process of `launch` when the launcher has ended for whatever reason."""
    if not launched_here():
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    launcher = os.environ["TORCHELASTIC_RUN_ID"].removeprefix(RUN_ID).partition("-")[0]
    if str(os.getppid()) != launcher:  # it ended before
        os._exit(1)


def _children() -> list[int]:
    try:
        return [int(c) for c in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []


def _ended_by(number: int) -> tuple[int, str]:
    name = signal.Signals(number).name
    return 128 + number, "interrupted" if number == signal.SIGINT else f"ended by {name}"


def exit_code(failures: Mapping[int, Any], processes: int, passed_on: int | None = None) -> tuple[int, str]:
    """Return the exit code of a run whose processes failed, and the message that none of them could print.

    `failures` are by rank, `passed_on` is the signal that was passed on. The first process to end is the cause: the
    others lose it, or are ended by the launcher, with SIGTERM.
    """
    for failure in failures.values():
        if failure.exitcode in SPECIFIC_CODES:
            return failure.exitcode, ""
    if passed_on is not None:
        return _ended_by(passed_on)

    def order(rank: int) -> tuple[bool, int, bool]:
        failure = failures[rank]
        return failure.exitcode == -signal.SIGTERM, failure.timestamp, failure.exitcode >= 0

    rank = min(failures, key=order)
    first = failures[rank]
    if first.exitcode >= 0:
        return first.exitcode, ""
    name = first.signal_name()
    cause = "; the system does so when memory is short" if name == "SIGKILL" else ""
    return 1, (
        f"error: process {rank} of {processes} (pid {first.pid}) was ended by {name}{cause}; the others were "
        "ended with it. Go on with --resume"
    )
