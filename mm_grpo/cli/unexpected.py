"""The net under every command: what no command expects ends as one line and exit code 1.

`keep_traceback` writes the whole traceback of a run's error to its error.txt; `--traceback` prints that of any command.
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

LONGEST = 900
"""Characters of an error's own text that are shown."""
PACKAGE = str(Path(__file__).parents[1])
LIBRARIES = (PACKAGE, "<", *sysconfig.get_paths().values())
"""What the name of a file begins with that is not the user's."""


def describe(error: BaseException) -> str:
    """Type, text, and the user's own file and line, if the error passed one, on one line."""
    try:
        text = " ".join(str(error).split())[:LONGEST]
    except Exception:  # of a class of the user's
        text = "its text cannot be shown"
    own = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(LIBRARIES)]
    where = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
    return f"{type(error).__name__}: {text}{where}{notes_of(error)}"


def notes_of(error: BaseException) -> str:
    """What was noted on an error: where its traceback is."""
    return "".join(f"; {note}" for note in getattr(error, "__notes__", ()))


@contextmanager
def keep_traceback(root: Path) -> Iterator[None]:
    """Write the traceback of an unexpected error to error.txt of the run in `root`, and note that on the error."""
    try:
        yield
    except (UserError, GuardStop):
        raise
    except Exception as error:
        path = RunPaths(root).error
        with suppress(OSError, UserError):  # a full disk, a folder that is gone
            if read_mark(root).owns(path.name):
                atomic_write(path, printable(redact("".join(traceback.format_exception(error)))))
                error.add_note(f"the whole traceback is in {path}")
        raise
