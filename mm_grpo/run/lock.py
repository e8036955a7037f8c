"""The mark of a run folder, and the lock on it while a run writes there.

`mm_grpo_run.json` is written into a run folder before anything else. It names what runs of mm_grpo wrote there
(`wrote`), of `model/` and `adapter/` also each file: anything else under the same names is somebody else's, and is
neither written over nor removed. An empty mark, which a power cut may leave, says that everything there is a run's.

A run holds the mark open and locked (flock), so the lock ends with the process, however that ends. Where a file
system has no locks the run goes on with a warning. `holder` is in the mark while a run holds it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
import uuid
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from mm_grpo.errors import ConfigError
from mm_grpo.files import LARGEST_JSON, RUN_MARK, parse_json, read_regular_file

PATIENCE = 0.5
"""Seconds in which a process that only looks at the lock lets it go."""
logger = logging.getLogger("mm_grpo")


def new_run() -> str:
    """The id of a new run."""
    return uuid.uuid4().hex


@dataclass(frozen=True)
class RunMark:
    """What the mark of a run folder says. `wrote` is None where everything in the folder is a run's."""

    run: str = field(default_factory=new_run)
    wrote: frozenset[str] | None = frozenset()
    holder: str | None = None

    def owns(self, name: str) -> bool:
        return self.wrote is None or name in self.wrote


def read_mark(root: Path) -> RunMark | None:
    """The mark of the folder `root`; None when it has none. ConfigError for one that cannot be read."""
    try:
        return _parsed(read_regular_file(root / RUN_MARK, LARGEST_JSON), root)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"run.dir = '{root}': {RUN_MARK} cannot be read ({error})") from None


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
        new = not (root / RUN_MARK).exists()
        handle = os.open(root / RUN_MARK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        self._file: BinaryIO = os.fdopen(handle, "r+b", buffering=0)
        _OPEN.add(self)
        try:
            self._lock(root)
            data = self._file.read()
            # an empty mark that was there makes all that lies there a run's; one that was made just now, nothing
            self.mark = RunMark() if new and not data else _parsed(data, root)
            self._write(f"process {os.getpid()} on {socket.gethostname()}")
        except BaseException:
            self._file.close()
            raise

    def add(self, names: Iterable[str], *, run: str | None = None) -> None:
        """Note that the run writes `names`; with `run` the folder is that of a new run."""
        wrote = None if self.mark.wrote is None else self.mark.wrote | set(names)
        self.mark = replace(self.mark, run=run or self.mark.run, wrote=wrote)
        self._write(self.mark.holder)

    def release(self) -> None:
        """Let another run have the folder."""
        if not self._file.closed:
            try:
                self._write(None)
            except OSError as error:  # a full disk: the run has ended all the same
                logger.warning("%s cannot be written (%s)", RUN_MARK, error)
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

    def _write(self, holder: str | None) -> None:
        """In place, for a new file would not be locked; a few hundred bytes, in one call."""
        self.mark = mark = replace(self.mark, holder=holder)
        wrote = None if mark.wrote is None else sorted(mark.wrote)
        data = json.dumps({"run": mark.run, "wrote": wrote, "holder": holder}).encode() + b"\n"
        os.pwrite(self._file.fileno(), data, 0)
        self._file.truncate(len(data))


_OPEN: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _close_in_child() -> None:
    """A copy of the handle in a fork would keep the lock after the run has ended."""
    for lock in list(_OPEN):
        lock._file.close()


os.register_at_fork(after_in_child=_close_in_child)


def _parsed(data: bytes, root: Path) -> RunMark:
    """An empty mark is that of a folder whose contents are all a run's."""
    if not data.strip():
        others = any(entry.name != RUN_MARK for entry in root.iterdir())
        return RunMark(wrote=None if others else frozenset())
    try:
        known = parse_json(data, dict)
        wrote = known["wrote"]
        return RunMark(known["run"], None if wrote is None else frozenset(wrote), known["holder"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"run.dir = '{root}': {RUN_MARK} is damaged ({error}); if everything there is a run's, empty that file, "
            "else name another folder with run.dir=..."
        ) from None


def _running(root: Path) -> ConfigError:
    mark = read_mark(root)
    who = (mark and mark.holder) or "another process"
    return ConfigError(
        f"run.dir = '{root}': a run is going on there ({who}); wait for its end or end it, or name another folder with "
        "run.dir=..."
    )
