"""Datasets whose rows would be trained on without their images.

A run of a vision-language model on such rows trains on text alone and looks as any other, so `check_images` refuses
it before a model is loaded. `data.text_only` allows it. Of rows in memory and of JSON files every row is looked at, of
other datasets `LOOKED_AT` rows, evenly spaced. No image is decoded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from mm_grpo.data.dataset import Dataset
from mm_grpo.data.image_columns import HOW_TO_READ, image_columns, is_image
from mm_grpo.errors import DataError

log = logging.getLogger(__name__)
LOOKED_AT = 1000
"""Rows of a dataset that is not in memory which are looked at."""


class MissingImages(DataError):
    """Rows would be trained on without their images."""


def check_images(dataset: Dataset, *, verify: bool) -> None:
    """Refuse rows that would be trained on without their images. Without `verify`, a row that cannot be read is passed.

    A column that holds images beside those that are read is reported once, as a warning: it may be meant for a reward.
    So are boxes in a prompt, whose pixels a model may count otherwise.

    Raises:
        MissingImages: a row without an image of its own has a column that looks like one, or no row has an image.
        DataError: with `verify`, a row that is looked at cannot be read.
    """
    step = 1 if dataset.in_memory else -(-len(dataset) // LOOKED_AT)
    indices = range(0, len(dataset), step)
    with_image = readable = 0
    warned: set[str] = set()
    names: dict[str, None] = {}
    for index in indices:
        try:
            fields = dataset.encoded_fields(index)
        except DataError:
            if verify:
                raise
            continue
        row_name, readable = dataset.row_name(index), readable + 1
        if fields.boxes and "" not in warned:
            warned.add("")
            log.warning(
                "%s: the prompt's boxes (<bbox>) are written with the numbers of 'objects'; a model that counts "
                "pixels of the resized image, or thousandths, reads others: write them as the model counts",
                row_name,
            )
        if not fields.images:
            names.update(dict.fromkeys(fields.columns))
            _refuse_unread(dataset, row_name, fields.columns)
            continue
        with_image += 1
        for name, value in fields.columns.items():
            if name not in warned and is_image(value):
                warned.add(name)
                log.warning(
                    "%s: the column %r holds an image that the model is not shown, beside one that it is; rewards can "
                    "ask for it",
                    row_name,
                    dataset.dataset_column(name),
                )
    if readable and not with_image:
        columns = ", ".join(repr(dataset.dataset_column(name)) for name in names) or "none"
        raise MissingImages(
            f"{dataset.name}: no row has an image (rows looked at: {len(indices)} of {len(dataset)}, from "
            f"{dataset.row_name(0)}), and the model is one of vision and language. {HOW_TO_READ}; the other columns "
            f"are {columns}. Name the column that holds the images, as in data.columns.images=COLUMN, or set "
            "data.text_only=true to train on text alone"
        )


def _refuse_unread(dataset: Dataset, row_name: str, columns: Mapping[str, Any]) -> None:
    column = next(image_columns(columns), None)
    if column is not None:
        name = dataset.dataset_column(column)
        raise MissingImages(
            f"{row_name}: the column {name!r} looks like images and is not read, and the row has no other image: it "
            f"would be trained on as text alone. {HOW_TO_READ}. Set data.columns.images={name}; if the rows are to be "
            "used without images, data.text_only=true"
        )
