"""What the shapes recipe learns through each engine, and which of those runs are the same run.

    OMP_NUM_THREADS=1 python benchmarks/served_runs.py float32 [--steps 50] [--json FILE]
    OMP_NUM_THREADS=1 python benchmarks/served_runs.py bfloat16

Two vLLM servers are started for all runs; each run is a process of its own, and sends them its weights. In float32:
every engine at `max_staleness: 0`, and lockstep with a server that is started together with the learner, and joins when
it is there. In
bfloat16: lockstep with 1 and 2, each twice. `same` is what two runs have in common, byte by byte:

    seeds          of every completion
    completions    texts and seeds
    all            rollouts/ (with log-probs and versions), metrics but for times, and the weights at the end

Each run has a KL term (beta 0.001), so that what it measures can be looked at, and 400 rows, so that the rows of the
first steps come again: `moved` is the share of those rows whose completions are others then.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from statistics import fmean, median
from typing import Any

from common import BASE, arguments, parse, positive, versions, write_json

from mm_grpo import GRPOConfig
from mm_grpo.cli.serve import server_settings
from mm_grpo.rollout.served.launch import ServerProcess, serve

DEADLINE = 1200.0
EVALUATED = 5


@dataclass(frozen=True)
class Run:
    """A run: its engine, the `servers` that it is given, what it is compared with, and whether a server joins late."""

    name: str
    engine: str = "vllm_server"
    servers: int = 2
    staleness: int = 0
    like: str = ""
    same: str = "all"
    joins: bool = False


RUNS = {
    "float32": (
        Run("transformers", "transformers", 0),
        Run("vllm", "vllm", 0, like="transformers", same="seeds"),
        Run("1 server", servers=1, like="vllm", same="completions"),
        Run("2 servers", like="1 server"),
        Run("lockstep, 1, 1 server", servers=1, staleness=1),
        Run("lockstep, 1, a second server joins", staleness=1, like="lockstep, 1, 1 server", joins=True),
    ),
    "bfloat16": (
        Run("lockstep, 1", staleness=1),
        Run("lockstep, 1, again", staleness=1, like="lockstep, 1"),
        Run("lockstep, 2", staleness=2),
        Run("lockstep, 2, again", staleness=2, like="lockstep, 2"),
    ),
}


def config_of(folder: Path, dtype: str, steps: int) -> GRPOConfig:
    values = GRPOConfig.from_yaml(BASE.parent / "config.yaml").model_dump()
    values["model"] |= {"path": str(BASE), "dtype": dtype, "device": "cpu"}
    values["data"]["train"]["size"] = 400
    values["data"]["eval"] = {"colour_and_shape": values["data"]["eval"]["colour_and_shape"] | {"size": 200}}
    values["algorithm"]["beta"] = 1e-3
    values["run"] |= {
        "dir": str(folder), "max_steps": steps, "eval_every": EVALUATED, "report": False, "eval_blind": None,
        "expected_curve": None, "sight_every": 0,
    }  # fmt: skip
    return GRPOConfig.from_dict(values)


def train(run: Run, config: Path, folder: Path, servers: Sequence[ServerProcess]) -> float:
    """Make a run; returns its seconds. A server that joins it is ended before, and started with the learner."""
    if run.joins:
        servers[1].stop()
    urls = ",".join(server.url for server in servers[: run.servers])
    fields = [f"rollout.engine={run.engine}", f"rollout.max_staleness={run.staleness}", f"run.dir={folder}"]
    if run.servers:
        fields.append(f"rollout.server.urls=[{urls}]")
    started = time.monotonic()
    log = folder.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "mm_grpo.cli", "train", str(config), *fields],
            stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        try:
            if run.joins:
                servers[1].start()
            code = process.wait(DEADLINE)
        finally:
            process.kill()
            process.wait()
    if code != 0:
        raise SystemExit(f"{run.name} ended with {code}:\n{log.read_text(errors='replace')[-3000:]}")
    return time.monotonic() - started


# what a run left -----------------------------------------------------------------------------


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def rollouts_of(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "rollouts").glob("step-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def fingerprint(folder: Path, what: str) -> str:
    """Equal for runs that have `what` in common."""
    rows = rollouts_of(folder)
    if what != "all":
        names = ("step", "slot", "seed") + (("completion",) if what == "completions" else ())
        return sha256(json.dumps([[row[name] for name in names] for row in rows]).encode()).hexdigest()
    found = sha256(json.dumps(rows).encode())
    for row in metrics_of(folder):
        kept = {k: v for k, v in row.items() if not k.startswith(("time/", "step_time", "served/"))}
        found.update(json.dumps(kept).encode())
    found.update((folder / "model" / "model.safetensors").read_bytes())
    return found.hexdigest()


def measured(run: Run, folder: Path, seconds: float) -> dict[str, Any]:
    rows = metrics_of(folder)
    score = {row["step"]: row[key] for row in rows if (key := "eval/colour_and_shape/accuracy") in row}
    steps = [row for row in rows if row["step"] > 0]
    of_row: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in rollouts_of(folder):
        of_row[row["uid"]][row["step"]].append(row["completion"])
    again = [list(by_step.values()) for by_step in of_row.values() if len(by_step) > 1]
    return {
        "run": run.name,
        "start": score[0],
        "end": score[max(score)],
        "90_after": next((step for step, value in sorted(score.items()) if value >= 0.9), None),
        "reward_std": fmean(row["reward_std"] for row in steps[:20]),
        "kl_max": max(row["kl"] for row in steps),
        "moved": fmean(first != later for first, *_, later in again) if again else None,
        "joined": next((row["step"] for row in steps if row.get("served/ready", 0) == 2), None)
        if run.joins
        else None,
        "gap_max": max(row["sync/logp_gap"] for row in steps if "sync/logp_gap" in row),
        "step": median(row["step_time"] for row in steps[1:]),
        "seconds": seconds,
    }


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__, machine=False)
    parser.add_argument("dtype", choices=sorted(RUNS))
    parser.add_argument("--steps", type=positive, default=50)
    parser.add_argument("--only", default="", metavar="TEXT", help="runs whose names begin so")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the runs there")
    args = parse(parser, argv, "vllm")
    found, runs = [], [run for run in RUNS[args.dtype] if run.name.startswith(args.only)]
    with tempfile.TemporaryDirectory() as name:
        root = args.keep or Path(name)
        root.mkdir(parents=True, exist_ok=True)
        file = root / "config.yaml"
        config = config_of(root / "unused", args.dtype, args.steps)
        config.save(file)
        with serve(server_settings(config, 2), log_folder=root / "servers") as servers:
            for number, run in enumerate(runs):
                folder = root / f"run-{number}"
                seconds = train(run, file, folder, servers)
                row = measured(run, folder, seconds)
                if run.like in [r.name for r in runs]:
                    other = root / f"run-{[r.name for r in runs].index(run.like)}"
                    row["same"] = (
                        f"{run.same} as {run.like}"
                        if fingerprint(folder, run.same) == fingerprint(other, run.same)
                        else f"NOT {run.same} as {run.like}"
                    )
                found.append(row)
                print(
                    json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}),
                    flush=True,
                )
    write_json(args.json, versions() | {"dtype": args.dtype, "steps": args.steps}, found)
    wrong = [row for row in found if row.get("same", "").startswith("NOT") or row["end"] < 0.9]
    if wrong or any(run.joins and not row["joined"] for run, row in zip(runs, found, strict=True)):
        raise SystemExit(f"{len(wrong)} of {len(found)} runs are not as they should be")


if __name__ == "__main__":
    main()
