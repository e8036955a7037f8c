"""Objects of a picture that a conversation names, as ms-swift writes them: <ref-object> and <bbox> in the texts.

The row's column `objects` holds what the tags stand for, in the order of the conversation: `ref` texts, `bbox` boxes of
2 or 4 numbers. A box becomes the text "[x0, y0, x1, y1]" with the numbers as they are given, in pixels of the file or,
with `bbox_type: norm1`, as shares of its sides. Nothing is scaled here: which pixels a model counts is a matter of its
family, and rewards bring the boxes of the column to them (`gold_space`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mm_grpo.data.columns import brief
from mm_grpo.errors import DataError
from mm_grpo.types import is_number

REF, BOX = "<ref-object>", "<bbox>"
KEYS = ("ref", "bbox", "bbox_type", "image_id")
BOX_TYPES = ("real", "norm1")
_TAGS = re.compile(f"{REF}|{BOX}")


def is_objects(value: Any) -> bool:
    """True when a column is such a mapping: with `ref` or `bbox`, and nothing that ms-swift does not write.

    >>> is_objects({"bbox": [[1, 2, 3, 4]], "ref": []}), is_objects({"bbox": [], "category": [3]})
    (True, False)
    """
    return isinstance(value, Mapping) and bool({"ref", "bbox"} & set(value)) and set(value) <= set(KEYS)


def has_tags(texts: Iterable[Any], *tags: str) -> bool:
    """True when one of the texts holds one of the tags; any of them when none is given."""
    return any(isinstance(text, str) and any(tag in text for tag in tags or (REF, BOX)) for text in texts)


def fill_tags(texts: Sequence[str], objects: Any, row_name: str, *, whole: bool) -> list[str]:
    """The texts of a conversation with its tags replaced.

    `whole` says that the conversation ends with its answer: then every object has its tag. Without an answer there may
    be more objects than tags: those that the rewards compare with.

    Raises:
        DataError: `objects` is no such mapping, or has not as many texts or boxes as there are tags.
    """
    if not is_objects(objects) or objects.get("bbox_type") not in (None, *BOX_TYPES):
        raise DataError(
            f"{row_name}: the messages hold {REF} or {BOX}, and 'objects' is {brief(objects)}; legal is a mapping such "
            'as {"ref": ["a dog"], "bbox": [[10, 20, 110, 220]]}, with no other keys than '
            f"{', '.join(KEYS)}, and bbox_type one of {', '.join(BOX_TYPES)}; if the tags are plain text, set "
            "data.layout=trl"
        )
    refs, boxes = (objects.get(key) or [] for key in ("ref", "bbox"))
    for tag, key, values in ((REF, "ref", refs), (BOX, "bbox", boxes)):
        count = sum(text.count(tag) for text in texts)
        if count > len(values) or (whole and 0 < count < len(values)):
            raise DataError(
                f"{row_name}: {tag} tags in the messages: {count}; entries of objects.{key}: {len(values)}. Write one "
                "for each"
            )
    left = {REF: map(str, refs), BOX: iter([_box(box, row_name) for box in boxes])}
    return [_TAGS.sub(lambda tag: next(left[tag[0]]), text) for text in texts]


def _box(value: Any, row_name: str) -> str:
    """The text of a box or a point."""
    if not isinstance(value, list | tuple) or len(value) not in (2, 4) or not all(map(is_number, value)):
        raise DataError(
            f"{row_name}: objects.bbox holds {brief(value)}; legal is a list of boxes of 4 numbers, or points of 2"
        )
    # Arrow makes every number of a column with one fraction a float: 135.0 is written as 135.
    return f"[{', '.join(str(int(n)) if n == int(n) else repr(n) for n in value)}]"
