"""Text from rows, models, rewards and file names, made safe to print.

A control character in such a text can recolour the terminal, move its cursor, or hide what follows; a
bidirectional override shows text in another order than it has. `printable` writes them as escapes. Everything that
goes to the terminal passes it: messages of errors, tables, progress, and records of the logger "mm_grpo".

`redact` takes keys and passwords out of texts that are printed, saved, sent or put on a page.
"""

from __future__ import annotations

import io
import logging
import os
import re
import traceback
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

JOINERS = "\u200c\u200d"
"""Invisible characters that some scripts and emoji need."""

REDACTED = "<redacted>"
"""Text in the place of a key, a password or the query of a url."""
_NAME = (
    r"(?:[\w.-]{0,40}[_.-])?(?:(?:api|access|auth|client|hub|hf|private|secret)[_-]?(?:key|token)|passw(?:or)?d|secret"
    r"|authorization)"
)
_SECRETS = (
    r"(://)[^\s/?#'\"<>]*(?=@)",
    r"(://[^\s?#'\"]{0,999}\?)[^\s#'\"<>()\[\]{}]+",
    rf"(\b{_NAME}[\"']?\s*[:=]\s*[\"']?(?:bearer |basic )?+)[^\s\"',;&()<>\[\]{{}}]+",
    r"(\b)(?:hf_|sk-|gh[oprsu]_)[\w-]{16,}",
)


def redact(value: Any, *secrets: str | None) -> Any:
    """Return a text, or a mapping or list of texts, with `secrets` and everything that looks like one replaced.

    That is user and query of a url, the value of a name such as api_key or password, and a key of a known form. In a
    mapping or a list, a text of several words (a prompt) stays as it is.
    """
    if isinstance(value, Mapping):
        inner = dict(zip(value, redact([*value.values()]), strict=True))
        secret_keys = [key for key in value if value[key] and re.fullmatch(_NAME, str(key), re.IGNORECASE)]
        return inner | dict.fromkeys(secret_keys, REDACTED)
    if isinstance(value, list | tuple):
        return [item if isinstance(item, str) and re.search(r"\s", item) else redact(item) for item in value]
    if isinstance(value, str):
        for secret in filter(None, secrets):
            value = value.replace(secret, REDACTED)
        for pattern in _SECRETS:
            value = re.sub(pattern, rf"\1{REDACTED}", value, flags=re.IGNORECASE)
    return value


def printable(text: object, *, lines: bool = True) -> str:
    r"""Return `text` with control characters, line separators, bidirectional marks and lone surrogates as escapes.

    Line feeds and tabs stay with `lines`; without, they are escaped too, so that the text is one line.

    >>> printable("a\x1b[31mb\u202ec\nd", lines=False)
    'a\\x1b[31mb\\u202ec\\nd'
    """
    string = str(text)
    if (string.replace("\n", "").replace("\t", "") if lines else string).isprintable():
        return string  # Python's rule excludes every category that is escaped here
    return "".join(_escaped(c, lines) for c in string)


def _escaped(character: str, lines: bool) -> str:
    if character in JOINERS or (lines and character in "\n\t"):
        return character
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    return character.encode("unicode_escape").decode() if hidden else character


def cell(text: object) -> Text:
    """Make a line of one of rich's tables: printable, and never read as markup."""
    from rich.text import Text

    return Text(printable(text, lines=False))


def print_line(text: object, console: Console, *, style: str | None = None) -> None:
    """Print a line of a report with rich, not wrapped and never read as markup."""
    console.print(printable(text), style=style, highlight=False, markup=False, soft_wrap=True)


def print_phase(text: str) -> None:
    """Print at once a line that says what begins. A closed terminal or pipe ends no run."""
    with suppress(OSError, ValueError):
        print(printable(text, lines=False), flush=True)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence transformers' bars and bitsandbytes' advice while a model is loaded or saved in the block.

    The caller's settings are put back. The Hub's bars of its downloads stay.
    """
    from transformers.utils.logging import set_tqdm_hook

    kernels = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level = kernels.level
    hook = set_tqdm_hook(lambda bar, arguments, options: bar(*arguments, **options | {"disable": True}))
    kernels.setLevel(logging.ERROR)
    try:
        yield
    finally:
        kernels.setLevel(level)
        set_tqdm_hook(hook)


class _PipeFile(io.FileIO):
    """File descriptor that writes to the null device once the reader of its pipe has ended."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


def ignore_closed_pipe(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """Return a standard stream like `stream` for which a reader that ends early (`| head`) is no error."""
    raw: Any = _PipeFile(stream.fileno(), "wb", closefd=False)
    options = {name: getattr(stream, name) for name in ("encoding", "line_buffering", "write_through")}
    return io.TextIOWrapper(raw if stream.write_through else io.BufferedWriter(raw), **options)


class PrintableFilter(logging.Filter):
    """Filter that makes the message of a record printable and redacts keys; it drops no record."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = printable(redact(record.getMessage())), None
        return True


def print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback as Python does, but printable and redacted; for sys.excepthook."""
    import sys

    text = printable(redact("".join(traceback.format_exception(kind, error, trace))))
    print(text, end="", file=sys.stderr, flush=True)


logging.getLogger("mm_grpo").addFilter(PrintableFilter())
