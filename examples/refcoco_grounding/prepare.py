"""Brings jxu124/refcoco onto the disk, in the form that config.yaml reads.

    python examples/refcoco_grounding/prepare.py --coco /data/coco --out data/refcoco_grounding   # needs a network

As published, a row is an object of a COCO photograph and holds no picture: `image_path`
("coco/train2014/COCO_train2014_000000581857.jpg"), `bbox` ([x0, y0, x1, y1] in pixels of that file) and `captions`
(what people said to point at the object), among others. The splits are `train` (42,404 rows), `validation`,
`test` and `testB`. The photographs come from http://images.cocodataset.org/zips/train2014.zip (13 GB); `--coco`
is the folder that `train2014/` lies in.
`to_rows` is the whole mapping: a row of ours for each caption.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mm_grpo.data.recipe_prepare import exits, prepare, published

HUB = "jxu124/refcoco"
FILES = {"train": "train.jsonl", "validation": "eval.jsonl"}
QUESTION = (
    "Where in the image is this: {caption}? Think first, inside <think> </think>. Then give the corners of its "
    "bounding box in pixels as [x0, y0, x1, y1], inside <answer> </answer>."
)


def to_rows(row: Mapping[str, Any], photographs: str | os.PathLike[str] = "coco") -> Iterator[dict[str, Any]]:
    """A published row as ours, one for each different caption.

    `photographs` is the folder of `train2014/`, as the written file shall name it. The box stays in pixels of
    the photograph: the reward brings it to the size that the model saw.
    """
    image = os.path.join(photographs, *Path(row["image_path"]).parts[-2:])
    for caption in dict.fromkeys(caption.strip() for caption in row["captions"]):
        if caption:
            prompt = QUESTION.format(caption=caption.rstrip(" ?.!"))
            yield {"prompt": prompt, "image": image, "box": list(row["bbox"])}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=f"Write {HUB} as JSONL files that name photographs of COCO.")
    parser.add_argument("--coco", type=Path, required=True, help="the folder that train2014/ lies in")
    parser.add_argument("--out", type=Path, default=Path("data/refcoco_grounding"))
    parser.add_argument("--eval-rows", type=int, default=500, help="rows to evaluate on, from the start")
    parser.add_argument("--again", action="store_true", help="write files anew that are there")
    args = parser.parse_args(argv)
    if not (args.coco / "train2014").is_dir():
        parser.error(
            f"--coco {args.coco}: there is no folder train2014 in it; unpack COCO's train2014.zip there"
        )
    photographs = os.path.relpath(args.coco, args.out)

    def rows(split: str) -> Iterator[dict[str, Any]]:
        task_rows = (task_row for row in published(HUB, split) for task_row in to_rows(row, photographs))
        return itertools.islice(task_rows, None if split == "train" else args.eval_rows)

    for split, name in FILES.items():
        prepare(args.out / name, lambda split=split: rows(split), again=args.again)


if __name__ == "__main__":
    exits(main)
