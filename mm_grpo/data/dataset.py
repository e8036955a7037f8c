"""`Dataset`: the rows of one source. base.py says what all rows can do, mixture.py joins several datasets.

What a row may look like is in rows.py, what an image may be in images.py, where rows come from in sources.py, and in
which order they are used in order.py.

Lists and JSON files are checked whole at construction, without opening an image. Of other datasets, which may be large
and on disk, only the first row is; `check` goes through everything.
"""

from __future__ import annotations

import base64
import copy
import random
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from mm_grpo.data.base import SAMPLED_ROWS, Rows
from mm_grpo.data.blind import FRAME_CONTROLS, exchange, media_key, with_frames, without_media
from mm_grpo.data.columns import (
    ABSENT,
    check_columns,
    locate,
    nested_names,
    quoted,
    rename,
    template_names,
    value_at,
)
from mm_grpo.data.file_states import FileStates
from mm_grpo.data.fingerprint import digest_of, row_digest
from mm_grpo.data.images import Refusal, look_at_image, open_images
from mm_grpo.data.media_check import rows_to_look_at
from mm_grpo.data.order import PromptOrder
from mm_grpo.data.readers import JoinedRows, Part
from mm_grpo.data.rows import Fields, read_row
from mm_grpo.data.videos import look_at_video, open_videos
from mm_grpo.errors import DataError, did_you_mean
from mm_grpo.messages import media_parts, messages_text, pixel_limits
from mm_grpo.types import Sample

if TYPE_CHECKING:
    from mm_grpo.config import DataConfig

MAX_CHARACTERS = 4_000_000
MAX_IMAGES = 1_000
MAX_VIDEOS = 100
"""Limits of a row's messages: no context holds more, and tokenising and decoding more takes minutes and gigabytes."""
FIRST_ROWS = 16
"""Rows that show what all rows are like: which columns hold the prompt and the answer."""


