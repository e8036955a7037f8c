"""A mixture: rows of several sources as one dataset, and the weights by which a run draws from them.

`Mixture` is the list of entries; in a config it is `data.train: [{path: boxes.jsonl, weight: 3, task: grounding}, ...]`
(config/source_entries.py says what an entry may hold). A list of mappings that is given in Python is a list of rows,
so there it is written `train=Mixture([{"path": rows_or_path, "weight": 3}, other])`.

`MixedDataset` holds each source as a dataset of its own, read with the settings of its entry, and numbers their rows
through, one source after the other. A sample's uid names its source: "train/boxes:7" is row 7 (from 0) of boxes.jsonl.
In which order rows are used is in mixture_order.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain, zip_longest
from pathlib import Path
from typing import Any

from mm_grpo.config.messages import FieldError
from mm_grpo.config.source_entries import read_entry
from mm_grpo.data.dataset import Dataset
from mm_grpo.data.mixture_order import ratio
from mm_grpo.data.readers import place
from mm_grpo.errors import DataError


class Mixture:
    """Sources that training draws from by weight.

    `entries` are sources (a path, a list of rows, a datasets.Dataset, a task mapping), each with weight 1, or mappings
    whose `path` is one, beside `weight`, `task` and what the source differs in from the config's section `data`.
    DataError for an entry that is wrong.
    """

    def __init__(self, entries: Iterable[Any]) -> None:
        given = list(entries)
        if not given:
            raise DataError("a mixture has no sources; give at least one")
        self.entries: list[dict[str, Any]] = []
        for number, entry in enumerate(given, start=1):
            mapping = entry if isinstance(entry, Mapping) and "path" in entry else {"path": entry}
            try:
                self.entries.append(read_entry(mapping))
            except FieldError as error:
                raise DataError(f"entry {number} of the mixture: {error}") from None

    def __repr__(self) -> str:
        return f"Mixture({', '.join(self.names)})"

    @cached_property
    def names(self) -> list[str]:
        """A name for each source, by its path: of a second one of the same name "rows-2"."""
        names: list[str] = []
        for number, entry in enumerate(self.entries, start=1):
            own = name = _name_of(entry["path"]) or f"source-{number}"
            same = 1
            while name in names:
                name = f"{own}-{(same := same + 1)}"
            names.append(name)
        return names

    @property
    def weights(self) -> list[float]:
        return [entry.get("weight", 1.0) for entry in self.entries]


def mixture_of(source: Any) -> Any:
    """The Mixture that a config's source stands for; any other source as it is."""
    if isinstance(source, Mapping) and "path" in source:
        return Mixture([source])
    if isinstance(source, list) and any(isinstance(entry, Mapping) for entry in source):
        return Mixture(source)
    return source


def _name_of(source: Any) -> str | None:
    """Name a path, without folders, suffix and what is no part of a name."""
    if isinstance(source, list | tuple) and source and isinstance(source[0], str | os.PathLike):
        source = source[0]
    if isinstance(source, Mapping):
        source = source.get("task")
    if not isinstance(source, str | os.PathLike):
        return None
    parts = [part for part in Path(os.fspath(source)).parts if not re.search(r"[*?\[]", part)]
    plain = re.sub(r"\.(jsonl?|csv|tsv|parquet|arrow)$", "", parts[-1] if parts else "", flags=re.IGNORECASE)
    return re.sub(r"[^\w.-]+", "-", plain).strip("-.") or None


def _of_source(method: Callable[[Dataset, int], Any]) -> Any:
    """The method of a mixture that asks the source in which a row lies."""

    def ask(self: MixedDataset, index: int) -> Any:
        at, inner = place(self._ends, index)
        return method(self.parts[at], inner)

    return ask


class MixedDataset(Dataset):
    """The rows of several datasets, numbered through."""

    def __init__(self, name: str, parts: Sequence[Dataset], weights: Sequence[float]) -> None:
        self.name = name
        self._parts, self._weights = tuple(parts), ratio(weights)
        self._ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def parts(self) -> Sequence[Dataset]:
        return self._parts

    @property
    def weights(self) -> Sequence[int]:
        return self._weights

    @property
    def sizes(self) -> list[int]:
        return [len(part) for part in self._parts]

    @property
    def names(self) -> list[str]:
        """The names of the sources."""
        return [part.name.rpartition("/")[2] for part in self._parts]

    @cached_property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(chain.from_iterable(part.columns for part in self._parts)))

    @property
    def conversational(self) -> bool:
        """True when the first prompt of any source is a list of messages: rewards get one form for all."""
        return any(part.conversational for part in self._parts)

    @property
    def text_only(self) -> bool:
        return all(part.text_only for part in self._parts)

    @property
    def in_memory(self) -> bool:
        return all(part.in_memory for part in self._parts)

    uid = _of_source(Dataset.uid)
    row_name = _of_source(Dataset.row_name)
    opener = _of_source(Dataset.opener)
    fields = _of_source(Dataset.fields)
    encoded_fields = _of_source(Dataset.encoded_fields)

    def with_parts(self, parts: Sequence[Dataset]) -> Dataset:
        return MixedDataset(self.name, parts, self._weights)

    def verify(self) -> None:
        for part in self._parts:
            part.verify()

    def columns_of_rows(self) -> Iterator[Mapping[str, Any]]:
        """As of a dataset, source by source in turn: the first rows are of all."""
        turns = zip_longest(*(part.columns_of_rows() for part in self._parts))
        return (columns for turn in turns for columns in turn if columns is not None)

    def head(self, count: int) -> Dataset:
        """The first rows of every source, `count` in all, but of each one at least."""
        share = -(-count // len(self._parts))
        return self.with_parts([part.head(share) for part in self._parts])

    def with_shuffled_images(self, seed: int = 0) -> Dataset:
        """As of a dataset; images move within their source."""
        return self.with_parts([part.with_shuffled_images(seed) for part in self._parts])

    def with_images_removed(self) -> Dataset:
        return self.with_parts([part.with_images_removed() for part in self._parts])

    def dataset_column(self, name: str) -> str:
        return next((p.dataset_column(name) for p in self._parts if name in p.columns), name)
