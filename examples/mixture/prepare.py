"""Brings the datasets of four recipes onto the disk, in the form that config.yaml reads.

    python examples/mixture/prepare.py --out data     # needs a network, some 3 GB of download

It runs the prepare.py of clevr_count, geometry3k, chartqa and clicking, which lie beside this recipe's folder,
each into a folder of `--out`. What one of them has written already stays.
"""

from __future__ import annotations

import argparse
import runpy
from collections.abc import Sequence
from pathlib import Path

from mm_grpo.data.recipe_prepare import exits
from mm_grpo.errors import DataError

PARTS = ("clevr_count", "geometry3k", "chartqa", "clicking")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=f"Prepare the rows of {', '.join(PARTS)}.")
    parser.add_argument("--out", type=Path, default=Path("data"))
    parser.add_argument(
        "--recipes", type=Path, default=Path(__file__).resolve().parents[1], help="where they lie"
    )
    parser.add_argument("--again", action="store_true", help="write files anew that are there")
    args = parser.parse_args(argv)
    for part in PARTS:
        script = args.recipes / part / "prepare.py"
        if not script.is_file():
            raise DataError(
                f"--recipes {args.recipes}: has no {part}/prepare.py; name the folder of the recipes"
            )
        runpy.run_path(str(script))["main"](["--out", str(args.out / part), *["--again"] * args.again])


if __name__ == "__main__":
    exits(main)
