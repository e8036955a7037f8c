"""Records (dataclasses) as JSON values, and back by the type hints of their fields.

A field may be a number, a text, None, a record, an image, a tensor, and a tuple, list or mapping of such.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from PIL.Image import Image


def encode(value: Any, without: Collection[str] = ()) -> Any:
    """A value as JSON has it; fields of records that are named in `without` are left out, at every depth."""
    if value is None or isinstance(value, str | int | float):
        return value
    from PIL.Image import Image
    from torch import Tensor

    if isinstance(value, Image):
        return base64.b64encode(as_png(value)).decode()
    if isinstance(value, Tensor):
        return value.tolist()
    if is_dataclass(value):
        names = (field.name for field in fields(value))
        return {name: encode(getattr(value, name), without) for name in names if name not in without}
    if isinstance(value, Mapping):
        return {key: encode(each, without) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [encode(each, without) for each in value]
    return value


def decode(kind: Any, value: Any) -> Any:
    """The record of class `kind`, or the value of a type hint, that `encode` made `value` of.

    Records, images and tensors within `value` that are decoded already stay as they are.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any or (isinstance(kind, type) and isinstance(value, kind)):
        return value
    if is_dataclass(kind):
        record: Any = kind
        hints = _hints(record)
        return record(**{name: decode(hints[name], each) for name, each in value.items()})
    if origin in (Union, UnionType):  # X | None
        return value if value is None else decode(inner[0], value)
    if origin is tuple:
        kinds = inner[:1] * len(value) if inner[-1] is ... else inner
        return tuple(map(decode, kinds, value))
    if origin in (list, Sequence):
        return [decode(inner[0], each) for each in value]
    if origin in (dict, Mapping):
        return {key: decode(inner[1], each) for key, each in value.items()}
    return _decode_leaf(kind, value)


def _decode_leaf(kind: Any, value: Any) -> Any:
    if kind in (int, str, float, bool):
        return value
    from PIL import Image
    from torch import Tensor, tensor

    if kind is Image.Image:
        image = Image.open(io.BytesIO(base64.b64decode(value)))
        image.load()
        return image
    return tensor(value) if kind is Tensor else value


def as_png(image: Image) -> bytes:
    """A PNG, packed quickly: the default level takes several times as long."""
    png = io.BytesIO()
    image.save(png, "PNG", compress_level=1)
    return png.getvalue()


@cache
def _hints(kind: Any) -> dict[str, Any]:
    from PIL.Image import Image
    from torch import Tensor

    return get_type_hints(kind, localns={"Image": Image, "Tensor": Tensor})
