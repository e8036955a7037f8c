"""Brings HuggingFaceM4/DocumentVQA onto the disk, in the form that config.yaml reads.

    python examples/docvqa/prepare.py --out data/docvqa     # needs a network, some 10 GB of download

As published, a row has `image` (a page), `question`, `answers` (a list of texts), `question_types` and numbers
of the document and the page. The splits are `train` (39,463 rows), `validation` (5,349) and `test`, whose rows
have no answers. `to_row` is the whole mapping.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mm_grpo.data.recipe_prepare import exits, prepare, published

HUB = "HuggingFaceM4/DocumentVQA"
LIMITS = {"train": "rows", "validation": "eval_rows"}
INSTRUCTION = (
    "Think first, inside <think> </think>. Then give the words as they stand in the document, alone, inside "
    "<answer> </answer>."
)


def to_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A published row as ours: the question with the instruction, the page, and the answers."""
    return {
        "prompt": f"{row['question'].strip()} {INSTRUCTION}",
        "image": row["image"],
        "answer": list(row["answers"]),
        "question_types": list(row["question_types"]),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=f"Write {HUB} as JSONL files with images beside them.")
    parser.add_argument("--out", type=Path, default=Path("data/docvqa"))
    parser.add_argument("--rows", type=int, default=None, help="training rows; all of them by default")
    parser.add_argument("--eval-rows", type=int, default=1000, help="validation rows")
    parser.add_argument("--again", action="store_true", help="write files anew that are there")
    args = parser.parse_args(argv)
    for split, limit in LIMITS.items():
        max_rows = getattr(args, limit)
        prepare(
            args.out / f"{split}.jsonl",
            lambda split=split, max_rows=max_rows: itertools.islice(
                map(to_row, published(HUB, split)), max_rows
            ),
            again=args.again,
        )


if __name__ == "__main__":
    exits(main)
