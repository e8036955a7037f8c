"""How long a step waits for slow rewards that begin while it samples, and for the same ones called after it.

    OMP_NUM_THREADS=2 python benchmarks/overlap.py [--json FILE] [--seconds 0.05] [--rounds 2]

Steps of 8 prompts with 8 completions each, whose lengths are ragged: each token ends one with a probability of 1/24, up
to 96 tokens. A Qwen2.5-VL of 24 M parameters with random weights, in fp32. A call of the reward takes 50 ms:

    waits      isolated, in 2 worker processes that sleep, as for a sandbox or a server
    computes   isolated, in 2 worker processes that compute, beside the engine on the same cores
    async      on the event loop, 2 calls at a time, as for a judge with a limit

Both sides run in turn; what is learned is asserted to be the same. `wait` is the metric `time/rewards`.
"""

from __future__ import annotations

import statistics
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from os import devnull
from pathlib import Path
from typing import Any
from unittest.mock import patch

import slow_rewards
import torch
from common import (
    BASE,
    SIZES,
    Machine,
    arguments,
    load_shapes_processor,
    make_model,
    parse,
    positive,
    versions,
    write_json,
)

from mm_grpo import GRPOConfig, GRPOTrainer
from mm_grpo.data.shapes import shapes_rows
from mm_grpo.rewards.scorer import Scorer

KINDS = ("waits", "computes", "async")
SIDES = ("after", "meanwhile")
ENDS = 24


def entry(kind: str, seconds: float) -> dict[str, Any]:
    """The reward as a config names it."""
    if kind == "async":
        return {"name": slow_rewards.awaits, "as": "slow", "max_concurrency": 2, "seconds": seconds}
    name = f"{slow_rewards.__file__}:{kind}"
    return {"name": name, "as": "slow", "isolated": True, "max_concurrency": 2, "seconds": seconds}


class Steps:
    """A callback that keeps the metrics of each step."""

    def __init__(self) -> None:
        self.metrics: list[Mapping[str, float]] = []

    def on_step_end(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        self.metrics.append(dict(metrics))


def measure(args: Any, kind: str, side: str, folder: Path) -> list[Mapping[str, float]]:
    """The metrics of the steps after the first."""
    processor = load_shapes_processor()
    processor.stop_token_ids = frozenset(range(ENDS, 1 << 20, ENDS))
    config = GRPOConfig.from_dict(
        {
            "model": {"path": str(BASE), "device": "cpu"},
            "rollout": {
                "prompts_per_step": args.prompts, "num_generations": args.generations,
                "max_completion_length": args.tokens,
            },
            "run": {
                "dir": str(folder), "max_steps": args.steps + 1, "overwrite": True,
                "report": False, "save_model": False, "guards": {"logp_gap": "off"}, "save_every": 0, "sight_every": 0,
            },
        }
    )  # fmt: skip
    torch.manual_seed(0)
    model = make_model(processor, args.size, Machine(torch.device("cpu"), torch.float32))
    rows = shapes_rows(split="train", size=args.prompts, seed=1, image_size=112)
    steps, streams = Steps(), Scorer.streams if side == "meanwhile" else False
    with (
        open(devnull, "w") as nowhere,
        redirect_stdout(nowhere),
        patch.object(Scorer, "streams", streams),
    ):
        GRPOTrainer(
            config,
            train=rows,
            rewards=[entry(kind, args.seconds)],
            model=model,
            processor=processor,
            callbacks=[steps],
        ).train()
    return steps.metrics[1:]


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__, machine=False)
    parser.add_argument("--prompts", type=positive, default=8, help="rows of a step")
    parser.add_argument("--generations", type=positive, default=8, help="completions of a row")
    parser.add_argument("--tokens", type=positive, default=96, help="most tokens of a completion")
    parser.add_argument("--size", default="24m", choices=sorted(SIZES), help="the model's")
    parser.add_argument("--seconds", type=float, default=0.05, help="what a call of the reward takes")
    parser.add_argument("--steps", type=positive, default=2, help="timed steps of a run")
    parser.add_argument("--rounds", type=positive, default=2, help="runs of each side")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    args = parse(parser, argv)
    warnings.filterwarnings("ignore")
    found = []
    print(f"{'reward':>10}{'called':>11}{'sampling s':>12}{'wait s':>9}{'step s':>9}")
    with tempfile.TemporaryDirectory() as name:
        for kind in args.kinds:
            runs: dict[str, list[Mapping[str, float]]] = {side: [] for side in SIDES}
            for _ in range(args.rounds):
                for side in SIDES:
                    runs[side] += measure(args, kind, side, Path(name))
            learned = {side: [m["learner/update_norm"] for m in runs[side]] for side in SIDES}
            assert learned["after"] == learned["meanwhile"], "when a reward is called changed an update"
            for side in SIDES:
                row = {"reward": kind, "called": side} | {
                    label: statistics.median(m[metric] for m in runs[side])
                    for label, metric in (
                        ("sampling", "time/rollout"),
                        ("wait", "time/rewards"),
                        ("step", "step_time"),
                    )
                }
                found.append(row)
                print(
                    f"{kind:>10}{side:>11}{row['sampling']:>12.2f}{row['wait']:>9.2f}{row['step']:>9.2f}",
                    flush=True,
                )
    sizes = {
        k: getattr(args, k)
        for k in ("prompts", "generations", "tokens", "size", "seconds", "steps", "rounds")
    }
    write_json(args.json, versions() | sizes, found)


if __name__ == "__main__":
    main()
