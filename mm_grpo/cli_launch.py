"""`mm-grpo train CONFIG --processes N`: the same command in N processes of this machine.

torch's elastic launcher starts them, hands them their numbers and ends all when one fails; nothing is
started twice. What is ours is the way in (what cannot work is told before a process starts) and the way
out: the run's exit code is passed on, and what a process could not say itself, that it was killed, is
said for it. Several hosts need a launcher on each: see examples/cluster/.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mm_grpo.errors import ConfigError

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig

RUN_ID = "mm_grpo-"
"""How the id of a launch from here begins; its processes find it in TORCHELASTIC_RUN_ID."""
OF_THE_RUN = (2, 3)
"""Exit codes that mean something; a process that ends for the sake of another has a lesser one."""


def launched_here() -> bool:
    """Whether this is one of the processes that `launch` started, and which it speaks for."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(RUN_ID)


def check_processes(processes: int, config: GRPOConfig, *, smoke: bool) -> None:
    """Raise ConfigError for a number of processes that cannot work here."""
    told = f"--processes {processes}"
    if processes < 1:
        raise ConfigError(f"{told}: must be at least 1; one process per GPU is common")
    if "WORLD_SIZE" in os.environ:
        raise ConfigError(
            f"{told}: this process was started by torchrun or `accelerate launch` (WORLD_SIZE = "
            f"{os.environ['WORLD_SIZE']}), which say how many there are; leave --processes out"
        )
    if processes == 1:
        return
    if smoke:
        raise ConfigError(f"{told}: --smoke runs in one process; leave one of the two out")
    if config.model.device != "cpu":
        import torch

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else None
        if gpus is not None and processes > gpus:
            raise ConfigError(
                f"{told}: {gpus} GPU{'s are' if gpus != 1 else ' is'} visible here, and each process needs its own; "
                f"ask for at most {gpus}, or set model.device=cpu"
            )


def launch(processes: int, arguments: Sequence[str]) -> int:
    """Run `mm-grpo ARGUMENTS` in so many processes; the exit code of the run.

    SIGINT and SIGTERM are passed on, and 130 (Ctrl-C) or 1 returned. OMP_NUM_THREADS shares out the cores
    unless the user has set it.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    logging.disable(logging.CRITICAL)  # the launcher's own lines; what matters is said below
    try:
        with tempfile.TemporaryDirectory(prefix="mm_grpo_launch_") as folder:
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=processes,
                run_id=f"{RUN_ID}{uuid.uuid4()}",
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                local_addr="localhost",
                max_restarts=0,
                logs_specs=DefaultLogsSpecs(log_dir=folder),
            )
            elastic_launch(config, sys.executable)("-m", "mm_grpo.cli", *arguments)
    except ChildFailedError as error:
        code, message = verdict(error.failures, processes)
    except SignalException as stop:
        by_hand = stop.sigval == signal.SIGINT
        code, message = (130, "interrupted") if by_hand else (1, f"ended by {stop.sigval.name}")
    else:
        code, message = 0, ""
    finally:
        logging.disable(logging.NOTSET)
    if message:
        print(message, file=sys.stderr)
    return code


def verdict(failures: Mapping[int, Any], processes: int) -> tuple[int, str]:
    """The exit code of a run of which processes failed, by rank, and what none of them could say.

    The first to end is the cause: the others lose it, or are ended by the launcher, with SIGTERM.
    """
    for failure in failures.values():
        if failure.exitcode in OF_THE_RUN:
            return failure.exitcode, ""

    def lateness(rank: int) -> tuple[bool, int, bool]:
        failure = failures[rank]
        return failure.exitcode == -signal.SIGTERM, failure.timestamp, failure.exitcode >= 0

    rank = min(failures, key=lateness)
    first = failures[rank]
    if first.exitcode >= 0:
        return first.exitcode, ""
    name = first.signal_name()
    cause = "; the system does so when memory is short" if name == "SIGKILL" else ""
    return 1, (
        f"error: process {rank} of {processes} (pid {first.pid}) was ended by {name}{cause}; the others were "
        "ended with it. Go on with --resume if run.save_every wrote checkpoints"
    )
