"""One case run through an entry point in this process, under a deadline: its exit code, its message, its time."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mm_grpo.config import GRPOConfig
from mm_grpo.data.sources import load_eval, load_train
from mm_grpo.errors import UserError

LONGEST_MESSAGE = 4000
"""Characters: a message that quotes a whole file is not read."""
PATIENCE = 180.0
"""Seconds for a process; the first one waits for the imports of the server that forks it."""


class Hang(BaseException):
    """The deadline passed. No Exception, which the code under test might catch."""


@dataclass(frozen=True)
class Outcome:
    """What came of a case. `code` is the exit code; None where it had to be ended. `fault` is a traceback."""

    code: int | None
    message: str
    fault: str
    seconds: float


def run(call: Callable[[], Any], deadline: float, encoding: str = "utf-8") -> Outcome:
    """Call, with both streams captured, which are those of a terminal of that encoding; `deadline` in seconds."""
    out = io.TextIOWrapper(io.BytesIO(), encoding, write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), encoding, "backslashreplace", write_through=True)
    code, fault = 0, ""
    began = time.monotonic()
    try:
        with _deadline(deadline), redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except UserError as error:
        message = str(error)
        return Outcome(2, message, "", time.monotonic() - began)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except Hang:
        return Outcome(None, _read(err), "no answer before the deadline", time.monotonic() - began)
    except BaseException:
        code, fault = 1, traceback.format_exc()
    message = _read(err) or _read(out)
    if "Traceback (most recent call last)" in message:
        fault = fault or message
    return Outcome(code, message, fault, time.monotonic() - began)


def command(*arguments: Any) -> None:
    """A command line, as the console script runs it: SystemExit, unless it is done."""
    from mm_grpo import cli

    given, sys.argv = sys.argv, ["mm-grpo", *map(str, arguments)]
    root, level = logging.getLogger(), logging.root.manager.disable
    handlers, root.handlers = root.handlers, []  # the command makes its own, for the stream of this case
    try:
        cli.main()
    except SystemExit as leaving:
        if leaving.code:
            raise
    finally:
        sys.argv = given
        root.handlers = handlers
        logging.disable(level)


def process(program: Sequence[object], folder: Path) -> None:
    """`python PROGRAM`, a fork with its imports done, in `folder`: its output and exit code are those of the case.

    One that a signal ended has the exit code that a shell tells, 128 and the number, and the shell's word for it.
    """
    from helpers.processes import finished

    code, output = finished(program, folder / "output.txt", cwd=folder, deadline=PATIENCE, HOME=str(folder))
    print(output, file=sys.stderr)
    if code < 0:
        print(signal.strsignal(-code), file=sys.stderr)
    if code:
        sys.exit(code if code > 0 else 128 - code)


@cache
def start_forks() -> None:
    """Have the server that forks processes ready, for its imports are no part of a case's time."""
    from helpers.processes import finished

    with tempfile.TemporaryDirectory() as folder:
        finished(["-c", "pass"], Path(folder) / "output.txt")


def use_rows(rows: Any, **data: Any) -> None:
    """What a run does with rows: all are read, and those of a list or a file decoded."""
    dataset = load_train(GRPOConfig.from_dict({"model": {"path": "m"}, "data": data}), rows)
    for index in range(len(dataset)):
        dataset.sample(index)


def use_eval(rows: Any) -> None:
    """As `use_rows`, for evaluation."""
    load_eval(GRPOConfig.from_dict({"model": {"path": "m"}}), rows)


def problems(outcome: Outcome, code: int, words: tuple[str, ...]) -> list[str]:
    """How an outcome differs from what was expected; empty where it does not."""
    found = []
    if outcome.fault:
        found.append(outcome.fault)
    if outcome.code != code:
        found.append(f"exit code {outcome.code}, expected {code}: {outcome.message[-500:]}")
    if code and not outcome.message.strip():
        found.append("no message")
    if len(outcome.message) > LONGEST_MESSAGE:
        found.append(f"a message of {len(outcome.message)} characters")
    return found + [
        f"{word!r} is not in: {outcome.message[-800:]}" for word in words if word not in outcome.message
    ]


def _read(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
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
    before, home = Path.cwd(), os.environ.get("HOME")
    os.chdir(folder)
    os.environ["HOME"] = str(folder)
    try:
        yield
    finally:
        os.chdir(before)
        if home is None:
            del os.environ["HOME"]
        else:
            os.environ["HOME"] = home


@contextmanager
def quiet() -> Iterator[None]:
    """For what a case prepares: nothing is printed."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield
