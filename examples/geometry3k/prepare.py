r"""Brings hiyouga/geometry3k onto the disk, in the form that config.yaml reads.

    python examples/geometry3k/prepare.py --out data/geometry3k     # needs a network, 60 MB

As published, a row has `images` (a list of one drawing), `problem` (a text in which `<image>` stands for the
drawing: "<image>Find x.") and `answer` (a number or a LaTeX expression: "5 \sqrt { 2 }"). The splits are
`train` (2,101 rows), `validation` (300) and `test` (601). `to_row` is the whole mapping.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mm_grpo.data.recipe_prepare import exits, prepare, published

HUB = "hiyouga/geometry3k"
SPLITS = ("train", "validation", "test")
INSTRUCTION = r"Think first, inside <think> </think>. Then give the final answer inside \boxed{}."


def to_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A published row as ours: the problem with the instruction, its drawing, and the answer as it is."""
    prompt = f"{row['problem'].strip()} {INSTRUCTION}"
    return {"prompt": prompt, "images": list(row["images"]), "answer": row["answer"].strip()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=f"Write {HUB} as JSONL files with images beside them.")
    parser.add_argument("--out", type=Path, default=Path("data/geometry3k"))
    parser.add_argument("--again", action="store_true", help="write files anew that are there")
    args = parser.parse_args(argv)
    for split in SPLITS:
        file = args.out / f"{split}.jsonl"
        prepare(file, lambda split=split: map(to_row, published(HUB, split)), again=args.again)


if __name__ == "__main__":
    exits(main)
