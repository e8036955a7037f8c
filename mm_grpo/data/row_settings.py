"""Settings of one row: limits of its images' sizes, and arguments of the chat template.

Limits stand in the image parts of messages, as qwen-vl-utils reads them (`types.PIXEL_LIMITS`). Each is clipped to the
limits of the row, which may stand in its column `chat_template_kwargs`, and of its source; a processor clips them to
the run's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mm_grpo.config.values import plain_mapping
from mm_grpo.data.columns import brief
from mm_grpo.errors import DataError
from mm_grpo.files import parse_json
from mm_grpo.numbers import is_number
from mm_grpo.types import PIXEL_LIMITS

TEMPLATE_COLUMN = "chat_template_kwargs"


def read_limits(values: Mapping[str, Any], where: str) -> dict[str, int]:
    """Return the limits of an image's size in a mapping, without null. DataError for one that is wrong."""
    limits = {key: values[key] for key in PIXEL_LIMITS if values.get(key) is not None}
    whole = all(is_number(value) and value >= 1 and value % 1 == 0 for value in limits.values())
    sides = len(limits.keys() & {"resized_height", "resized_width"})
    if not whole or sides == 1 or limits.get("min_pixels", 1) > limits.get("max_pixels", math.inf):
        raise DataError(
            f"{where}: {limits}: legal are whole numbers of pixels from 1, min_pixels up to max_pixels, and "
            "resized_height together with resized_width"
        )
    return {key: int(value) for key, value in limits.items()}


def read_template_kwargs(value: Any, row_name: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the arguments of the chat template in a row's column, and the limits of all its images there.

    The value is a mapping, JSON text of one, or None. DataError if it is none of these.
    """
    where = f"{row_name}: {TEMPLATE_COLUMN}"
    try:
        arguments = plain_mapping((parse_json(value) if isinstance(value, str) else value) or {})
    except ValueError:
        raise DataError(
            f"{where} is {brief(value)}; legal is a mapping such as {{'enable_thinking': false}}, or JSON text of one"
        ) from None
    limits = read_limits(arguments, where)
    # Arrow gives every row the keys of all rows, with null for a key that the row does not have
    return {key: v for key, v in arguments.items() if v is not None and key not in limits}, limits
