"""Files that must not change while a run reads them: images, and mapped rows, which end a process with SIGBUS if their
file is cut. Each process compares size and time of a file with its first look, never the content."""

import os
from collections.abc import Iterable

from mm_grpo.errors import DataError


class FileStates:
    """Sizes and times of change of files by path, at the first look; `paths` are looked at now."""

    def __init__(self, paths: Iterable[str] = ()) -> None:
        self._first: dict[str, tuple[int, int]] = {}
        for path in paths:
            self.look(path, path)

    def look(self, path: str, where: str) -> None:
        """Raise DataError, beginning with `where`, if a file changed or vanished since the first look."""
        try:
            status = os.stat(path)
            now = status.st_size, status.st_mtime_ns
        except OSError:
            now = None
        if now != (self._first.get(path) if now is None else self._first.setdefault(path, now)):
            raise changed(where)

    def look_again(self) -> None:
        """Raise DataError if any of the files changed."""
        for path in self._first:
            self.look(path, path)


def changed(where: str) -> DataError:
    """Return the error about a file that changed."""
    return DataError(f"{where} changed since the run began; put it back and --resume, or start again")
