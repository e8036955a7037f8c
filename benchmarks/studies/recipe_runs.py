"""Every recipe with every layer through `check --smoke` and `train --smoke`: writes benchmarks/results/recipes_runs.md.

    PYTHONPATH=tests python benchmarks/studies/recipe_runs.py [--layers lora,vllm] [RECIPE ...]     # some minutes

A cell is the seconds that the two took, or what they ended in; one that was written before stays until it is run again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import conftest  # noqa: F401  # the settings of tests, before anything else is imported

from mm_grpo import cli
from mm_grpo.config.shipped import find_layers, find_recipes

PAGE = Path(__file__).parents[1] / "results" / "recipes_runs.md"
DEADLINE = 300
HEAD = """# Every recipe with every layer

Written by `PYTHONPATH=tests python benchmarks/studies/recipe_runs.py`: `mm-grpo check RECIPE LAYER --smoke` and
`mm-grpo train RECIPE LAYER --smoke` on a CPU, without a network. A cell is the seconds of the two on a machine whose
two cores other programs used as well; those of `vllm` have a process and a start of vLLM of their own, all other layers
sample with the embedded engine. Such a run shows that the parts go together, not that anything is learned, and a CPU
cannot show whether a layer fits its GPU.

"""


def outcome(command: str, recipe: str, layer: str) -> str:
    """Seconds, or the exit code that a command ended in, with the end of what it said on the terminal."""
    arguments = [command, recipe, layer, "--smoke"]
    started, said = time.perf_counter(), io.StringIO()
    if layer == "vllm" and command == "train":
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
        program = [sys.executable, "-m", "mm_grpo.cli", *arguments]
        try:
            done = subprocess.run(
                program, env=env, capture_output=True, text=True, timeout=DEADLINE, check=False
            )
        except subprocess.TimeoutExpired:
            return f"over {DEADLINE} s"
        code, text = done.returncode, done.stderr
    else:
        sys.argv, code = ["mm-grpo", *arguments], 0
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                cli.main()
            except SystemExit as leaving:
                code = leaving.code if isinstance(leaving.code, int) else 1
        text = said.getvalue()
    if code == 0:
        return f"{time.perf_counter() - started:.0f}"
    print(recipe, layer, command, text[-600:], flush=True)
    return f"exit {code}"


def page(cells: dict[str, dict[str, str]]) -> str:
    layers = list(find_layers())
    lines = [f"| recipe | {' | '.join(layers)} |", "|---" * (len(layers) + 1) + "|"]
    for recipe in find_recipes():
        own = cells.get(recipe, {})
        lines.append(f"| {recipe} | {' | '.join(own.get(layer, 'not run') for layer in layers)} |")
    return HEAD + "\n".join(lines) + "\n"


def read_cells() -> dict[str, dict[str, str]]:
    if not PAGE.is_file():
        return {}
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in PAGE.read_text().splitlines()
        if "|" in line
    ]
    rows = [row for row in rows if len(row) > 2]
    return {row[0]: dict(zip(rows[0][1:], row[1:], strict=True)) for row in rows[2:]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Run every recipe with every layer.")
    parser.add_argument("--layers", type=lambda text: text.split(","), default=list(find_layers()))
    parser.add_argument("recipes", nargs="*", default=list(find_recipes()))
    args = parser.parse_args()
    cells = read_cells()
    os.chdir(tempfile.mkdtemp())
    for layer in args.layers:
        for recipe in args.recipes:
            ends = [outcome(command, recipe, layer) for command in ("check", "train")]
            cells.setdefault(recipe, {})[layer] = " + ".join(ends)
            PAGE.write_text(page(cells), encoding="utf-8")
            print(recipe, layer, *ends, flush=True)


if __name__ == "__main__":
    main()
