"""The curve that a recipe is expected to show (`run.expected_curve`), which a run's page draws beside the user's own.

A JSON file of one object:

    metric   a name of metrics.jsonl, such as eval/accuracy
    steps    the steps of the run at which it was measured, rising; 0 is before the first
    values   its values there, as many
    source   where the figures are from: hardware, seeds, what else ran

Only figures that were measured are written down; a recipe without any has no such file.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

from mm_grpo.errors import ConfigError
from mm_grpo.files import read_regular_file

Name = Annotated[str, Field(min_length=1)]


class ExpectedCurve(BaseModel):
    """A metric's values at some steps of a run that was measured before."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    metric: Name
    steps: tuple[NonNegativeInt, ...] = Field(min_length=1)
    values: tuple[float, ...]
    source: Name

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if any(b <= a for a, b in pairwise(self.steps)) or len(self.values) != len(self.steps):
            raise ValueError("steps must rise, and values must be as many")
        return self


def read_expected_curve(path: str | os.PathLike[str]) -> ExpectedCurve:
    """The curve in a file. ConfigError, which names the file and the key, when there is none."""
    try:
        return ExpectedCurve.model_validate_json(read_regular_file(Path(path)))
    except OSError as error:
        raise ConfigError(
            f"run.expected_curve = '{path}': cannot be read ({error.strerror}); name a JSON file, or null"
        ) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"run.expected_curve = '{path}': {where}: {first['msg']}") from None
