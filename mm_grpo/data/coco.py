"""Instances as COCO writes them (`images`, `annotations`, `categories`) become rows: one for a category in an image.

A row has `image` (the file's name), `category`, `boxes` (all of that category in the image, [x0, y0, x1, y1] in pixels
of the file, as the rewards of boxes read them) and `box`, null where there are several. Other fields of the image
(`caption` of a RefCOCO that is written so) are columns. Images without annotations are no rows, nor is a category in an
image with a crowd of it (`iscrowd`), whose boxes are not all known.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mm_grpo.errors import DataError


def is_instances(found: Any) -> bool:
    """True for the object of a COCO file with boxes."""
    return isinstance(found, Mapping) and all(
        isinstance(found.get(key), list)
        and found[key]
        and isinstance(found[key][0], Mapping)
        and name in found[key][0]
        for key, name in (("images", "file_name"), ("annotations", "bbox"))
    )


def instance_rows(found: Mapping[str, Any], path: Path) -> list[dict[str, Any]]:
    """The rows of such a file, in the order of its annotations. DataError names the annotation that is wrong."""
    images = {image.get("id"): image for image in found["images"]}
    categories = {each.get("id"): each.get("name") for each in found.get("categories") or ()}
    rows: dict[tuple[Any, Any], dict[str, Any]] = {}
    crowds = set()
    for at, annotation in enumerate(found["annotations"]):
        key = (annotation.get("image_id"), annotation.get("category_id"))
        try:
            image = images[key[0]]
            x, y, width, height = annotation["bbox"]
            box = [x, y, x + width, y + height]
            name = categories[key[1]] if categories else None
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{path}: annotations[{at}] has no image, category or box of four numbers ({type(error).__name__}: "
                f"{error}); mend it"
            ) from None
        others = {field: value for field, value in image.items() if field not in ("id", "file_name")}
        row = others | {"image": image["file_name"], "category": name, "boxes": []}
        rows.setdefault(key, row)["boxes"].append(box)
        if annotation.get("iscrowd"):
            crowds.add(key)
    return [
        row | {"box": row["boxes"][0] if len(row["boxes"]) == 1 else None}
        for key, row in rows.items()
        if key not in crowds
    ]
