r"""Draws the fixtures of the recipes: a few rows of our own in the published form of each dataset.

    python examples/make_fixtures.py

For each recipe of a public dataset, `fixture/published.jsonl` holds rows as on the hub (with paths in place of
pictures), and `fixture/train.jsonl` holds the rows that the recipe's prepare.py makes from them. `mm-grpo check
RECIPE --smoke` and `mm-grpo train RECIPE --smoke` read the second; the tests hold it against the first. No
picture and no text is taken from a dataset. The fixture of mixture holds the rows of its recipes, each in a folder
of its name. The fixture of digits is drawn, because scikit-learn may not be installed.
"""

from __future__ import annotations

import json
import random
import runpy
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

sys.path.append(str(Path(__file__).parent / "digits"))
import digits as task

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
    """Draw two things apart on a plain ground; the row's box is around the ball. Boxes have fractions, as in COCO."""
    sizes = ((280, 210), (210, 280), (320, 240), (250, 187))
    for index, (width, height) in enumerate(sizes):
        rng = random.Random(f"refcoco/{index}")
        image = Image.new("RGB", (width, height), (150, 170, 150))
        colour, cube_colour = rng.sample(list(COLOURS), 2)
        first, second = _apart(2, width, height, rng)
        _thing(image, first, "ball", COLOURS[colour])
        _thing(image, second, "cube", COLOURS[cube_colour])
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


def chartqa() -> Iterator[dict[str, Any]]:
    """Bar charts with their values written on top, and questions about a number, a name and a year."""
    names = ("North", "South", "East", "West")
    for index in range(6):
        rng = random.Random(f"chart/{index}")
        values = rng.sample(range(10, 95), len(names))
        image = Image.new("RGB", (320, 240), "white")
        draw = ImageDraw.Draw(image)
        draw.text((110, 6), f"Visitors in {2010 + index}", fill="black")
        colours = rng.sample(list(COLOURS.values()), len(names))
        for place, (name, value, colour) in enumerate(zip(names, values, colours, strict=True)):
            x = 30 + 72 * place
            draw.rectangle((x, 210 - 2 * value, x + 45, 210), fill=colour)
            draw.text((x + 12, 196 - 2 * value), str(value), fill="black")
            draw.text((x + 8, 214), name, fill="black")
        query, label = (
            (f"How many visitors came from the {names[0].lower()}?", str(values[0])),
            ("Which bar is the tallest?", names[values.index(max(values))]),
            ("What year is the chart about?", str(2010 + index)),
        )[index % 3]
        yield {"image": image, "query": query, "label": [label], "human_or_machine": index % 2}


def docvqa() -> Iterator[dict[str, Any]]:
    """Letters of a few lines, and questions whose answers stand in them in one or two spellings."""
    people = ("Ada Berg", "Ivo Lund", "Mia Holm", "Jan Falk", "Eva Dahl", "Per Strand")
    for index, person in enumerate(people):
        day, total = f"March {index + 3}, 1987", f"${120 + 7 * index}.50"
        image = Image.new("RGB", (360, 260), (250, 250, 245))
        draw = ImageDraw.Draw(image)
        for line, text in enumerate(
            (f"TO: {person}", f"DATE: {day}", "Dear colleague,", f"the total is {total}.")
        ):
            draw.text((24, 24 + 40 * line), text, fill="black")
        question, answers = (
            ("To whom is the letter?", [person]),
            ("What is the date of the letter?", [day, day.replace(",", "")]),
            ("What is the total?", [total, total.removeprefix("$")]),
        )[index % 3]
        yield {
            "questionId": 100 + index,
            "question": question,
            "question_types": ["free_text"],
            "image": image,
            "docId": index,
            "ucsf_document_id": f"drawn{index:04d}",
            "ucsf_document_page_no": "1",
            "answers": answers,
        }


def multi_image() -> Iterator[dict[str, Any]]:
    """Pairs of pictures with things on grey, and a sentence about both that is true or false."""
    for index in range(6):
        rng = random.Random(f"pair/{index}")
        counts = rng.sample(range(1, 5), 2)
        images = []
        for count in counts:
            image = Image.new("RGB", (240, 180), (190, 190, 190))
            for box in _apart(count, 240, 180, rng):
                _thing(image, box, "ball", COLOURS["red"])
            images.append(image)
        more = "left" if (counts[0] > counts[1]) == (index % 2 == 0) else "right"
        user = f'For the images shown, is this caption "There are more balls in the {more} image." true?'
        texts = [
            {
                "user": f"{user}\nAnswer yes or no.",
                "assistant": "Yes." if index % 2 == 0 else "No.",
                "source": "NLVR2",
            }
        ]
        yield {"images": images, "texts": texts}


