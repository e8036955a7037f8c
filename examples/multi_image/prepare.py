"""Brings NLVR2 out of HuggingFaceM4/the_cauldron onto the disk, in the form that config.yaml reads.

    python examples/multi_image/prepare.py --out data/multi_image     # needs a network, some 11 GB of download

As published (config `nlvr2`), a row has `images` (two photographs) and `texts`, a list of {user, assistant,
source}: `user` asks in one of several wordings whether a sentence in quotes is true of the pair, and ends with
an instruction on a line of its own ("Answer yes or no."); `assistant` is "Yes." or "No.". There is one split,
`train`; its last 500 rows are kept for evaluation here. `to_rows` is the whole mapping: a row of ours for each
text.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mm_grpo.data.recipe_prepare import exits, prepare, published
from mm_grpo.errors import DataError

HUB, CONFIG = "HuggingFaceM4/the_cauldron", "nlvr2"
HELD_OUT = 500
INSTRUCTION = "Think first, inside <think> </think>. Then answer yes or no, inside <answer> </answer>."


def to_rows(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A published row as ours: for each text the question without its instruction, both pictures, and yes or no."""
    for text in row["texts"]:
        answer = text["assistant"].strip().rstrip(".").lower()
        if answer not in ("yes", "no"):
            raise DataError(
                f"{HUB}: the answer {text['assistant']!r} is neither yes nor no; the dataset has changed"
            )
        question = text["user"].strip().split("\n")[0].strip()
        yield {
            "prompt": f"{question} {INSTRUCTION}",
            "images": list(row["images"]),
            "answer": answer,
        }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=f"Write {HUB}:{CONFIG} as JSONL files with images beside them."
    )
    parser.add_argument("--out", type=Path, default=Path("data/multi_image"))
    parser.add_argument(
        "--rows", type=int, default=None, help="published rows to train on; all of them by default"
    )
    parser.add_argument("--again", action="store_true", help="write files anew that are there")
    args = parser.parse_args(argv)

    def rows(held_out: bool) -> Iterator[dict[str, Any]]:
        dataset = published(HUB, "train", CONFIG)
        train_size = len(dataset) - min(HELD_OUT, len(dataset) // 10 or 1)
        last = train_size if args.rows is None else min(args.rows, train_size)
        for index in range(train_size, len(dataset)) if held_out else range(last):
            yield from to_rows(dataset[index])

    prepare(args.out / "train.jsonl", lambda: rows(False), again=args.again)
    prepare(args.out / "eval.jsonl", lambda: rows(True), again=args.again)


if __name__ == "__main__":
    exits(main)
