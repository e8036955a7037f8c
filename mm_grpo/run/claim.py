"""The mark of a run folder, and the lock on it while a run writes there.

`mm_grpo_run.json` is written into a run folder before anything else. It names what runs of mm_grpo wrote there
(`wrote`), of `model/` and `adapter/` also each file: anything else under the same names is somebody else's, and is
neither written over nor removed. An empty mark, which a power cut may leave, says that everything there is a run's.

A run holds the mark open and locked (flock), so the lock ends with the process, however that ends. Where a file
system has no locks the run goes on with a warning. `pid` and `host` are in the mark while a run holds it.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mm_grpo.errors import ConfigError
from mm_grpo.files import LARGEST_JSON, RUN_MARK, parse_json, read_regular_file

MARK = RUN_MARK
FORMAT = 1
PATIENCE = 0.5
"""Seconds in which a process that only looks at the lock lets it go."""
logger = logging.getLogger("mm_grpo")


@dataclass(frozen=True)
class Mark:
    """What a mark says. `wrote` is None where everything in the folder is a run's."""

    run: str
    wrote: frozenset[str] | None
    holder: str = ""

    def owns(self, name: str) -> bool:
        return self.wrote is None or name in self.wrote


def read_mark(root: Path) -> Mark | None:
    """The mark of the folder `root`; None when it has none. ConfigError for one that this version cannot read."""
    try:
        data = read_regular_file(root / MARK, LARGEST_JSON)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"run.dir = '{root}': {MARK} cannot be read ({error.strerror or error})") from None
    return _parsed(data, root)


def refuse_running(root: Path) -> None:
    """Raise ConfigError while a run holds the folder."""
    try:
        with (root / MARK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _running(root) from None
    except OSError:
        return  # no mark yet, or no locks here, of which `Claim` warns


class Claim:
    """The lock on a run folder: taken when made, until `release`. Raises ConfigError while another run has it.

    Raises OSError when the mark cannot be written.
    """

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        new = not (root / MARK).exists()
        handle = os.open(root / MARK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        self._file: BinaryIO = os.fdopen(handle, "r+b", buffering=0)
        _OPEN.add(self)
        try:
            self._lock(root)
            data = self._file.read()
            # an empty mark that was there makes all that lies there a run's; one that was made just now, nothing
            self.mark = Mark(new_run(), frozenset()) if new and not data else _parsed(data, root)
            self._write(holder=True)
        except BaseException:
            self._file.close()
            raise

    def add(self, names: Iterable[str], *, run: str | None = None) -> None:
        """Note that the run writes `names`; with `run` the folder is that of a new run."""
        wrote = None if self.mark.wrote is None else self.mark.wrote | set(names)
        self.mark = Mark(run or self.mark.run, wrote)
        self._write(holder=True)

    def release(self) -> None:
        """Let another run have the folder."""
        if not self._file.closed:
            try:
                self._write(holder=False)
            except OSError as error:  # a full disk: the run has ended all the same
                logger.warning("%s cannot be written (%s)", MARK, error)
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
                    "run.dir = '%s': this file system has no locks (%s); let no other run write there",
                    root,
                    error,
                )
                return None

    def _write(self, holder: bool) -> None:
        """In place, for a new file would not be locked; a few hundred bytes, in one call."""
        known: dict[str, Any] = {"format": FORMAT, "run": self.mark.run}
        if self.mark.wrote is not None:
            known["wrote"] = sorted(self.mark.wrote)
        if holder:
            known |= {"pid": os.getpid(), "host": socket.gethostname()}
        data = json.dumps(known).encode() + b"\n"
        os.pwrite(self._file.fileno(), data, 0)
        self._file.truncate(len(data))


_OPEN: weakref.WeakSet[Claim] = weakref.WeakSet()


def _close_in_child() -> None:
    """A copy of the handle in a fork would keep the lock after the run has ended."""
    for claim in list(_OPEN):
        claim._file.close()


os.register_at_fork(after_in_child=_close_in_child)


def new_run() -> str:
    """The id of a new run."""
    return uuid.uuid4().hex


def _parsed(data: bytes, root: Path) -> Mark:
    """An empty mark is that of a folder whose contents are all a run's."""
    if not data.strip():
        return Mark(new_run(), None if _holds_anything(root) else frozenset())
    try:
        known = parse_json(data, dict)
        if known["format"] != FORMAT:
            raise ConfigError(
                f"run.dir = '{root}': {MARK} has format {known['format']}, and this version reads {FORMAT}; name "
                "another folder with run.dir=..."
            )
        holder = f"process {known['pid']} on {known['host']}" if "pid" in known else ""
        wrote = frozenset(map(str, known["wrote"])) if "wrote" in known else None
        return Mark(str(known["run"]), wrote, holder)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"run.dir = '{root}': {MARK} is damaged ({error}); if everything there is a run's, empty that file, else "
            "name another folder with run.dir=..."
        ) from None


def _holds_anything(root: Path) -> bool:
    return any(entry.name != MARK for entry in root.iterdir())


def _running(root: Path) -> ConfigError:
    mark = read_mark(root)
    who = mark.holder if mark is not None and mark.holder else "another process"
    return ConfigError(
        f"run.dir = '{root}': a run is going on there ({who}); wait for its end or end it, or name another folder with "
        "run.dir=..."
    )
