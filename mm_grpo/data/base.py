"""`Rows`, the interface of all rows: of one source (dataset.py) and of several (mixture.py).

Callers take `Rows` and never ask which of the two they have. A sample's uid is the source's name and the row's index,
"train:7"; a column called `uid` stays a column for the rewards. Two equal rows thus have two uids.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import accumulate, chain, zip_longest
from typing import Any, Protocol

from mm_grpo.data.images import Refusal
from mm_grpo.data.order import PromptOrder
from mm_grpo.data.readers import place
from mm_grpo.data.rows import Fields
from mm_grpo.errors import DataError
from mm_grpo.types import Sample

SAMPLED_ROWS = 1000
"""Rows, evenly spaced, that stand for all of a large dataset."""
TASK = "task"
"""The column by which metrics are made, of training and of evaluation."""
MAX_TASKS = 32
MAX_TASK_LENGTH = 64
"""Most characters of a value of `task`."""


class Rows(Protocol):
    """Rows by index (from 0), read when they are asked for. IndexError for an index outside of [0, len).

    A method that asks the sources is that of several; a dataset, which is its own only source, replaces it.
    """

    name: str
    """What uids and messages call them."""
    weights: Sequence[int] = ()
    """Weights by which a run draws from the sources, without a common factor; empty if all rows come equally often."""
    text_only: bool
    """True when rows may lack images and videos."""
    in_memory: bool
    """True when the rows are lists, or as quick to read: all of them can be looked at."""

    def __len__(self) -> int: ...

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {len(self)} rows)"

    @property
    def columns(self) -> tuple[str, ...]:
        """Names that rewards may ask for: of all rows, after `data.columns`."""

    @property
    def sources(self) -> Sequence[Rows]:
        """The sources, one after the other; a dataset is its own only source."""

    def place(self, index: int) -> tuple[Rows, int]:
        """Return the source of a row, and the row's index there."""
        at, inner = place([*accumulate(map(len, self.sources))], index)
        return self.sources[at], inner

    @property
    def conversational(self) -> bool:
        """True when the first prompt of any source is a list of messages, as rewards written for TRL want to know."""
        return any(source.fields(0).conversational for source in self.sources)

    @cached_property
    def by_task(self) -> bool:
        """True when metrics are made by the column `task`: it holds at most MAX_TASKS short texts, in sampled rows."""
        if TASK not in self.columns:
            return False
        tasks: set[str] = set()
        for index in self.spaced(SAMPLED_ROWS):
            with suppress(DataError):
                task = self.fields(index).columns.get(TASK)
                if task is not None and not (isinstance(task, str) and 0 < len(task) <= MAX_TASK_LENGTH):
                    return False
                tasks.update([] if task is None else [task])
        return 0 < len(tasks) <= MAX_TASKS

    def spaced(self, count: int) -> range:
        """Return at most `count` indices, evenly spaced."""
        return range(0, len(self), -(-len(self) // count))

    def spaced_first(self) -> Iterator[int]:
        """Yield all indices, SAMPLED_ROWS evenly spaced ones first."""
        spaced = self.spaced(SAMPLED_ROWS)
        return chain(spaced, (index for index in range(len(self)) if index not in spaced))

    def fingerprint(self) -> dict[str, Any]:
        """Identify the rows in a resumed run: their number `rows`, and the indices that are `left_out` of the source.

        `digests` has 8 bytes for each row in memory, else for each of SAMPLED_ROWS: of its conversation and columns. Up
        to SAMPLED_ROWS rows of a source, evenly spaced, are hashed with their image files, so an image that was
        exchanged behind its path is noticed. A mixture has its `sources`, each with its weight.
        """

    def order(self, prompts_per_step: int, seed: int, shuffle: bool) -> PromptOrder:
        """Return the order in which a run uses the rows."""

    def uid(self, index: int) -> str:
        """Return the uid of a row's sample: "train:11"."""
        source, inner = self.place(index)
        return source.uid(inner)

    def row_name(self, index: int) -> str:
        """Return a row's name for messages: "train.jsonl:12" or "train row 11"."""
        source, inner = self.place(index)
        return source.row_name(inner)

    def sample(self, index: int) -> Sample:
        """Read row `index` with its images decoded, upright and RGB. Nothing is cached.

        Raises DataError, naming the row, when it or one of its images cannot be used.
        """
        return self.opener(index)()

    def opener(self, index: int) -> Callable[[], Sample]:
        """Read row `index` now; the function that is returned opens its images, in any thread. Raises as `sample`."""
        source, inner = self.place(index)
        return source.opener(inner)

    def fields(self, index: int) -> Fields:
        """Read row `index` with its images closed, in other columns too. DataError when it is wrong."""
        source, inner = self.place(index)
        return source.fields(inner)

    def look_at_images(self, index: int, refusal: Refusal | None = None) -> Callable[[], None]:
        """Read row `index` now; the function that is returned raises BadMedia if `look_at_image` does for an image."""
        source, inner = self.place(index)
        return source.look_at_images(inner, refusal)

    def dataset_column(self, name: str) -> str:
        """Return the dataset's own name for one of our columns."""
        return next((s.dataset_column(name) for s in self.sources if name in s.columns), name)

    def verify(self) -> None:
        """Read rows, not images: all of a list, the first of any other source. DataError when one is wrong."""
        for source in self.sources:
            source.verify()

    def columns_of_rows(self) -> Iterator[Mapping[str, Any]]:
        """Yield the columns of every row that can be read; evenly spaced rows of all sources come first."""
        for places in zip_longest(*(source.spaced_first() for source in self.sources)):
            for source, index in zip(self.sources, places, strict=True):
                with suppress(DataError):
                    if index is not None:
                        yield source.fields(index).columns

    def row_keys(self) -> Iterator[tuple[Hashable, str]]:
        """Yield a key, equal for rows with the same messages, files and bytes, and the name of each row in memory.

        No picture is opened, and rows with PIL images are left out.
        """
        return chain.from_iterable(source.row_keys() for source in self.sources)

    def head(self, count: int) -> Rows:
        """Return the first `count` rows, or all if there are fewer; of a mixture an equal share of each source."""
        share = -(-count // len(self.sources))
        return self.map_sources(lambda source: source.head(share))

    def without(self, rows: Collection[int]) -> Rows:
        """Return all rows except the indices `rows`."""
        starts = dict(zip(self.sources, (0, *accumulate(map(len, self.sources))), strict=False))
        return self.map_sources(lambda source: source.without({row - starts[source] for row in rows}))

    def map_sources(self, change: Callable[[Rows], Rows]) -> Rows:
        """Apply `change` to every source; return the rows of the results."""

    def control(self, kind: str) -> Rows:
        """Return the rows of a blind control: `shuffled`, `removed`, or one of `blind.FRAME_CONTROLS`.

        Shuffled images and videos move among rows of a source with equally many of both, so that no row gets its own or
        equal ones (`blind.exchange`). Rows without any stay as they are. Every row is read, but no file is opened.
        DataError if only one row has such numbers, or most rows with these numbers have the same images and videos.
        """
        return self.map_sources(lambda source: source.control(kind))
