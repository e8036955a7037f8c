"""Mark of a run folder, and its lock while a run writes there.

`mm_grpo_run.json` is the first file of a run folder. `wrote` names what runs wrote there, in `model/` and `adapter/`
each file; everything else is foreign, and is neither overwritten nor removed. `holder` is the last process that locked
it.

A run keeps the mark open and locked (flock), so the lock always ends with the process. On a file system without locks
the run only warns.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mm_grpo.errors import ConfigError
from mm_grpo.files import LARGEST_JSON, RUN_MARK, parse_json, read_regular_file

LOCK_TIMEOUT = 0.5
"""Seconds to wait for the lock, because `refuse_running` of another process takes it for a moment."""
logger = logging.getLogger("mm_grpo")


@dataclass(frozen=True)
class RunMark:
    """Contents of the mark of a run folder."""

    wrote: frozenset[str] = frozenset()
    holder: str = ""


def read_mark(root: Path) -> RunMark:
    """Read the mark of the folder `root`, empty if it has none. Raises ConfigError if it cannot be read."""
    try:
        data = read_regular_file(root / RUN_MARK, LARGEST_JSON)
        if not data:  # until the first run has the lock
            return RunMark()
        values: dict[str, Any] = parse_json(data, dict)
        return RunMark(frozenset(values["wrote"]), values["holder"])
    except (FileNotFoundError, NotADirectoryError):
        return RunMark()
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"run.dir = '{root}': {RUN_MARK} cannot be read ({error}); name another folder with run.dir=..."
        ) from None


def refuse_running(root: Path) -> None:
    """Raise ConfigError if a run has locked the folder."""
    try:
        with (root / RUN_MARK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _running(root) from None
    except OSError:
        return  # there is no mark, or there are no locks here (`RunLock` warns)


class RunLock:
    """Lock on a run folder, from construction to `release`.

    Raises ConfigError if another run has it, and OSError if the mark cannot be written.
    """

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        handle = os.open(root / RUN_MARK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        self._file = os.fdopen(handle, "r+b", buffering=0)
        # a forked process would keep the lock after the run has ended
        os.register_at_fork(after_in_child=self._file.close)
        try:
            self._lock(root)
            self._write(replace(read_mark(root), holder=f"process {os.getpid()} on {socket.gethostname()}"))
        except BaseException:
            self._file.close()
            raise

    def add(self, names: Iterable[str]) -> None:
        """Add `names` to those that runs write."""
        self._write(replace(self.mark, wrote=self.mark.wrote | set(names)))

    def release(self) -> None:
        """Unlock the folder."""
        self._file.close()

    def _lock(self, root: Path) -> None:
        end = time.monotonic() + LOCK_TIMEOUT
        while True:
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise _running(root) from None
                time.sleep(LOCK_TIMEOUT / 10)
            except OSError as error:
                message = "run.dir = '%s' has no locks (%s); let no other run write there"
                logger.warning(message, root, error.strerror)
                return None

    def _write(self, mark: RunMark) -> None:
        """Write the mark, and wait until it is on the disk."""
        self.mark = mark
        data = json.dumps({"wrote": sorted(mark.wrote), "holder": mark.holder}).encode() + b"\n"
        os.pwrite(self._file.fileno(), data, 0)  # in place: a renamed new file would not be locked
        self._file.truncate(len(data))
        os.fsync(self._file.fileno())


def _running(root: Path) -> ConfigError:
    holder = read_mark(root).holder or "another process"
    return ConfigError(
        f"run.dir = '{root}': a run is active there ({holder}); wait for its end or end it, or name another folder "
        "with run.dir=..."
    )
