"""Brings leonardPKU/clevr_cogen_a_train onto the disk, in the form that config.yaml reads.

    python examples/clevr_count/prepare.py --out data/clevr_count     # needs a network, a GB or so of disk

As published, a row has `image` (a PNG of 480 x 320), `problem` (a question) and `solution` (a number in
tags: "<answer> 3 </answer>"). There is one split, `train`, of about 70,000 rows; the last 500 of them are
kept for evaluation here. `to_row` is the whole mapping.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mm_grpo.data.jsonl import write_jsonl

HUB = "leonardPKU/clevr_cogen_a_train"
HELD_OUT = 500
INSTRUCTION = "Think first, inside <think> </think>. Then give the number alone, inside <answer> </answer>."


def to_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A published row as ours: the question with the instruction, the image, and the bare number as text."""
    found = re.search(r"<answer>\s*(.*?)\s*</answer>", row["solution"], re.DOTALL)
    answer = found.group(1) if found else row["solution"].strip()
    return {"prompt": f"{row['problem']} {INSTRUCTION}", "image": row["image"], "answer": answer}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=f"Write {HUB} as JSONL files with images beside them.")
    parser.add_argument("--out", type=Path, default=Path("data/clevr_count"))
    parser.add_argument("--rows", type=int, default=None, help="training rows; all of them by default")
    args = parser.parse_args(argv)
    from datasets import Image, load_dataset

    published = load_dataset(HUB, split="train").cast_column("image", Image(decode=False))
    held_out = min(HELD_OUT, len(published) // 10)
    kept = len(published) - held_out
    training = range(kept if args.rows is None else min(args.rows, kept))
    count = write_jsonl((to_row(published[i]) for i in training), args.out / "train.jsonl")
    held = range(kept, len(published))
    evaluation = write_jsonl((to_row(published[i]) for i in held), args.out / "eval.jsonl")
    print(f"{args.out}: {count} rows to train on, {evaluation} to evaluate on")


if __name__ == "__main__":
    main()
