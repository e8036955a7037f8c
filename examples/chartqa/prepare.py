"""Brings HuggingFaceM4/ChartQA onto the disk, in the form that config.yaml reads.

    python examples/chartqa/prepare.py --out data/chartqa     # needs a network, a GB of download

As published, a row has `image`, `query` (a question), `label` (a list of answers, nearly always one) and
`human_or_machine` (0 or 1: who wrote the question). The splits are `train` (28,299 rows), `val` (1,920) and `test`
(2,500). `to_row` is the whole mapping.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mm_grpo.data.recipe_prepare import exits, prepare, published

HUB = "HuggingFaceM4/ChartQA"
SPLITS = ("train", "val", "test")
INSTRUCTION = (
    "Think first, inside <think> </think>. Then give the number or the words alone, inside "
    "<answer> </answer>."
)
WRITERS = ("human", "machine")


def to_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A published row as ours: the question with the instruction, the chart, and the answers."""
    return {
        "prompt": f"{row['query'].strip()} {INSTRUCTION}",
        "image": row["image"],
        "answer": [label.strip() for label in row["label"]],
        "written_by": WRITERS[row["human_or_machine"]],
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=f"Write {HUB} as JSONL files with images beside them.")
    parser.add_argument("--out", type=Path, default=Path("data/chartqa"))
    parser.add_argument("--again", action="store_true", help="write files anew that are there")
    args = parser.parse_args(argv)
    for split in SPLITS:
        file = args.out / f"{split}.jsonl"
        prepare(file, lambda split=split: map(to_row, published(HUB, split)), again=args.again)


if __name__ == "__main__":
    exits(main)
