"""One case in this process: its folder is made, its command is run under a deadline, and what came of it is judged."""

from __future__ import annotations

import io
import logging
import os
import shlex
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from robustness import runs
from robustness.case import Case

LONGEST_MESSAGE = 4000
"""Characters: a message that quotes a whole file is not read."""
DEADLINE = 120.0


class Hang(BaseException):
    """The deadline passed. No Exception, which the code under test might catch."""


@dataclass(frozen=True)
class Outcome:
    """`code` is the exit code, None where the command had to be ended; `fault` is a traceback."""

    code: int | None
    message: str
    fault: str = ""


def problems(case: Case, folder: Path) -> list[str]:
    """Make the case in an empty folder and run it; what is not as it says."""
    with inside(folder):
        with quiet():
            files = runs.prepare(case, folder)
        before = snapshot(folder, files)
        with case.within(folder):
            outcome = run(case)
        found = judge(case, outcome)
        after = snapshot(folder, files)
        found += [f"{name} of the user's was changed" for name in before if after.get(name) != before[name]]
        found += [f"{name} was left behind" for name in after if name not in before]
        if not found:
            case.after(folder)
    return found


def judge(case: Case, outcome: Outcome) -> list[str]:
    found = [outcome.fault] if outcome.fault else []
    if outcome.code != case.code:
        found.append(f"exit code {outcome.code}, expected {case.code}: {outcome.message[-800:]}")
    if case.code and not outcome.message.strip():
        found.append("no message")
    if case.code == 2 and outcome.message.count("error: ") > 1:
        found.append(f"more than one message: {outcome.message[-800:]}")
    if len(outcome.message) > LONGEST_MESSAGE:
        found.append(f"a message of {len(outcome.message)} characters")
    return found + [
        f"{word!r} is not in: {outcome.message[-800:]}" for word in case.words if word not in outcome.message
    ]


def run(case: Case) -> Outcome:
    """The command, with both streams captured, which are those of an ASCII terminal."""
    out: io.TextIOBase = io.TextIOWrapper(io.BytesIO(), "ascii", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), "ascii", "backslashreplace", write_through=True)
    if case.full_disk:
        out = io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True)
    code, fault = 0, ""
    try:
        with deadline(DEADLINE), redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            command(*shlex.split(case.command))
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except Hang:
        return Outcome(None, read(err), "no end before the deadline")
    except BaseException:
        code, fault = 1, traceback.format_exc()
    message = read(err) or ("" if case.full_disk else read(out))
    if "Traceback (most recent call last)" in message and "Traceback" not in case.words:
        fault = fault or message
    return Outcome(code, message, fault)


def command(*arguments: str) -> None:
    """A command line, as the console script runs it: SystemExit, unless it is done."""
    from mm_grpo import cli

    given, sys.argv = sys.argv, ["mm-grpo", *arguments]
    root, level = logging.getLogger(), logging.root.manager.disable
    handlers, root.handlers = root.handlers, []  # the command makes its own, for the stream of this case
    hook, handling = sys.excepthook, {number: signal.getsignal(number) for number in SIGNALS}
    try:
        cli.main()
    except SystemExit as leaving:
        if leaving.code:
            raise
    finally:
        sys.argv, sys.excepthook = given, hook
        for number, handler in handling.items():
            signal.signal(number, handler)
        root.handlers = handlers
        logging.disable(level)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def read(stream: Any) -> str:
    stream.seek(0)
    return str(stream.read())


def snapshot(folder: Path, files: set[str]) -> dict[str, str]:
    """What lies in the folder outside of out/ and .cache/, and in them the case's own `files`: kind and content."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name.split("/")[0] in ("out", ".cache", "MODEL") and name not in files:
            continue
        plain = path.is_file() and not path.is_symlink() and os.access(path, os.R_OK)
        content = blake2b(path.read_bytes()).hexdigest() if plain else ""
        found[name] = f"{path.lstat().st_mode} {os.readlink(path) if path.is_symlink() else content}"
    return found


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work in `folder`, with it as home too, as no case may find a file of the user's own."""
    before, home = Path.cwd(), os.environ.get("HOME", "")
    os.chdir(folder)
    os.environ["HOME"] = str(folder)
    try:
        yield
    finally:
        os.chdir(before)
        os.environ["HOME"] = home


@contextmanager
def quiet() -> Iterator[None]:
    """For what a case prepares: nothing is printed."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield
