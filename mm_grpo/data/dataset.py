"""A dataset: rows by index, each as a `Sample` whose images are decoded when it is asked for.

What a row may look like is in rows.py, what an image may be in images.py, where rows come from in
sources.py, and in which order they are used in order.py.

A sample's uid is the dataset's name and the row's index, "train:7"; a column called `uid` stays a column for
the rewards. Two equal rows thus have two uids.

Lists and JSON files are checked whole at construction, without opening an image. Of other datasets, which may be
large and on disk, only the first row is; `check` goes through everything.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
from PIL import Image

from mm_grpo.data.blind import exchange, image_key, without_images
from mm_grpo.data.columns import (
    ABSENT,
    PROMPT_FIELDS,
    check_columns,
    locate,
    nested_names,
    quoted,
    rename,
    template_names,
    value_at,
)
from mm_grpo.data.file_states import FileStates
from mm_grpo.data.images import MAX_BYTES, BadImage, look_at_image, open_images, read_encoded
from mm_grpo.data.readers import JoinedRows, Part
from mm_grpo.data.rows import Fields, read_row
from mm_grpo.errors import DataError, did_you_mean
from mm_grpo.types import Sample

if TYPE_CHECKING:
    from mm_grpo.config import DataConfig

FINGERPRINT_ROWS = 1000
TASK = "task"
"""The column by which metrics are made, of training and of evaluation."""
MOST_TASKS, LONGEST_TASK = 32, 64
"""Most values of it, and most characters of one."""
MOST_CHARACTERS, MOST_IMAGES = 4_000_000, 1_000
"""Most characters and images of a row's messages: the context of no model holds more, and to find that out by
tokenising and decoding would take minutes and gigabytes."""
FIRST_ROWS = 16
"""Rows that are looked at for what all are like: where the prompt is, and whether the answer is."""


class Dataset:
    """Rows by index, read as samples. To check more of a row at the start: `verify`.

    Args:
        rows: a list of rows, or anything with a length, an index and `column_names`.
        settings: the config's section `data`.
        name: what the dataset is called, in uids and in messages.
        row_name: what messages call row i; "<name> row i" if not given.
        folder: where relative image paths start when `settings.image_dir` is not set.
        verify: read rows (not images) now: all of a list, the first of anything else.
        added: columns that every row gets, with their values.

    Raises:
        DataError: there are no rows, a mapped column does not exist, an added one does, or a row that is read is wrong.
    """

    def __init__(
        self,
        rows: Any,
        settings: DataConfig,
        *,
        name: str = "train",
        row_name: Callable[[int], str] | None = None,
        folder: str | Path | None = None,
        verify: bool = True,
        added: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        whole = Part(rows, row_name or (lambda index: f"{name} row {index}"), folder)
        self._rows = rows if isinstance(rows, JoinedRows) else JoinedRows([whole])
        self._settings = settings
        self._image_rows: Sequence[int] | None = None
        self._blank = False
        self._image_files = FileStates()  # one for all copies
        self._kept: Sequence[int] = range(len(rows))
        if len(rows) == 0:
            raise DataError(f"the dataset {name!r} has 0 rows; training and evaluation need at least 1")
        check_columns(settings.columns, self._available(), f"the dataset {name!r}")
        named = rename(self._rows.column_names, settings.columns)
        for column in template_names(settings.prompt_template or ""):
            if locate(column, named) is None:
                raise DataError(
                    f"data.prompt_template asks for {column!r}, and the dataset {name!r} has no such column; "
                    f"{did_you_mean(column, named)}it has: {quoted(named)}"
                )
        self._added = dict(added or {})
        for column in self._added.keys() & named.keys():
            raise DataError(
                f"{name}: {column}={self._added[column]!r} is to be put on every row, and the rows have a column "
                f"{column!r}; leave it out, or give the rows' own another name in columns"
            )
        if verify:
            self.verify()

    def __len__(self) -> int:
        return len(self._kept)

    def __repr__(self) -> str:
        return f"Dataset({self.name!r}, {len(self)} rows)"

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The names that rewards may ask for: of all rows, after `data.columns`, without prompt and images.

        A row of a list need not have them all. An `answer` that is no column (a reply) is found in the first rows.
        """
        first = list(self._first_fields())
        made = dict.fromkeys(name for fields in first for name in fields.columns)
        prompts = {
            *PROMPT_FIELDS,
            *(fields.prompt_column for fields in first if fields.prompt_column not in made),
        }
        names = rename(self._rows.column_names, self._settings.columns)
        return tuple(dict.fromkeys([*(name for name in names if name not in prompts), *made]))

    @property
    def parts(self) -> Sequence[Dataset]:
        """The sources of a mixture, one after the other; any other dataset is its own only part."""
        return (self,)

    @property
    def weights(self) -> Sequence[int]:
        """Weights of the parts, as whole numbers without a common factor."""
        return (1,)

    @property
    def text_only(self) -> bool:
        """True when its rows may lack images."""
        return self._settings.text_only

    @cached_property
    def by_task(self) -> bool:
        """True when metrics are made by the column `task`: it holds at most MOST_TASKS short texts, among up to
        FINGERPRINT_ROWS rows, evenly spaced."""
        if TASK not in self.columns:
            return False
        found: set[str] = set()
        for index in range(0, len(self), -(-len(self) // FINGERPRINT_ROWS)):
            with suppress(DataError):
                task = self.encoded_fields(index).columns.get(TASK)
                if task is not None and not (isinstance(task, str) and 0 < len(task) <= LONGEST_TASK):
                    return False
                found.update([] if task is None else [task])
        return 0 < len(found) <= MOST_TASKS

    def columns_of_rows(self) -> Iterator[Mapping[str, Any]]:
        """The columns of every row that can be read: of some that are evenly spaced first, then of the others."""
        step = -(-len(self) // FINGERPRINT_ROWS)
        for index in chain(range(0, len(self), step), (at for at in range(len(self)) if at % step)):
            with suppress(DataError):
                yield self.encoded_fields(index).columns

    @property
    def conversational(self) -> bool:
        """True when the first row's prompt is a list of messages, as rewards written for TRL want to know."""
        return self.encoded_fields(0).conversational

    def _first_fields(self) -> Iterator[Fields]:
        """Read the first rows; skip those that cannot be read."""
        for index in range(min(len(self), FIRST_ROWS)):
            with suppress(DataError):
                yield self.encoded_fields(index)

    def uid(self, index: int) -> str:
        """The uid of a row's sample: "train:11"."""
        return f"{self.name}:{self._kept[index]}"

    def row_name(self, index: int) -> str:
        """Return a row's name for messages: "train.jsonl:12" or "train row 11"."""
        return self._rows.row_name(self._kept[index])

    def sample(self, index: int) -> Sample:
        """Row `index` (from 0) with its images decoded, upright and RGB. Nothing is kept for the next call.

        Raises:
            DataError: the row or one of its images cannot be used; the message names the row.
            IndexError: `index` is not in [0, len).
        """
        return self.opener(index)()

    def opener(self, index: int) -> Callable[[], Sample]:
        """Read row `index` now; the function that is returned opens its images, in any thread. Raises as `sample`."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {self!r}")
        fields = self.fields(index)
        row_name = self.row_name(index)
        own = pictured = self._kept[index]
        if self._blank:
            fields = replace(fields, messages=without_images(fields.messages), images=())
        elif self._image_rows is not None and self._image_rows[own] != own:
            pictured = self._image_rows[own]
            row_name = f"{row_name} (images of {self._rows.row_name(pictured)})"
            fields = replace(fields, images=self._read(self._rows[pictured], pictured).images)
        folder = self._image_folder(pictured)
        characters = sum(map(_characters, fields.messages))
        for number, most, what in (
            (characters, MOST_CHARACTERS, "characters"), (len(fields.images), MOST_IMAGES, "images")
        ):  # fmt: skip
            if number > most:
                raise DataError(
                    f"{row_name}: the prompt has {number:,} {what}, and {most:,} at most; shorten it"
                )

        def opened() -> Sample:
            images = open_images(fields.images, row=row_name, image_dir=folder, files=self._image_files)
            return Sample(self.uid(index), fields.messages, images, (), fields.columns)

        return opened

    def verify(self) -> None:
        """Read rows, not images: all of a list, the first of anything else. DataError when one is wrong."""
        for index in range(len(self) if self.in_memory else 1):
            self.fields(index)

    def head(self, count: int) -> Dataset:
        """The first `count` rows under their own names and uids; all of them when there are fewer."""
        return self._changed(_kept=self._kept[:count])

    def without(self, rows: Collection[int]) -> Dataset:
        """The others of the rows, under their own names and uids."""
        return self._changed(_kept=[at for index, at in enumerate(self._kept) if index not in rows])

    def with_parts(self, parts: Sequence[Dataset]) -> Dataset:
        """The same of other parts, one for each of `parts`."""
        return parts[0]

    def row_keys(self) -> Iterator[tuple[Hashable, str]]:
        """Yield a key, equal for rows with the same messages, files and bytes, and the name of each row in memory.

        No picture is opened, and rows with PIL images are left out.
        """
        for part in self.parts:
            for index in range(len(part) if part.in_memory else 0):
                with suppress(DataError):
                    fields, folder = part.encoded_fields(index), part._image_folder(part._kept[index])
                    if not any(isinstance(image, Image.Image) for image in fields.images):
                        keys = (image_key(image, folder) for image in fields.images)
                        yield (str(fields.messages), *keys), part.row_name(index)

    def look_at_images(self, index: int) -> Callable[[], None]:
        """Read row `index` now; the function that is returned raises BadImage where `look_at_image` does for one."""
        row_name, folder = self.row_name(index), self._image_folder(self._kept[index])
        images = self.encoded_fields(index).images

        def look() -> None:
            for image in images:
                look_at_image(image, row_name, folder, self._image_files)

        return look

    def with_shuffled_images(self, seed: int = 0) -> Dataset:
        """The same rows, each with the images of another row: what a model scores when it cannot see.

        Images move among the rows that have equally many, so that no row gets its own images or equal ones
        (`blind.exchange`). Rows without images stay as they are. Reads every row, but opens no image file.

        Raises:
            DataError: a row is the only one with its number of images, or most rows with it have the same ones.
        """
        by_count: dict[int, dict[int, tuple[Hashable, ...]]] = {}
        for index in range(len(self)):
            sources = self.encoded_fields(index).images
            folder = self._image_folder(self._kept[index])
            by_count.setdefault(len(sources), {})[index] = tuple(image_key(s, folder) for s in sources)
        by_count.pop(0, None)
        image_rows = list(range(len(self._rows)))
        rng = random.Random(f"shuffled images/{seed}")
        for count, members in sorted(by_count.items()):
            indices = list(members)
            try:
                lenders = exchange(list(members.values()), rng)
            except ValueError as error:
                raise DataError(
                    f"{self.row_name(indices[0])}: images cannot be exchanged among the rows with {count} "
                    f"(run.eval_blind: shuffled): {error}; leave rows out, or write run.eval_blind: removed"
                ) from None
            for place, lender in enumerate(lenders):
                image_rows[self._kept[indices[place]]] = self._kept[indices[lender]]
        return self._changed(_image_rows=image_rows)

    def with_images_removed(self) -> Dataset:
        """The same rows without their images and without the parts of messages that stand for them."""
        return self._changed(_blank=True)

    def _changed(self, **attributes: Any) -> Dataset:
        changed = copy.copy(self)
        vars(changed).update(attributes)
        return changed

    def _image_folder(self, at: int) -> str | Path:
        """Return the folder that relative image paths of row `at` of all rows start from."""
        return self._settings.image_dir or self._rows.folder(at) or "."

    def fingerprint_of(self, index: int) -> str:
        """Row `index` as JSON. In place of an image is the XXH3 of its encoded bytes, or the mode and size of a PIL
        image; of one that cannot be read what the row has. DataError for one that changed."""
        fields = self.encoded_fields(index)
        name, folder = self.row_name(index), self._image_folder(self._kept[index])
        images = list(fields.images)
        for place, source in enumerate(images):
            with suppress(BadImage):
                images[place] = read_encoded(source, name, MAX_BYTES, folder, files=self._image_files)[0]
        return json.dumps([fields.messages, images, fields.columns], sort_keys=True, default=_stable_text)

    def fields(self, index: int) -> Fields:
        """Row `index` (from 0) with its images closed. DataError when it is wrong."""
        at = self._kept[index]
        return self._read(self._rows[at], at)

    def _read(self, row: Any, at: int) -> Fields:
        given = {
            name: getattr(self._settings, name) for name in ("columns", "system_prompt", "prompt_template")
        }
        fields = read_row(row, row_name=self._rows.row_name(at), **given)
        return replace(fields, columns={**fields.columns, **self._added}) if self._added else fields

    @property
    def in_memory(self) -> bool:
        """True when the rows are a list, or as quick to read: all of them can be looked at."""
        return self._rows.in_memory

    def encoded_fields(self, index: int) -> Fields:
        """As `fields`; images that are encoded in a datasets.Dataset stay so in the other columns too."""
        at = self._kept[index]
        return self._read(self._rows.encoded_row(at), at)

    def dataset_column(self, name: str) -> str:
        """The dataset's own name for one of our columns."""
        return rename(self._rows.column_names, self._settings.columns).get(name, name)

    def _available(self) -> list[str]:
        """The dataset's own columns, and what lies in those that `data.columns` reaches into, by dotted names."""
        names = dict.fromkeys(self._rows.column_names)
        for path in self._settings.columns.values():
            column, keys = locate(path, self._rows.column_names) or ("", [])
            for index in range(min(len(self._rows), FINGERPRINT_ROWS) if keys else 0):
                row = self._rows.encoded_row(index)
                # a row of another shape is named when it is read
                with suppress(DataError, AttributeError):
                    names.update(dict.fromkeys(nested_names(column, row.get(column))))
                    if path in names or value_at(row, path, "") is not ABSENT:
                        names[path] = None
                        break
        return list(names)


def _characters(message: Mapping[str, Any]) -> int:
    content = message["content"]
    return len(content) if isinstance(content, str) else sum(len(part.get("text", "")) for part in content)


def fingerprint(dataset: Dataset) -> dict[str, Any]:
    """Identify a dataset, for a resume: the number of `rows`, and a `sha256` of them.

    Of up to FINGERPRINT_ROWS rows, evenly spaced, the conversation, the columns and the images' files are hashed: in
    these an image that was exchanged behind its path is noticed. Of a mixture also its `sources`, each with its weight.
    """
    if dataset.parts[0] is not dataset:
        sources = [
            {"name": part.name, "weight": weight, **fingerprint(part)}
            for part, weight in zip(dataset.parts, dataset.weights, strict=True)
        ]
        digest = hashlib.sha256(json.dumps(sources).encode()).hexdigest()
        return {"rows": len(dataset), "sha256": digest, "sources": sources}
    left_out = sorted(set(range(len(dataset._rows))) - set(dataset._kept))
    state = hashlib.sha256(repr(left_out).encode() if left_out else b"")
    for index in range(0, len(dataset), -(-len(dataset) // FINGERPRINT_ROWS)):
        state.update(dataset.fingerprint_of(index).encode() + b"\0")
    return {"rows": len(dataset), "sha256": state.hexdigest()}


def _stable_text(value: Any) -> str:
    """Anything that JSON does not hold, without what differs between two readings of the same row."""
    if isinstance(value, bytes):
        return xxhash.xxh3_128_hexdigest(value)
    if isinstance(value, Image.Image):
        return f"{value.mode} {value.size}"
    if hasattr(value, "tolist"):  # arrays
        return str(value.tolist())
    text = str(value)
    return type(value).__name__ if " at 0x" in text else text
