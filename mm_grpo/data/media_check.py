"""Checks for datasets with images or videos that would not be read.

A run on such rows would train on text alone and look like any other, so `check_media` refuses it before a model is
loaded. `data.text_only` allows it. Of rows in memory and of JSON files every row is looked at, of
other datasets `SAMPLED_ROWS`, evenly spaced. Nothing is decoded.
"""

from __future__ import annotations

import logging

from mm_grpo.data.base import SAMPLED_ROWS, Rows
from mm_grpo.data.columns import quoted
from mm_grpo.data.layouts import MissingPrompt, holds_question
from mm_grpo.data.media_columns import HOW_TO_READ, media_columns, unread_media
from mm_grpo.errors import DataError

log = logging.getLogger(__name__)

_SHOW_MEDIUM = (
    "the column '{column}' holds an image or a video that the model is not shown; rewards can ask for it. To show it "
    "set data.columns.{medium}s={column}, or beside another of its kind write data.columns: {{{medium}_1: ..., "
    "{medium}_2: {column}}} in place of the one"
)
_READ_MESSAGES = (
    "the column '{column}' holds messages that the model is not shown; rewards can ask for it. To read it in place of "
    "the prompt set data.columns.prompt={column}"
)


def rows_to_look_at(dataset: Rows) -> range:
    """Return the indices of all rows of a dataset in memory, else of SAMPLED_ROWS, evenly spaced."""
    return range(len(dataset)) if dataset.in_memory else dataset.spaced(SAMPLED_ROWS)


def check_media(dataset: Rows, *, verify: bool) -> None:
    """Refuse rows of one source that would be trained on without their images and videos.

    Warn once of each column with other media or messages, which may be meant for a reward, and of rows without media
    among others. Without `verify` a row that cannot be read is skipped, unless no row has a prompt.

    Raises:
        DataError: no row has a medium, a row without one has a column that looks like one, or with `verify` a row
            cannot be read.
    """
    indices = rows_to_look_at(dataset)
    with_media = readable = 0
    without = ""
    missing: MissingPrompt | None = None
    warned: set[str] = set()
    names: dict[str, None] = {}
    for index in indices:
        try:
            fields = dataset.fields(index)
        except DataError as error:
            if verify:
                raise
            missing = missing or (error if isinstance(error, MissingPrompt) else None)
            continue
        row_name, readable, columns = dataset.row_name(index), readable + 1, fields.other_columns
        used_names = warned | fields.used.keys()
        unused = {name: value for name, value in columns.items() if name not in used_names}
        messages = (name for name, value in unused.items() if holds_question(name, value))
        remarks = dict.fromkeys(unread_media(unused, fields.sources), _SHOW_MEDIUM)
        for (name, medium), remark in (remarks | {(n, ""): _READ_MESSAGES for n in messages}).items():
            warned.add(name)
            column = dataset.dataset_column(name)
            log.warning("%s: %s", row_name, remark.format(column=column, medium=medium))
        if fields.images or fields.videos:
            with_media += 1
            continue
        without = without or row_name
        names.update(dict.fromkeys(columns))
        if looks := next(media_columns(columns), None):
            column, medium = looks
            name = dataset.dataset_column(column)
            raise DataError(
                f"{row_name}: the column {name!r} looks like {medium}s and is not read, and the row has no others: it "
                f"would be trained on as text alone. {HOW_TO_READ}. Set data.columns.{medium}s={name}; if the rows are "
                f"to be used without {medium}s, data.text_only=true"
            )
    if missing is not None and not readable:
        raise missing
    if readable and not with_media:
        raise DataError(
            f"{dataset.name}: no row has an image or a video (rows looked at: {len(indices)} of {len(dataset)}, from "
            f"{dataset.row_name(0)}), and the model is one of vision and language. {HOW_TO_READ}; the other columns "
            f"are {quoted(map(dataset.dataset_column, names))}. Name the column that holds them, as in "
            "data.columns.images=COLUMN, or set data.text_only=true to train on text alone"
        )
    if 0 < with_media < readable:
        count = f"{readable - with_media} of {readable} rows have no image or video, the first {without}"
        log.warning("%s: %s; set data.text_only=true if that is meant", dataset.name, count)
