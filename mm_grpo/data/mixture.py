"""Mixtures: the rows of several sources, and the weights by which a run draws from them.

`Mixture` is the list of entries; in a config it is `data.train: [{path: boxes.jsonl, weight: 3, task: grounding}, ...]`
(config/source_entries.py says what an entry may hold). In Python a list of mappings is a list of rows, so a mixture is
written `train=Mixture([{"path": rows_or_path, "weight": 3}, other])`.

`MixedDataset` numbers the rows of its sources through, one source after the other. A sample's uid names its source:
"train/boxes:7" is row 7 (from 0) of boxes.jsonl. The order of rows is in mixture_order.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from mm_grpo.config.messages import FieldError
from mm_grpo.config.source_entries import read_entry
from mm_grpo.data.base import Rows
from mm_grpo.data.mixture_order import MixtureOrder, ratio
from mm_grpo.errors import DataError


class Mixture:
    """Sources that training draws from by weight.

    An entry is a source (a path, a list of rows, a datasets.Dataset, a task mapping) with weight 1, or a mapping with
    the source as its `path`, and `weight`, `task` and settings of the section `data` that differ for this source.
    DataError for an entry that is wrong.
    """

    def __init__(self, entries: Iterable[Any]) -> None:
        self.entries: list[dict[str, Any]] = []
        for number, entry in enumerate(entries, start=1):
            mapping = entry if isinstance(entry, Mapping) and "path" in entry else {"path": entry}
            try:
                self.entries.append(read_entry(mapping))
            except FieldError as error:
                raise DataError(f"entry {number} of the mixture: {error}") from None
        if not self.entries:
            raise DataError("a mixture has no sources; give at least one")

    def __repr__(self) -> str:
        return f"Mixture({', '.join(self.names)})"

    @cached_property
    def names(self) -> list[str]:
        """The name of each source, by its path; a second source with the name "rows" is "rows-2"."""
        names: list[str] = []
        for number, entry in enumerate(self.entries, start=1):
            base = name = _name_of(entry["path"]) or f"source-{number}"
            copies = 1
            while name in names:
                name = f"{base}-{(copies := copies + 1)}"
            names.append(name)
        return names


def mixture_of(source: Any) -> Any:
    """Return a config's list of entries as a Mixture, any other source unchanged."""
    if isinstance(source, Mapping) and "path" in source:
        return Mixture([source])
    if isinstance(source, list) and any(isinstance(entry, Mapping) for entry in source):
        return Mixture(source)
    return source


def _name_of(source: Any) -> str | None:
    """Return a path's name, without folders, suffix and signs that do not belong in a name."""
    if isinstance(source, list | tuple) and source and isinstance(source[0], str | os.PathLike):
        source = source[0]
    if isinstance(source, Mapping):
        source = source.get("task")
    if not isinstance(source, str | os.PathLike):
        return None
    parts = [part for part in Path(os.fspath(source)).parts if not re.search(r"[*?\[]", part)]
    stem = re.sub(r"\.(jsonl?|csv|tsv|parquet|arrow)$", "", parts[-1] if parts else "", flags=re.IGNORECASE)
    return re.sub(r"[^\w.-]+", "-", stem).strip("-.") or None


class MixedDataset(Rows):
    """The rows of several datasets, numbered through. The base class says what each method does."""

    def __init__(self, name: str, sources: Sequence[Rows], weights: Sequence[float]) -> None:
        self.name, self.weights = name, ratio(weights)
        self._sources = tuple(sources)
        self.text_only = all(source.text_only for source in sources)
        self.in_memory = all(source.in_memory for source in sources)

    def __len__(self) -> int:
        return sum(map(len, self._sources))

    @property
    def sources(self) -> Sequence[Rows]:
        return self._sources

    @cached_property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(chain.from_iterable(source.columns for source in self._sources)))

    def fingerprint(self) -> dict[str, Any]:
        pairs = zip(self._sources, self.weights, strict=True)
        sources = [{"weight": weight, **source.fingerprint()} for source, weight in pairs]
        return {"rows": len(self), "sources": sources}

    def order(self, prompts_per_step: int, seed: int, shuffle: bool) -> MixtureOrder:
        sizes = [len(source) for source in self._sources]
        names = [source.name.rpartition("/")[2] for source in self._sources]  # without the mixture's
        return MixtureOrder(sizes, self.weights, names, prompts_per_step, seed, shuffle)

    def map_sources(self, change: Callable[[Rows], Rows]) -> MixedDataset:
        return MixedDataset(self.name, [change(source) for source in self._sources], self.weights)
