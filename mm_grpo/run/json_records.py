"""Convert records (dataclasses) to JSON values, and back by the type hints of their fields.

A field may be a number, a text, None, a record, an image, a tensor, a tuple, list or mapping of these, or a union.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from PIL import Image
from torch import Tensor, tensor

from mm_grpo.files import encoded_image


def encode(value: Any, without: Collection[str] = ()) -> Any:
    """Convert a value to JSON types; fields of records named in `without` are left out at every depth."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Image.Image):
        return base64.b64encode(encoded_image(value)).decode()
    if isinstance(value, Tensor):
        return value.tolist()
    if is_dataclass(value):
        names = (field.name for field in fields(value))
        return {name: encode(getattr(value, name), without) for name in names if name not in without}
    if isinstance(value, Mapping):
        return {key: encode(entry, without) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [encode(entry, without) for entry in value]
    return value


def decode(kind: Any, value: Any) -> Any:
    """Convert a value of `encode` back to the class or type hint `kind`.

    Records, images and tensors in `value` that are decoded already stay as they are.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any or (isinstance(kind, type) and isinstance(value, kind)):
        return value
    if is_dataclass(kind):
        record: Any = kind
        hints = _hints(record)
        return record(**{name: decode(hints[name], entry) for name, entry in value.items()})
    if origin in (Union, UnionType):
        matches = (member for member in inner if _is_of(value, member))
        return decode(next(matches, inner[0]), value)
    if origin is tuple:
        kinds = inner[:1] * len(value) if inner[-1] is ... else inner
        return tuple(map(decode, kinds, value))
    if origin in (list, Sequence):
        return [decode(inner[0], entry) for entry in value]
    if origin in (dict, Mapping):
        return {key: decode(inner[1], entry) for key, entry in value.items()}
    if kind is Image.Image:
        image = Image.open(io.BytesIO(base64.b64decode(value)))
        image.load()
        return image
    return tensor(value) if kind is Tensor else value


def _is_of(value: Any, kind: Any) -> bool:
    """Return True for an object of a class, and for the encoded one of a record."""
    is_record = is_dataclass(kind) and isinstance(value, Mapping)
    return is_record or (isinstance(kind, type) and isinstance(value, kind))


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, localns={"Image": Image.Image, "Tensor": Tensor})
