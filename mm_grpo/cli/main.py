"""The application: its commands (help.EXAMPLES shows each), and the exit code of each error.

Exit codes: 0 done; 2 the config, the data or the command is wrong (one message); 3 a guard stopped the
run; 130, 143 and 129 SIGINT (Ctrl-C), SIGTERM and SIGHUP; 1 anything else (unexpected.py). torch and transformers are
imported only by commands that need them.
"""

from __future__ import annotations

import atexit
import io
import logging
import os
import re
import signal
import sys
from contextlib import suppress
from typing import Annotated

import typer

from mm_grpo.cli.help import CommandGroup, show_version
from mm_grpo.cli.preflight import check, doctor, estimate
from mm_grpo.cli.recipes import convert, init, recipes
from mm_grpo.cli.reference import config, env
from mm_grpo.cli.rewards import app as rewards_app
from mm_grpo.cli.serve import serve
from mm_grpo.cli.train import train, warm
from mm_grpo.cli.trained import ask, evaluate, export
from mm_grpo.cli.unexpected import describe, notes_of
from mm_grpo.cli.view import view
from mm_grpo.distributed.launch import end_with_launcher, launched_here
from mm_grpo.errors import EngineError, GuardStop, UserError, shorten
from mm_grpo.terminal import PrintableFilter, ignore_closed_pipe, print_traceback, printable, redact

TRACEBACK = "--traceback"

app = typer.Typer(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (
    train, warm, serve, check, doctor, estimate, view, export, ask, recipes, init, config, convert, env
):  # fmt: skip
    app.command()(command)
app.command("eval")(evaluate)
app.add_typer(rewards_app, name="rewards")


@app.callback()
def application(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=show_version, help="Print the version and exit."),
    ] = False,
    traceback: Annotated[
        bool,
        typer.Option(TRACEBACK, help="Print the traceback of an unexpected error; also behind a command."),
    ] = False,
) -> None:
    """Fine-tune vision-language models with GRPO."""


def main() -> None:
    """Run a command; turn errors into one message and an exit code."""
    try:
        _main()
        code = 0
    except BaseException as error:
        if not _has_peers():
            raise
        if not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
        exit_code = error.code if isinstance(error, SystemExit) else 1
        code = exit_code if isinstance(exit_code, int) else int(exit_code is not None)
    # One of several processes skips Python's own shutdown. It would wait for threads that a reward started, and a
    # thread of gloo that asks for the interpreter's lock meanwhile would abort the process.
    if _has_peers():
        atexit._run_exitfuncs()  # these leave the process group
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
"""Packs of many sizes fragment torch's cache. The variable has its older name, because vLLM 0.25 reads only that."""


def _main() -> None:  # noqa: C901
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault(*ALLOCATOR)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):  # a test may have replaced it
            stream = ignore_closed_pipe(stream) if stream is getattr(sys, f"__{name}__") else stream
            stream.reconfigure(errors="backslashreplace")  # for an ASCII terminal
            setattr(sys, name, stream)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(PrintableFilter())
    sys.excepthook = print_traceback
    end_with_launcher()
    try:
        app([argument for argument in sys.argv[1:] if argument != TRACEBACK])
    except UserError as error:
        _exit(f"error: {error}", 2)
    except GuardStop as stop:
        _exit(f"stopped: {stop}", 3)
    except EngineError as error:
        _exit(f"the rollout engine failed: {error}{notes_of(error)}", 1)
    except SystemExit as exit_request:  # typer raises it for KeyboardInterrupt too
        cause = getattr(exit_request.__context__, "__cause__", None)
        if not isinstance(cause, KeyboardInterrupt):
            raise
        _exit_interrupted(cause)
    except KeyboardInterrupt as stop:
        _exit_interrupted(stop)
    except BaseException as error:
        if _may_have_peers() and isinstance(error, RuntimeError):
            from mm_grpo.distributed.exit_message import lost_another

            if message := lost_another(error):
                _exit(f"error: {message}", 1, lost=True)
        if _has_peers():  # each process prints its own
            raise
        if TRACEBACK in sys.argv:
            print_traceback(type(error), error, error.__traceback__)
        _exit(f"failed: {describe(error)}", 1)


def _exit_interrupted(stop: KeyboardInterrupt) -> None:
    code = getattr(stop, "code", None)
    if code is not None:  # RunInterrupted; importing it here would load torch
        # the launcher signals processes that are slower than the first
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        _exit(str(stop), code)
    if launched_here():  # `launch` prints the message when it sees the signal that ended this process
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    _exit("interrupted", 130)


def _exit(message: str, code: int, lost: bool = False) -> None:
    """Print the message, unless another process prints it, and exit. `lost` is explained in `should_report`."""
    if _may_have_peers():
        from mm_grpo.distributed.exit_message import should_report

        if not should_report(message, lost=lost):
            sys.exit(code)
    # a word may be a number of 400 digits
    message = re.sub(r"\S{301,}", lambda word: shorten(word[0], 300), redact(message))
    with suppress(OSError):  # a closed terminal
        print(printable(message), file=sys.stderr, flush=True)
    sys.exit(code)


def _has_peers() -> bool:
    """Return True if this process has joined a group."""
    return _may_have_peers() and sys.modules["mm_grpo.distributed.ranks"].joined_others()


def _may_have_peers() -> bool:
    """Return False if this process cannot have joined a group, without an import of torch."""
    return "mm_grpo.distributed.ranks" in sys.modules