class Dataset(Rows):
    """Rows of one source, read as samples. To check more of a row at the start: `verify`.

    Args:
        rows: a list of rows, or anything with a length, an index and `column_names`.
        settings: the config's section `data`.
        name: what the dataset is called, in uids and in messages.
        row_name: what messages call row i; "<name> row i" if not given.
        folder: start of relative image paths when `settings.image_dir` is not set.
        verify: read rows (not images) now: all of a list, the first of anything else.
        added: columns that every row gets, with their values.
        pixel_limits: `min_pixels` and `max_pixels` of this source, below the run's.

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
        pixel_limits: Mapping[str, int] | None = None,
    ) -> None:
        self.name, self._pixel_limits = name, pixel_limits
        part = Part(rows, row_name or (lambda index: f"{name} row {index}"), folder)
        self._rows = rows if isinstance(rows, JoinedRows) else JoinedRows([part])
        self._settings = settings
        self.in_memory, self.text_only = self._rows.in_memory, settings.text_only
        self._image_rows: Sequence[int] | None = None
        """By row of the source, the row whose images it has; None if each has its own."""
        self._control = ""
        self._image_files = FileStates()  # one for all copies: a file must not change between two of them
        self._indices: Sequence[int] = range(len(rows))
        """By row of this dataset, its index in the source: `head` and `without` leave some out."""
        if len(rows) == 0:
            raise DataError(f"the dataset {name!r} has 0 rows; training and evaluation need at least 1")
        check_columns(settings.columns, self._available(), f"the dataset {name!r}")
        columns = rename(self._rows.column_names, settings.columns)
        for column in template_names(settings.prompt_template or ""):
            if locate(column, columns) is None:
                raise DataError(
                    f"data.prompt_template asks for {column!r}, and the dataset {name!r} has no such column; "
                    f"{did_you_mean(column, columns)}it has: {quoted(columns)}"
                )
        self._added = dict(added or {})
        for column in self._added.keys() & columns.keys():
            raise DataError(
                f"{name}: {column}={self._added[column]!r} is to be put on every row, and the rows have a column "
                f"{column!r}; leave it out, or give the rows' own another name in columns"
            )
        if verify:
            self.verify()

    def __len__(self) -> int:
        return len(self._indices)

    @cached_property
    def columns(self) -> tuple[str, ...]:
        first_rows = []
        for index in range(min(len(self), FIRST_ROWS)):
            with suppress(DataError):
                first_rows.append(self.fields(index))
        row_columns = dict.fromkeys(name for fields in first_rows for name in fields.columns)
        # an `answer` that is no column (a reply in the conversation) shows in the first rows alone
        return (*(rename(self._rows.column_names, self._settings.columns) | row_columns),)

    @property
    def sources(self) -> Sequence[Rows]:
        return (self,)

    def order(self, prompts_per_step: int, seed: int, shuffle: bool) -> PromptOrder:
        return PromptOrder(len(self), prompts_per_step, seed, shuffle)

    def uid(self, index: int) -> str:
        return f"{self.name}:{self._indices[index]}"

    def row_name(self, index: int) -> str:
        return self._rows.row_name(self._indices[index])

    def opener(self, index: int) -> Callable[[], Sample]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {self!r}")
        row_name, at = self.row_name(index), self._indices[index]
        fields = self._read(self._rows[at], at)
        image_row = at if self._image_rows is None else self._image_rows[at]
        if self._control == "removed":
            fields = replace(fields, messages=without_media(fields.messages), images=(), videos=())
        elif image_row != at:
            row_name = f"{row_name} (images of {self._rows.row_name(image_row)})"
            lender = self._read(self._rows[image_row], image_row)
            fields = replace(fields, images=lender.images, videos=lender.videos)
        folder = self._image_folder(image_row)
        characters = len(messages_text(fields.messages))
        # before an image is opened: a huge row would take minutes
        for number, limit, noun in (
            (characters, MAX_CHARACTERS, "characters"), (len(fields.images), MAX_IMAGES, "images"),
            (len(fields.videos), MAX_VIDEOS, "videos"),
        ):  # fmt: skip
            if number > limit:
                raise DataError(f"{row_name}: {number:,} {noun} in the prompt, {limit:,} at most; shorten it")

        def open_sample() -> Sample:
            options: Any = {"row": row_name, "image_dir": folder, "files": self._image_files}
            images = open_images(fields.images, **options)
            options |= {"fps": self._settings.video_fps, "max_frames": self._settings.video_max_frames}
            videos = open_videos(fields.videos, **options)
            prompt_columns = frozenset(fields.columns) - fields.other_columns.keys()
            return Sample(
                self.uid(index), fields.messages, images, videos, fields.columns,
                chat_template_kwargs=fields.chat_template_kwargs, prompt_columns=prompt_columns,
            )  # fmt: skip

        control = self._control
        return (lambda: with_frames(open_sample(), control)) if control in FRAME_CONTROLS else open_sample

    def fields(self, index: int) -> Fields:
        at = self._indices[index]
        return self._read(self._rows.encoded_row(at), at)

    def verify(self) -> None:
        for at in self._indices if self.in_memory else self._indices[:1]:
            self._read(self._rows[at], at)

    def head(self, count: int) -> Dataset:
        return self._changed(_indices=self._indices[:count])

    def without(self, rows: Collection[int]) -> Dataset:
        return self._changed(_indices=[at for index, at in enumerate(self._indices) if index not in rows])

    def map_sources(self, change: Callable[[Rows], Rows]) -> Rows:
        return change(self)

    def row_keys(self) -> Iterator[tuple[Hashable, str]]:
        for index in range(len(self) if self.in_memory else 0):
            with suppress(DataError):
                fields, folder = self.fields(index), self._image_folder(self._indices[index])
                if not any(isinstance(image, Image.Image) for image in fields.sources["image"]):
                    media = (media_key(source, folder) for source in fields.media)
                    yield (str(without_media(fields.messages)), *media), self.row_name(index)

    def look_at_images(self, index: int, refusal: Refusal | None = None) -> Callable[[], None]:
        row_name, folder = self.row_name(index), self._image_folder(self._indices[index])
        fields = self.fields(index)

        def look() -> None:
            parts = zip(media_parts(fields.messages), pixel_limits(fields.messages), strict=True)
            of_images = (tuple(limits.items()) for part, limits in parts if part["type"] == "image")
            for image, limits in zip(fields.images, chain(of_images, repeat(())), strict=False):
                look_at_image(image, row_name, folder, self._image_files, refusal, limits)
            for video in fields.videos:
                look_at_video(video, row_name, folder, self._image_files)

        return look

    def control(self, kind: str) -> Dataset:
        if kind != "shuffled":
            return self._changed(_control=kind)
        by_count: dict[tuple[int, int], dict[int, tuple[Hashable, ...]]] = {}
        for index in range(len(self)):
            fields, folder = self.fields(index), self._image_folder(self._indices[index])
            keys = tuple(media_key(source, folder) for source in fields.media)
            by_count.setdefault((len(fields.images), len(fields.videos)), {})[index] = keys
        by_count.pop((0, 0), None)
        image_rows = list(range(len(self._rows)))
        rng = random.Random("shuffled images/0")
        for (images, videos), members in sorted(by_count.items()):
            indices = list(members)
            try:
                lenders = exchange(list(members.values()), rng)
            except ValueError as error:
                raise DataError(
                    f"{self.row_name(indices[0])}: images cannot be exchanged among the rows with {images} image(s) "
                    f"and {videos} video(s) (run.eval_blind: shuffled): {error}; leave rows out, or write "
                    "run.eval_blind: removed"
                ) from None
            for place, lender in enumerate(lenders):
                image_rows[self._indices[indices[place]]] = self._indices[indices[lender]]
        return self._changed(_image_rows=image_rows)

    def _changed(self, **attributes: Any) -> Dataset:
        # a copy shares the rows and `_image_files`, and keeps `columns` and `by_task` if they are known by now
        changed = copy.copy(self)
        vars(changed).update(attributes)
        return changed

    def _image_folder(self, at: int) -> str | Path:
        """Return the folder that relative image paths of row `at` of the source start from."""
        return self._settings.image_dir or self._rows.folder(at) or "."

    def fingerprint(self) -> dict[str, Any]:
        left_out = sorted(set(range(len(self._rows))) - set(self._indices))
        digests, spaced = bytearray(), self.spaced(SAMPLED_ROWS)
        for index in rows_to_look_at(self):
            if index in spaced:
                folder = self._image_folder(self._indices[index])
                digests += row_digest(self.fields(index), self.row_name(index), folder, self._image_files)
            else:  # opening all files would take too long
                digests += digest_of(self._rows.encoded_row(self._indices[index]))
        row_digests = base64.b64encode(digests).decode()
        return {"name": self.name, "rows": len(self), "left_out": left_out, "digests": row_digests}

    def _read(self, row: Any, at: int) -> Fields:
        """Return the fields of a row, which is row `at` of the source."""
        fields = read_row(
            row,
            row_name=self._rows.row_name(at),
            columns=self._settings.columns,
            system_prompt=self._settings.system_prompt,
            prompt_template=self._settings.prompt_template,
            pixel_limits=self._pixel_limits,
            text_only=self._settings.text_only,
        )
        if not self._added:
            return fields
        used = {name: purpose for name, purpose in fields.used.items() if name not in self._added}
        return replace(fields, columns={**fields.columns, **self._added}, used=used)

    def dataset_column(self, name: str) -> str:
        return rename(self._rows.column_names, self._settings.columns).get(name, name)

    def _available(self) -> list[str]:
        """Return the dataset's own columns, and the dotted names inside of columns that `data.columns` reaches into."""
        names = dict.fromkeys(self._rows.column_names)
        for path in self._settings.columns.values():
            column, keys = locate(path, self._rows.column_names) or ("", [])
            for index in range(min(len(self._rows), SAMPLED_ROWS) if keys else 0):
                row = self._rows.encoded_row(index)
                # a row of another shape is named when it is read
                with suppress(DataError, AttributeError):
                    names.update(dict.fromkeys(nested_names(column, row.get(column))))
                    if path in names or value_at(row, path, "") is not ABSENT:
                        names[path] = None
                        break
        return list(names)
