"""This checkout against another one: runs of the shapes demo by both, in turn, each in a process of its own.

    git worktree add ../before COMMIT
    OMP_NUM_THREADS=1 python benchmarks/compare.py ../before [--steps 30] [--rounds 3] [--json FILE]

Both run on this interpreter and its packages, with their own recipe, an evaluation before the first step and after the
last one, and a checkpoint after every step unless the fields behind say otherwise. Medians over the rounds after a warm
one, and `other / this`.

    first line     from the command to the first line that it prints
    first step     from the command to the line of step 1: imports, rows, weights, an evaluation, a step
    evaluation     `time/eval` of the last one, which finds everything warm
    step           from the line of one step to that of the next one: with its checkpoint and its log
    rollout, learner, sync     parts of it, the trainer's own `time/...`
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from threading import Timer
from typing import Any

from common import arguments, parse, positive, versions, write_json

HERE = Path(__file__).parents[1]
LIMIT = 600
"""Seconds that one run may take."""
PHASES = ("rollout", "learner", "sync")
PARTS = ("first line", "first step", "evaluation", "step", *PHASES)


def checkout(text: str) -> Path:
    path = Path(text).resolve()
    if not (path / "mm_grpo/cli/__main__.py").is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is no checkout of mm_grpo")
    return path


def lines_of(command: list[str], folder: Path) -> list[tuple[float, str]]:
    """What a run prints, with the seconds since its start."""
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONUNBUFFERED": "1"}
    start = time.perf_counter()
    with subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        watch = Timer(LIMIT, process.kill)
        watch.start()
        try:
            found = [(time.perf_counter() - start, line) for line in process.stdout]
        finally:
            watch.cancel()
    if process.returncode:
        said = "".join(line for _, line in found[-5:])
        raise RuntimeError(f"{folder}: the run ended with {process.returncode}: {said}")
    return found


def run(folder: Path, steps: int, overrides: list[str]) -> dict[str, float]:
    """One run of a checkout, by PARTS."""
    with tempfile.TemporaryDirectory() as results:
        command = [
            sys.executable,
            "-m",
            "mm_grpo.cli",
            "train",
            "examples/shapes/config.yaml",
            "run.save_every=1",
        ]
        fixed = [f"run.dir={results}/run", f"run.max_steps={steps}", f"run.eval_every={steps}"]
        lines = lines_of([*command, *overrides, *fixed], folder)
        logged = (Path(results) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, logged) if row["step"] > 0]
    ends = [seconds for seconds, line in lines if line.startswith("step ")]
    assert len(ends) == len(rows) == steps, f"{folder}: {len(ends)} lines of {steps} steps"
    gaps = [after - before for before, after in pairwise(ends[:-1])]  # the last step evaluates
    middle = {phase: statistics.median(row[f"time/{phase}"] for row in rows[1:-1]) for phase in PHASES}
    return {
        "first line": lines[0][0], "first step": ends[0], "evaluation": rows[-1]["time/eval"],
        "step": statistics.median(gaps), **middle,
    }  # fmt: skip


def measure(other: Path, steps: int, rounds: int, overrides: list[str]) -> list[dict[str, Any]]:
    sides = {"this": HERE, "other": other}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, folder in sides.items():
            one = run(folder, steps, overrides)
            if number:
                found[name].append(one)
    rows = []
    for part in PARTS:
        this, those = (statistics.median(one[part] for one in found[name]) for name in sides)
        rows.append({"part": part, "seconds_this": this, "seconds_other": those, "ratio": those / this})
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__, machine=False)
    parser.add_argument("other", type=checkout, help="the folder of the other checkout")
    parser.add_argument("overrides", nargs="*", help="fields of both runs, as for mm-grpo train")
    parser.add_argument("--steps", type=positive, default=30, help="steps of each run, at least 4")
    parser.add_argument("--rounds", type=positive, default=3, help="runs of each side after a warm one")
    args = parse(parser, argv)
    if args.steps < 4:
        parser.error("--steps must be at least 4: the first and the last are not counted")
    rows = measure(args.other, args.steps, args.rounds, args.overrides)
    print(f"{'part':<12}{'this, s':>10}{'other, s':>10}{'other / this':>14}")
    for row in rows:
        print(
            f"{row['part']:<12}{row['seconds_this']:>10.3f}{row['seconds_other']:>10.3f}{row['ratio']:>14.2f}"
        )
    write_json(args.json, versions() | {"steps": args.steps}, rows)


if __name__ == "__main__":
    main()
