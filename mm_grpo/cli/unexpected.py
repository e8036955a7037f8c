"""Unexpected errors of any command: one line and exit code 1.

`keep_traceback` writes the traceback of a run's error to its error.txt; `--traceback` prints the traceback of any
command.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mm_grpo.errors import GuardStop, UserError
from mm_grpo.files import atomic_write
from mm_grpo.run.lock import read_mark
from mm_grpo.run.paths import RunPaths
from mm_grpo.terminal import printable, redact

MAX_CHARACTERS = 900  # characters of an error's own text that are shown
LIBRARIES = (str(Path(__file__).parents[1]), "<", *sysconfig.get_paths().values())
"""Prefixes of the names of files that are not the user's."""


def describe(error: BaseException) -> str:
    """Return the error's type and text and, if it passed a file of the user's, file and line, on one line."""
    try:
        text = " ".join(str(error).split())[:MAX_CHARACTERS]
    except Exception:  # raised by a user's exception class
        text = "its text cannot be shown"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(LIBRARIES)]
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {text}{place}{notes_of(error)}"


def notes_of(error: BaseException) -> str:
    """Return the notes of an error, such as the path of its traceback."""
    return "".join(f"; {note}" for note in getattr(error, "__notes__", ()))


@contextmanager
def keep_traceback(root: Path) -> Iterator[None]:
    """Write the traceback of an unexpected error to error.txt of the run in `root`, and add a note to the error."""
    try:
        yield
    except (UserError, GuardStop):
        raise
    except Exception as error:
        path = RunPaths(root).error
        with suppress(OSError, UserError):  # a full disk, a removed folder
            if path.name in read_mark(root).wrote:
                atomic_write(path, printable(redact("".join(traceback.format_exception(error)))))
                error.add_note(f"the whole traceback is in {path}")
        raise
