"""Writing a file or a folder whole: beside, then renamed, so that nobody ever meets half of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def atomic_write(path: Path, data: str | bytes, *, durable: bool = True) -> None:
    """Put `data` at `path`; the file is either the old one or the new one, never a mixture.

    Text is written as UTF-8, with ? for what UTF-8 cannot hold. `durable` waits until the disk has
    it, so that the file also survives a power cut; without it only a killed process is survived. A
    failure leaves nothing behind.
    """
    # Not tempfile: its files can be read by their owner only, and a rename keeps that.
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as file:
            file.write(data.encode(errors="replace") if isinstance(data, str) else data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def atomic_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a new folder, and put it at `path` in place of what is there.

    A failure of `write` leaves what was there as it was. A process killed between the two renames
    leaves the old folder beside it, as .NAME.old, and the next call starts by putting it back.
    """
    new, old = path.with_name(f".{path.name}.new"), path.with_name(f".{path.name}.old")
    if old.exists() and not path.exists():
        os.replace(old, path)
    for left in (new, old):
        shutil.rmtree(left, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        write(new)
        if path.exists():
            os.replace(path, old)
        os.replace(new, path)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
