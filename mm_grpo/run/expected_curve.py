"""The curve that a recipe is expected to show (`run.expected_curve`), which a run's page draws beside the user's own.

A JSON file of one object:

    metric   a name of metrics.jsonl, such as eval/accuracy
    steps    the steps of the run at which it was measured, rising; 0 is before the first
    values   its values there, as many
    source   where the figures are from: hardware, seeds, what else ran

Only figures that were measured are written down; a recipe without any has no such file.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_grpo.errors import ConfigError
from mm_grpo.files import read_json

KEYS = ("metric", "steps", "values", "source")


@dataclass(frozen=True)
class ExpectedCurve:
    """A metric's values at some steps of a run that was measured before."""

    metric: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    source: str


def read_expected_curve(path: str | os.PathLike[str]) -> ExpectedCurve:
    """The curve in a file. ConfigError, which names the file and the key, when there is none."""
    where = f"run.expected_curve = '{path}'"
    try:
        found = read_json(Path(path), dict)
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read ({error.strerror}); name a JSON file, or null") from None
    except ValueError as error:
        raise ConfigError(f"{where}: is not valid JSON ({error})") from None
    if set(found) != set(KEYS):
        raise ConfigError(f"{where}: must hold one object with the keys {', '.join(KEYS)} and no others")
    for key in ("metric", "source"):
        if not isinstance(found[key], str) or not found[key]:
            raise ConfigError(f"{where}: {key} must be text, not {found[key]!r}")
    steps, values = found["steps"], found["values"]
    if not _is_list_of(steps, int) or any(b <= a for a, b in zip([-1, *steps], steps, strict=False)):
        raise ConfigError(
            f"{where}: steps must be a list of rising whole numbers from 0 on, such as [0, 10, 20]"
        )
    if (
        not _is_list_of(values, (int, float))
        or len(values) != len(steps)
        or not all(map(math.isfinite, values))
    ):
        raise ConfigError(f"{where}: values must be a list of {len(steps)} finite numbers, one for each step")
    return ExpectedCurve(found["metric"], tuple(steps), tuple(map(float, values)), found["source"])


def _is_list_of(value: Any, kind: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(v, kind) and type(v) is not bool for v in value)
    )
