r"""Draws the fixtures of the recipes: a few rows of our own in the published form of each dataset.

    python examples/make_fixtures.py

Of each recipe, `fixture/published.jsonl` holds rows as the hub has them (with paths where the hub holds
pictures), and `fixture/train.jsonl` what the recipe's prepare.py makes of them. `mm-grpo check RECIPE --smoke`
and `mm-grpo train RECIPE --smoke` read the second; the tests hold it against the first. No picture and no text
is taken from a dataset.
"""

from __future__ import annotations

import json
import random
import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

HERE = Path(__file__).resolve().parent
COLOURS = {
    "grey": (87, 87, 87),
    "red": (173, 35, 35),
    "blue": (42, 75, 215),
    "green": (29, 105, 20),
    "brown": (129, 74, 25),
    "purple": (129, 38, 192),
    "cyan": (41, 208, 208),
    "yellow": (255, 238, 51),
}
Box = tuple[int, int, int, int]


def clevr_count() -> Iterator[dict[str, Any]]:
    """Scenes of three to eight things on grey, 480 x 320 with an alpha channel, as published."""
    for count in range(3, 9):
        rng = random.Random(f"clevr/{count}")
        image = Image.new("RGBA", (480, 320), (190, 190, 190, 255))
        for box in _apart(count, 480, 320, rng):
            _thing(image, box, rng.choice(("cube", "ball", "can")), rng.choice(list(COLOURS.values())))
        yield {
            "image": image,
            "problem": "How many different items are there in the image?",
            "solution": f"<answer> {count} </answer>",
        }


def geometry3k() -> Iterator[dict[str, Any]]:
    """Line drawings with the lengths written in, and answers as numbers and in LaTeX."""
    triangle = ((30, 150), (30, 30), (190, 150))
    problems: tuple[tuple[str, str, Any, tuple[tuple[int, int, str], ...]], ...] = (
        ("<image>Find x.", "5", triangle, ((12, 85, "3"), (100, 155, "4"), (118, 75, "x"))),
        ("<image>Find x.", r"5 \sqrt { 2 }", triangle, ((12, 85, "5"), (100, 155, "5"), (118, 75, "x"))),
        ("<image>Find the length of the hypotenuse.", "13", triangle, ((12, 85, "5"), (100, 155, "12"))),
        ("<image>Find the area of the square.", "36", "square", ((95, 155, "6"),)),
        ("<image>Find the circumference of the circle.", r"6 \pi", "circle", ((110, 78, "3"),)),
        (r"<image>Find the area of the shaded half.", r"\frac { 9 } { 2 } \pi", "half", ((110, 78, "3"),)),
    )
    for problem, answer, figure, labels in problems:
        image = Image.new("RGB", (220, 180), "white")
        draw = ImageDraw.Draw(image)
        if isinstance(figure, tuple):
            draw.polygon(figure, outline="black")
            draw.rectangle((30, 140, 40, 150), outline="black")
        elif figure == "square":
            draw.rectangle((40, 30, 160, 150), outline="black")
        else:
            draw.ellipse((40, 30, 160, 150), outline="black")
            draw.line((100, 90, 160, 90), fill="black")
            if figure == "half":
                draw.chord((40, 30, 160, 150), 0, 180, fill="lightgrey", outline="black")
        for x, y, text in labels:
            draw.text((x, y), text, fill="black")
        yield {"images": [image], "problem": problem, "answer": answer}


def refcoco_grounding() -> Iterator[dict[str, Any]]:
    """Two things apart on a plain ground; the row's box is that of one. Boxes have fractions, as COCO's do."""
    sizes = ((280, 210), (210, 280), (320, 240), (250, 187))
    for index, (width, height) in enumerate(sizes):
        rng = random.Random(f"refcoco/{index}")
        image = Image.new("RGB", (width, height), (150, 170, 150))
        colour, other = rng.sample(list(COLOURS), 2)
        first, second = _apart(2, width, height, rng)
        _thing(image, first, "ball", COLOURS[colour])
        _thing(image, second, "cube", COLOURS[other])
        name = f"COCO_train2014_{index:012d}.jpg"
        box = [first[0] + 0.25, first[1] + 0.5, first[2] + 0.75, first[3] + 0.0]
        info = {"file_name": name, "height": height, "width": width, "id": index}
        x, y, w, h = box[0], box[1], box[2] - box[0], box[3] - box[1]
        yield {
            "sent_ids": [2 * index, 2 * index + 1],
            "file_name": f"COCO_train2014_{index:012d}_{index}.jpg",
            "ann_id": index,
            "ref_id": index,
            "image_id": index,
            "split": "train",
            "category_id": 1,
            "raw_anns": json.dumps({"bbox": [x, y, w, h], "image_id": index, "id": index}),
            "raw_image_info": json.dumps(info),
            "image_path": f"coco/train2014/{name}",
            "bbox": box,
            "captions": [f"{colour} ball", f"the round {colour} one"],
            "global_image_id": f"coco.{index}",
            "anns_id": f"coco.{index}",
            "_picture": image,
        }


def write(recipe: str, rows: Iterator[dict[str, Any]]) -> None:
    """The published rows of a recipe with their pictures, and what prepare.py makes of them."""
    folder = HERE / recipe / "fixture"
    folder.mkdir(exist_ok=True)
    published = []
    for index, row in enumerate(rows):
        if "_picture" in row:  # the hub's row holds no picture, only where it lies
            place = folder / row["image_path"]
            place.parent.mkdir(parents=True, exist_ok=True)
            row.pop("_picture").save(place, quality=80)
        for column in {"image", "images"} & set(row):
            pictures = row[column] if column == "images" else [row[column]]
            names = [_save(picture, folder, f"{index}.png") for picture in pictures]
            row[column] = names if column == "images" else names[0]
        published.append(row)
    _lines(folder / "published.jsonl", published)
    _lines(folder / "train.jsonl", mapped(recipe, published))


def mapped(recipe: str, published: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a recipe's prepare.py makes of published rows."""
    prepare = runpy.run_path(str(HERE / recipe / "prepare.py"), run_name="prepare")
    if "to_rows" in prepare:
        return [ours for row in published for ours in prepare["to_rows"](row)]
    return [prepare["to_row"](row) for row in published]


def _save(picture: Image.Image, folder: Path, name: str) -> str:
    (folder / "images").mkdir(exist_ok=True)
    picture.save(folder / "images" / name, optimize=True)
    return f"images/{name}"


def _lines(path: Path, rows: list[Mapping[str, Any]] | list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _apart(count: int, width: int, height: int, rng: random.Random) -> list[Box]:
    """Boxes that do not touch."""
    boxes: list[Box] = []
    while len(boxes) < count:
        side = rng.randint(width // 10, width // 5)
        x, y = rng.randint(8, width - side - 8), rng.randint(8, height - side - 8)
        box = (x, y, x + side, y + side)
        if all(x > b[2] + 6 or b[0] > box[2] + 6 or y > b[3] + 6 or b[1] > box[3] + 6 for b in boxes):
            boxes.append(box)
    return boxes


def _thing(image: Image.Image, box: Box, shape: str, colour: tuple[int, int, int]) -> None:
    draw = ImageDraw.Draw(image)
    if shape == "ball":
        draw.ellipse(box, fill=colour)
    elif shape == "cube":
        draw.rectangle(box, fill=colour)
    else:
        draw.rounded_rectangle(box, radius=(box[2] - box[0]) // 4, fill=colour)


if __name__ == "__main__":
    for make in (clevr_count, geometry3k, refcoco_grounding):
        write(make.__name__, make())