def clicking() -> Iterator[dict[str, Any]]:
    """Windows with three buttons; the row's target is one of them, as shares of the picture."""
    names = ("Open", "Save", "Print", "Close")
    for index in range(6):
        rng = random.Random(f"screen/{index}")
        width, height = ((480, 320), (320, 480))[index % 2]
        image = Image.new("RGB", (width, height), (225, 228, 232))
        draw = ImageDraw.Draw(image)
        draw.rectangle((0, 0, width, 24), fill=(60, 80, 120))
        labels = rng.sample(names, 3)
        boxes = [(20, 50 + 70 * place, 120 + rng.randrange(60), 90 + 70 * place) for place in range(3)]
        for name, box in zip(labels, boxes, strict=True):
            draw.rectangle(box, fill="white", outline="black")
            draw.text((box[0] + 12, box[1] + 14), name, fill="black")
        box = boxes[index % 3]
        yield {
            "file_name": f"drawn_{index}.png",
            "bbox": [box[0] / width, box[1] / height, box[2] / width, box[3] / height],
            "instruction": f"press {labels[index % 3].lower()}.",
            "data_type": "text",
            "data_source": "windows",
            "image": image,
        }


def easy_vqa() -> Iterator[dict[str, Any]]:
    """Draw one shape in the middle of 64 x 64 pixels; questions are about its colour, its kind and what is there."""
    shapes = (("ball", "circle"), ("cube", "rectangle"))
    for index, colour in enumerate(("red", "blue", "green", "brown", "yellow", "red")):
        shape, name = shapes[index % 2]
        image = Image.new("RGB", (64, 64), "white")
        _thing(image, (16, 16, 48, 48 - 8 * (index % 2)), shape, COLOURS[colour])
        question, answer = (
            ("what color is the shape?", colour),
            (f"what is the {colour} shape?", name),
            ("is there a triangle in the image?", "no"),
        )[index % 3]
        yield {"question": question, "answer": answer, "image": image}


def digits() -> None:
    """Pairs of drawn digits with their sum, as the task makes them for machines without scikit-learn."""
    folder = HERE / "digits" / "fixture"
    folder.mkdir(exist_ok=True)
    rows = []
    for index, (first, second) in enumerate(((3, 5), (7, 2), (9, 9), (0, 4), (6, 8), (1, 1))):
        paths = []
        for place, value in enumerate((first, second)):
            levels = Image.new("L", (8, 8), 0)
            ImageDraw.Draw(levels).text((1, -2), str(value), fill=task.LEVELS)
            paths.append(_save(task.render(levels.tobytes()), folder, f"{index}-{place}.png"))
        content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": task.QUESTION}]
        prompt = [{"role": "user", "content": content}]
        rows.append(
            {"prompt": prompt, "images": paths, "answer": str(first + second), "digits": f"{first} {second}"}
        )
    _lines(folder / "train.jsonl", rows)


def mixture() -> None:
    """Copy the rows of the four recipes that the mixture draws from, with their pictures."""
    folder = HERE / "mixture" / "fixture"
    shutil.rmtree(folder, ignore_errors=True)
    for recipe in ("clevr_count", "geometry3k", "chartqa", "clicking"):
        source = HERE / recipe / "fixture"
        shutil.copytree(source / "images", folder / recipe / "images")
        shutil.copyfile(source / "train.jsonl", folder / recipe / "train.jsonl")


def write(recipe: str, rows: Iterator[dict[str, Any]]) -> None:
    """Write the published rows of a recipe, their pictures, and the rows that prepare.py makes from them."""
    folder = HERE / recipe / "fixture"
    folder.mkdir(exist_ok=True)
    published = []
    for index, row in enumerate(rows):
        if "_picture" in row:  # the hub's row holds only the path of its picture
            place = folder / row["image_path"]
            place.parent.mkdir(parents=True, exist_ok=True)
            row.pop("_picture").save(place, quality=80)
        for column in {"image", "images"} & set(row):
            pictures = row[column] if column == "images" else [row[column]]
            file_names = [
                f"{index}-{at}.png" if len(pictures) > 1 else f"{index}.png" for at in range(len(pictures))
            ]
            names = [_save(picture, folder, name) for picture, name in zip(pictures, file_names, strict=True)]
            row[column] = names if column == "images" else names[0]
        published.append(row)
    _lines(folder / "published.jsonl", published)
    _lines(folder / "train.jsonl", mapped(recipe, published))


def mapped(recipe: str, published: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows that a recipe's prepare.py makes from published rows."""
    prepare = runpy.run_path(str(HERE / recipe / "prepare.py"), run_name="prepare")
    if "to_rows" in prepare:
        return [task_row for row in published for task_row in prepare["to_rows"](row)]
    return [prepare["to_row"](row) for row in published]


def _save(picture: Image.Image, folder: Path, name: str) -> str:
    (folder / "images").mkdir(exist_ok=True)
    picture.save(folder / "images" / name, optimize=True)
    return f"images/{name}"


def _lines(path: Path, rows: list[Mapping[str, Any]] | list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _apart(count: int, width: int, height: int, rng: random.Random) -> list[Box]:
    """Return `count` boxes that do not touch."""
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
    for make in (
        clevr_count,
        geometry3k,
        refcoco_grounding,
        chartqa,
        docvqa,
        multi_image,
        clicking,
        easy_vqa,
    ):
        write(make.__name__, make())
    digits()
    mixture()
