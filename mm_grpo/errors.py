"""The errors that mm_grpo raises on purpose, and the exit code of each.

A `UserError` is a mistake in a config, a dataset, a reward or a command: the command line prints only its
message and exits with 2. A `GuardStop` is a run that stopped itself (exit 3). Every message
names the field or the row, the value, what is legal and what to do. Any other exception exits with 1
and one line (cli/unexpected.py).
"""

import difflib
import re
from collections.abc import Iterable


class UserError(Exception):
    """A mistake that the user can correct. Exit code 2."""


class ConfigError(UserError):
    """A field of the config is unknown, missing, out of range or contradicts another."""


class DataError(UserError):
    """A dataset or one of its rows cannot be used."""


class BadMedia(DataError):
    """An image or a video cannot be read, or its size is refused. `data.on_bad_media` may leave its row out."""


class RewardError(UserError):
    """A reward is unknown, raised, or answered with something that is not a score."""


class ToolError(UserError):
    """A tool or an environment cannot be used, or raised outside the calls whose errors are answered."""


class EngineError(RuntimeError):
    """The rollout engine failed, and neither config nor row is the cause; the exception is chained. Exit code 1."""


class GuardStop(Exception):
    """A guard stopped the run. Exit code 3."""


def shorten(text: object, limit: int = 80) -> str:
    """Put a text on one line, cut at `limit` characters.

    >>> shorten("a \n b"), shorten("9" * 400, 10)
    ('a b', '9999999...')
    """
    line = " ".join(str(text).split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def half_character(text: str) -> str:
    """Say that a text holds half a character (a lone surrogate), which no tokenizer and no file takes; "" if not.

    >>> half_character("a\\ud800")
    'holds half a character (\\\\ud800); write the whole one, as UTF-8'
    """
    half = re.search("[\ud800-\udfff]", text)
    return f"holds half a character ({ascii(half[0])[1:-1]}); write the whole one, as UTF-8" if half else ""


def nearest(name: str, known: Iterable[str], alike: float = 0.6) -> str | None:
    """Return the known name most similar to `name`, by at least `alike` of 1; case and `-` for `_` do not count."""
    folded = {candidate.casefold().replace("-", "_"): candidate for candidate in known}
    matches = difflib.get_close_matches(name.casefold().replace("-", "_"), list(folded), n=1, cutoff=alike)
    return folded[matches[0]] if matches else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the question of a message about an unknown name, with a space behind it, or an empty text.

    >>> f"unknown reward 'iuo'; {did_you_mean('iuo', ['iou', 'length'])}known names: iou, length"
    "unknown reward 'iuo'; did you mean 'iou'? known names: iou, length"
    """
    match = nearest(name, known)
    return f"did you mean {match!r}? " if match else ""


def by_cause(messages: Iterable[str], rows: int) -> list[str]:
    """Return for each cause among messages about some of `rows` rows its first message, and how many there are.

    Messages have one cause when they differ only in numbers and in quoted text.

    >>> by_cause(["r:1: 'a' is null", "r:2: 'b' is null", "r:3: is empty"], 9)
    ["2 of 9 rows, the first r:1: 'a' is null", 'r:3: is empty']
    """
    causes: dict[str, list[str]] = {}
    for message in messages:
        causes.setdefault(re.sub(r"""'[^']*'|"[^"]*"|\d+""", "", message), []).append(message)
    return [f"{len(m)} of {rows} rows, the first {m[0]}" if len(m) > 1 else m[0] for m in causes.values()]
