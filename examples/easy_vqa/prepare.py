"""Brings easy-VQA onto the disk, in the form that config.yaml reads. It downloads nothing.

    pip download easy-vqa --no-deps                                          # the wheel, 3 MB
    python examples/easy_vqa/prepare.py --wheel easy_vqa-1.0-py3-none-any.whl --out data/easy_vqa

Without `--wheel` it reads the installed package `easy_vqa`. Both hold `data/train` (38,575 questions about 4,000
pictures of 64 x 64 pixels) and `data/test` (9,673 about 1,000 others): `questions.json`, a list of [question, answer,
id of the picture], and `images/ID.png`. `to_row` is the whole mapping.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mm_grpo.data.recipe_prepare import exits, prepare
from mm_grpo.errors import DataError

Read = Callable[[str], bytes]
"""Return the bytes of a file below `easy_vqa/`, named as "data/train/questions.json"."""

ASK = "get the wheel once with `pip download easy-vqa --no-deps`, and name the file with --wheel"


def to_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a published question as a row of ours: all three columns stay, only `question` is called prompt."""
    return {"prompt": row["question"], "image": row["image"], "answer": row["answer"]}


def reader(wheel: Path | None) -> Read:
    """Open the wheel, or find the installed package, whose code is not run.

    Raises:
        DataError: there is neither, or the file is not a zip archive.
    """
    if wheel is None:
        package = importlib.util.find_spec("easy_vqa")
        if package is None or package.origin is None:
            raise DataError(f"the package easy_vqa is not installed; {ASK}")
        folder = Path(package.origin).parent
        return lambda name: (folder / name).read_bytes()
    try:
        archive = zipfile.ZipFile(wheel)
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"--wheel {wheel}: cannot be read as a wheel ({error}); {ASK}") from None

    def read(name: str) -> bytes:
        member = archive.getinfo(f"easy_vqa/{name}")
        mode = member.external_attr >> 16
        if member.is_dir() or stat.S_IFMT(mode) not in (0, stat.S_IFREG):
            raise OSError("it is no regular file")
        return archive.read(member)

    return read


def questions(read: Read, split: str, count: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a split: all of them, or `count` that are spread evenly over it.

    A picture is looked up by its number, so no path of the archive is ever followed.

    Raises:
        DataError: a file is missing or damaged, or a row is not [question, answer, number].
    """
    name = f"data/{split}/questions.json"
    try:
        rows = json.loads(read(name))
        count = len(rows) if count is None else min(count, len(rows))
        for at in (index * len(rows) // count for index in range(count)):
            name = f"data/{split}/questions.json, row {at}"
            question, answer, picture = rows[at]
            if not (isinstance(question, str) and isinstance(answer, str) and type(picture) is int):
                raise ValueError(f"{rows[at]} is not [question, answer, number of the picture]")
            name = f"data/{split}/images/{picture}.png"
            yield to_row({"question": question, "answer": answer, "image": read(name)})
    except (OSError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"easy_vqa, {name}: {error}; {ASK}") from None


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write easy-VQA as JSONL files with images beside them.")
    parser.add_argument("--wheel", type=Path, help="the wheel of easy-vqa; without it, the installed package")
    parser.add_argument("--out", type=Path, default=Path("data/easy_vqa"))
    parser.add_argument(
        "--train-rows", type=int, help="rows to train on, evenly over the train split; default: all"
    )
    parser.add_argument(
        "--eval-rows", type=int, default=300, help="rows to evaluate on, evenly over the test split"
    )
    parser.add_argument("--again", action="store_true", help="write files anew that are there")
    args = parser.parse_args(argv)
    read = reader(args.wheel)
    prepare(args.out / "train.jsonl", lambda: questions(read, "train", args.train_rows), again=args.again)
    prepare(args.out / "heldout.jsonl", lambda: questions(read, "test", args.eval_rows), again=args.again)


if __name__ == "__main__":
    exits(main)
