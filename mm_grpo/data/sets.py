"""Which rows a run trains on and is evaluated on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mm_grpo.data.dataset import Dataset
from mm_grpo.data.sources import load
from mm_grpo.errors import DataError

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig

Source = Any
"""Rows (a list of dicts or a datasets.Dataset), a path, or a task mapping such as {"task": "shapes"}."""


def load_train(config: GRPOConfig, given: Source | None = None, *, verify: bool = True) -> Dataset:
    """The training rows: `given`, else `data.train`. DataError when there are none.

    With `verify` the rows' layout is checked at once, and the first wrong one raises.
    """
    source = config.data.train if given is None else given
    if source is None:
        raise DataError("data.train is not set: give a .jsonl path, a task mapping, or train=rows in Python")
    return load(source, config.data, "train", verify=verify)


def load_eval(
    config: GRPOConfig, given: Source | Mapping[str, Source] | None = None, *, verify: bool = True
) -> dict[str, Dataset]:
    """The evaluation sets by name, the headline first; a single source is named "eval"."""
    if given is None:
        sources: Mapping[str, Source] = config.data.eval_sets()
    elif isinstance(given, Mapping) and "task" not in given:
        sources = given
    else:
        sources = {"eval": given}
    return {name: load(source, config.data, name, verify=verify) for name, source in sources.items()}
