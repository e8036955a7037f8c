"""Is GRPO worth more than more steps of a warm start? The recipe easy_vqa at equal CPU time, several arms and seeds.

    python examples/easy_vqa/prepare.py --wheel WHEEL --out OUT/data --train-rows 9600 --eval-rows 600
    OMP_NUM_THREADS=1 python benchmarks/studies/warm_or_rl.py OUT [--seeds 3] [--minutes 2.5] [--warm-steps 200]
    python benchmarks/studies/warm_or_rl.py OUT --table

Every arm has `--minutes` of CPU time for its calls of `warm` and `GRPOTrainer`, with reading rows and loading models;
evaluation and imports do not count. A seed's short warm start is made once, and counts in each arm that goes on from
it. GRPO ends after the step in which its time is spent. Warm starts have fixed numbers of steps: `--long-steps` is to
take as long, and the table has what it took. Each run is a process of its own and adds a line to OUT/runs.jsonl; a run
that has one is not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

WARM_RATE = 1e-3
GRPO = {"optim.learning_rate": 2e-4, "algorithm.entropy_coef": 0.01}
DEADLINE = 3600
"""Seconds that a run may take on a machine that other programs use as well."""
SHARED = "short warm start"
ARMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    SHARED: ("short", {}),
    "warm start only": ("long", {}),
    "warm start only, rate falls to 0": ("long", {"optim.lr_scheduler_type": "linear"}),
    "warm start, then GRPO": ("grpo", {}),
    "warm start, then GRPO with `credit: vppo`": ("grpo", {"algorithm.credit": "vppo"}),
    "warm start, then GRPO with `credit: pgpo`": ("grpo", {"algorithm.credit": "pgpo"}),
    "warm start, then GRPO, no entropy bonus": ("grpo", {"algorithm.entropy_coef": 0.0}),
    "GRPO only": ("base", {}),
}
"""Name -> how it is trained, and the fields that it changes."""


def run(args: argparse.Namespace, arm: str, seed: int) -> None:
    """Train and evaluate one arm with one seed; add its line to OUT/runs.jsonl."""
    import torch

    from mm_grpo import GRPOConfig, GRPOTrainer
    from mm_grpo.trained.evaluate import evaluate_config
    from mm_grpo.trained.source import model_to_evaluate
    from mm_grpo.trained.table import as_dict
    from mm_grpo.warm_start import warm

    torch.set_num_threads(1)
    way, changes = ARMS[arm]
    out, minutes = args.out, args.minutes
    folder = out / f"{[*ARMS].index(arm)}-{seed}"
    shared = next((r for r in read(out) if r["arm"] == SHARED and r["seed"] == seed), None)
    config = GRPOConfig.from_yaml("easy_vqa").with_values(
        {
            "data.train": str(out / "data/train.jsonl"), "data.eval": None, "run.eval_blind": None, "run.seed": seed,
            "run.dir": str(folder), "run.overwrite": True, "run.report": False, "run.save_every": 0,
            "run.expected_curve": None, "run.max_steps": 100_000, **GRPO, **changes,
        }
    )  # fmt: skip
    began, spent, steps = time.process_time(), 0.0, 0
    if way in ("short", "long"):
        steps = args.warm_steps if way == "short" else args.long_steps
        model = warm(config.with_values({"optim.learning_rate": WARM_RATE}), answer="answer", steps=steps)[
            "model"
        ]
    else:
        if way == "grpo":
            assert shared is not None
            spent, config = shared["minutes"], config.with_values({"model.path": shared["model"]})

        class StopWhenSpent:
            def on_step_end(self, trainer: GRPOTrainer, step: int) -> None:
                if spent + (time.process_time() - began) / 60 >= minutes:
                    trainer.stop("its CPU time is spent")

        trainer = GRPOTrainer(config, callbacks=[StopWhenSpent()])
        steps, model = trainer.train()["steps"], str(folder / "model")
        trainer.close()
    used = spent + (time.process_time() - began) / 60
    held = config.with_values(
        {"data.eval": {"heldout": str(out / "data/heldout.jsonl")}, "run.eval_blind": "shuffled"}
    )
    result = as_dict(evaluate_config(held, model_to_evaluate(held, model)))["sets"]["heldout"]
    record = {"arm": arm, "seed": seed, "minutes": used, "steps": steps, "model": model, **result}
    with (out / "runs.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(
        f"{arm}, seed {seed}: {steps} steps, {used:.2f} min, {result['score']:.3f}, {result['blind']['score']:.3f}"
    )


def read(out: Path) -> list[dict[str, Any]]:
    path = out / "runs.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return the tables of runs and of arms in Markdown; a spread is the standard deviation over seeds."""

    def between(value: float, interval: Sequence[float]) -> str:
        return f"{value:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"

    def over_seeds(values: Sequence[float]) -> str:
        return f"{fmean(values):.3f} ± {stdev(values):.3f}" if len(values) > 1 else f"{values[0]:.3f}"

    rows = [
        "| | seed | steps | CPU minutes | accuracy | images shuffled | gap |",
        "|---|---|---|---|---|---|---|",
    ]
    arms = ["| | seeds | CPU minutes | accuracy | images shuffled | gap |", "|---|---|---|---|---|---|"]
    for arm in ARMS:
        runs = sorted(
            (record for record in records if record["arm"] == arm), key=lambda record: record["seed"]
        )
        for one in runs:
            blind = one["blind"]
            rows.append(
                f"| {arm} | {one['seed']} | {one['steps']} | {one['minutes']:.2f} | "
                f"{between(one['score'], one['interval'])} | {between(blind['score'], blind['interval'])} | "
                f"{between(blind['gap'], blind['gap_interval'])} |"
            )
        if runs:
            values = [[r["score"] for r in runs], *([r["blind"][k] for r in runs] for k in ("score", "gap"))]
            minutes = fmean(r["minutes"] for r in runs)
            arms.append(f"| {arm} | {len(runs)} | {minutes:.2f} | {' | '.join(map(over_seeds, values))} |")
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return "\n".join([*arms, "", *rows, "", f"Versions: {versions}."])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=2.5, help="CPU minutes of an arm")
    parser.add_argument("--warm-steps", type=int, default=200, help="steps of the short warm start")
    parser.add_argument("--long-steps", type=int, default=430, help="steps of the long ones")
    parser.add_argument("--table", action="store_true", help="print the tables of the runs that were made")
    parser.add_argument("--one", nargs=2, metavar=("ARM", "SEED"), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.one:
        run(args, args.one[0], int(args.one[1]))
        return
    for seed in range(0 if args.table else args.seeds):
        for arm in ARMS:
            if any((record["arm"], record["seed"]) == (arm, seed) for record in read(args.out)):
                continue
            command = [sys.executable, __file__, *(arguments or sys.argv[1:]), "--one", arm, str(seed)]
            subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=DEADLINE)
    print(table(read(args.out)))


if __name__ == "__main__":
    main()
