"""The mark of a run folder, and the lock on it while a run writes there.

`mm_grpo_run.json` is written into a run folder before anything else. It names what runs of mm_grpo wrote there
(`wrote`), of `model/` and `adapter/` also each file: anything else under the same names is somebody else's, and is
neither written over nor removed. `holder` is the process that held it last.

A run holds the mark open and locked (flock), so the lock ends with the process, however that ends. Where a file
system has no locks the run goes on with a warning.
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

PATIENCE = 0.5
"""Seconds in which a process that only looks at the lock lets it go."""
logger = logging.getLogger("mm_grpo")


@dataclass(frozen=True)
class RunMark:
    """What the mark of a run folder says."""

    wrote: frozenset[str] = frozenset()
    holder: str = ""

    def owns(self, name: str) -> bool:
        return name in self.wrote


def read_mark(root: Path) -> RunMark:
    """The mark of the folder `root`, empty when it has none. ConfigError for one that cannot be read."""
    try:
        data = read_regular_file(root / RUN_MARK, LARGEST_JSON)
        # empty until the first run has the lock
        known: dict[str, Any] = parse_json(data, dict) if data else {"wrote": [], "holder": ""}
        return RunMark(frozenset(known["wrote"]), known["holder"])
    except (FileNotFoundError, NotADirectoryError):
        return RunMark()
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"run.dir = '{root}': {RUN_MARK} cannot be read ({error}); name another folder with run.dir=..."
        ) from None


def refuse_running(root: Path) -> None:
    """Raise ConfigError while a run holds the folder."""
    try:
        with (root / RUN_MARK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _running(root) from None
    except OSError:
        return  # no mark yet, or no locks here, of which `RunLock` warns


class RunLock:
    """The lock on a run folder: taken when made, until `release`. Raises ConfigError while another run has it.

    Raises OSError when the mark cannot be written.
    """

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        handle = os.open(root / RUN_MARK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        self._file = os.fdopen(handle, "r+b", buffering=0)
        # a copy of the handle in a fork would keep the lock after the run has ended
        os.register_at_fork(after_in_child=self._file.close)
        try:
            self._lock(root)
            self._write(replace(read_mark(root), holder=f"process {os.getpid()} on {socket.gethostname()}"))
        except BaseException:
            self._file.close()
            raise

    def add(self, names: Iterable[str]) -> None:
        """Note that the run writes `names`."""
        self._write(replace(self.mark, wrote=self.mark.wrote | set(names)))

    def release(self) -> None:
        """Let another run have the folder."""
        self._file.close()

    def _lock(self, root: Path) -> None:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise _running(root) from None
                time.sleep(PATIENCE / 10)
            except OSError as error:
                logger.warning(
                    "run.dir = '%s' has no locks (%s); let no other run write there", root, error.strerror
                )
                return None

    def _write(self, mark: RunMark) -> None:
        """In place, for a new file would not be locked; a few hundred bytes, in one call, on the disk on return."""
        self.mark = mark
        data = json.dumps({"wrote": sorted(mark.wrote), "holder": mark.holder}).encode() + b"\n"
        os.pwrite(self._file.fileno(), data, 0)
        self._file.truncate(len(data))
        os.fsync(self._file.fileno())


def _running(root: Path) -> ConfigError:
    who = read_mark(root).holder or "another process"
    return ConfigError(
        f"run.dir = '{root}': a run is going on there ({who}); wait for its end or end it, or name another folder with "
        "run.dir=..."
    )
