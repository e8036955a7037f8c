"""Settings of one row: limits of its images' sizes, and arguments of the chat template.

Limits stand in the image parts of messages, as qwen-vl-utils reads them (`types.PIXEL_LIMITS`). Each is clipped to the
limits of the row, which may stand in its column `chat_template_kwargs`, and of its source; a processor clips them to
the run's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    for key, value in limits.items():
        if not is_number(value) or value < 1 or value % 1:
            raise DataError(
                f"{where}: {key} is {brief(value)}; legal is a whole number of pixels, at least 1"
            )
    if limits.get("min_pixels", 1) > limits.get("max_pixels", limits.get("min_pixels", 1)):
        raise DataError(
            f"{where}: min_pixels is {limits['min_pixels']}, above max_pixels, {limits['max_pixels']}"
        )
    if len(limits.keys() & {"resized_height", "resized_width"}) == 1:
        raise DataError(f"{where}: resized_height and resized_width come together; write both or neither")
    return {key: int(value) for key, value in limits.items()}


def with_limits(
    messages: Sequence[Mapping[str, Any]], limits: Mapping[str, int] | None
) -> list[dict[str, Any]]:
    """Return messages with `limits` in each image part, whose own are clipped to them; None removes all limits."""

    def change(part: Mapping[str, Any]) -> Mapping[str, Any]:
        if part["type"] != "image" or limits is None:
            return part if part["type"] != "image" else {"type": "image"}
        low, high = limits.get("min_pixels", 1), limits.get("max_pixels", math.inf)
        clipped = {key: min(max(part[key], low), high) for key in ("min_pixels", "max_pixels") if key in part}
        return {"type": "image", **limits, **part, **clipped}

    return [
        {**m, "content": m["content"] if isinstance(m["content"], str) else [*map(change, m["content"])]}
        for m in messages
    ]


def read_template_kwargs(value: Any, row_name: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the arguments of the chat template in a row's column, and the limits of its images.

    The value is a mapping, JSON text of one, or None. DataError if it is none of these.
    """
    where = f"{row_name}: {TEMPLATE_COLUMN}"
    try:
        values = parse_json(value) if isinstance(value, str) else value
        # Arrow gives every row the keys of all rows, with null for a key that the row does not have
        arguments = {key: v for key, v in plain_mapping(values or {}).items() if v is not None}
    except (ValueError, AttributeError):
        raise DataError(
            f"{where} is {brief(value)}; legal is a mapping such as {{'enable_thinking': false}}, or JSON text of one"
        ) from None
    limits = read_limits(arguments, where)
    return {key: v for key, v in arguments.items() if key not in limits}, limits
