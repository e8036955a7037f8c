"""Checks for datasets with images that would not be read.

A run on such rows would train on text alone and look like any other, so `check_media` refuses it before a model is
loaded. `data.text_only` allows it. Of rows in memory and of JSON files every row is looked at, of
other datasets `SAMPLED_ROWS`, evenly spaced. No image is decoded.
"""

from __future__ import annotations

import logging

from mm_grpo.data.base import SAMPLED_ROWS, Rows
from mm_grpo.data.columns import quoted
from mm_grpo.data.layouts import MissingPrompt, holds_question
from mm_grpo.data.media_columns import HOW_TO_READ, media_columns, unread_images
from mm_grpo.errors import DataError

log = logging.getLogger(__name__)

_SHOW_IMAGE = (
    "the column '{column}' holds an image that the model is not shown, beside one that it is; rewards can ask for "
    "it. To show both write data.columns: {{image_1: ..., image_2: {column}}} in place of the one"
)
_READ_MESSAGES = (
    "the column '{column}' holds messages that the model is not shown; rewards can ask for it. To read it in place of "
    "the prompt set data.columns.prompt={column}"
)


def rows_to_look_at(dataset: Rows) -> range:
    """Return the indices of all rows of a dataset in memory, else of SAMPLED_ROWS, evenly spaced."""
    return range(len(dataset)) if dataset.in_memory else dataset.spaced(SAMPLED_ROWS)


def check_media(dataset: Rows, *, verify: bool) -> None:
    """Refuse rows of one source that would be trained on without their images.

    Warn once of each column with other images or messages, which may be meant for a reward, and of rows without images
    among others. Without `verify` a row that cannot be read is skipped, unless no row has a prompt.

    Raises:
        DataError: no row has an image, a row without an image has a column that looks like one, or with `verify` a row
            cannot be read.
    """
    indices = rows_to_look_at(dataset)
    with_image = readable = 0
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
        remarks = dict.fromkeys(unread_images(unused, fields.images) if fields.images else (), _SHOW_IMAGE)
        remarks |= {name: _READ_MESSAGES for name, value in unused.items() if holds_question(name, value)}
        for name, remark in remarks.items():
            warned.add(name)
            log.warning("%s: %s", row_name, remark.format(column=dataset.dataset_column(name)))
        if fields.images:
            with_image += 1
            continue
        without = without or row_name
        names.update(dict.fromkeys(columns))
        if (column := next(media_columns(columns), None)) is not None:
            name = dataset.dataset_column(column)
            raise DataError(
                f"{row_name}: the column {name!r} looks like images and is not read, and the row has no other image: "
                f"it would be trained on as text alone. {HOW_TO_READ}. Set data.columns.images={name}; if the rows are "
                "to be used without images, data.text_only=true"
            )
    if missing is not None and not readable:
        raise missing
    if readable and not with_image:
        raise DataError(
            f"{dataset.name}: no row has an image (rows looked at: {len(indices)} of {len(dataset)}, from "
            f"{dataset.row_name(0)}), and the model is one of vision and language. {HOW_TO_READ}; the other columns "
            f"are {quoted(map(dataset.dataset_column, names))}. Name the column that holds the images, as in "
            "data.columns.images=COLUMN, or set data.text_only=true to train on text alone"
        )
    if 0 < with_image < readable:
        count = f"{readable - with_image} of {readable} rows have no image, the first {without}"
        log.warning("%s: %s; set data.text_only=true if that is meant", dataset.name, count)
