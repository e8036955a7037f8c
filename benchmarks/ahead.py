"""What a step costs when the next one is sampled while the learner works: a vLLM server on one core, the learner on
another.

    OMP_NUM_THREADS=1 python benchmarks/ahead.py [--json FILE] [--tokens 64] [--steps 12]

The base model of the shapes recipe, whose ends of answers are made unlikely, so that every completion has about as many
tokens as it may have. Sizes are such that sampling and learning take about as long as each other. Runs in turn:
synchronous, and ahead with `max_staleness: 1`; medians of all steps but the first two.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import redirect_stdout
from os import devnull
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import BASE, arguments, load_shapes_processor, parse, positive, versions, write_json
from transformers import AutoModelForImageTextToText

from mm_grpo import GRPOConfig, GRPOTrainer
from mm_grpo.cli.serve import server_settings
from mm_grpo.rollout.served.launch import serve

ORDERS = ("synchronous", "ahead")
SHOWN = ("step_time", "time/rollout", "time/learner", "time/sync", "time/wait")


def long_winded(folder: Path) -> Path:
    """A copy of the base model that hardly ever ends an answer."""
    model: Any = AutoModelForImageTextToText.from_pretrained(BASE, dtype=torch.float32)
    processor = load_shapes_processor()
    with torch.no_grad():
        model.lm_head.weight[sorted(processor.stop_token_ids)] = 0.0
    model.save_pretrained(folder)
    processor.save(folder)
    return folder


def config_of(args: Any, model: Path, folder: Path, order: str, urls: list[str]) -> GRPOConfig:
    task = {
        "task": "shapes", "split": "train", "size": 400, "seed": 1, "kinds": ["colour"], "max_objects": 1,
        "image_size": args.image,
    }  # fmt: skip
    ahead = {} if order == "synchronous" else {"max_staleness": 1}
    batched = {"max_num_batched_tokens": args.batched_tokens} if args.batched_tokens else {}
    return GRPOConfig.from_dict(
        {
            "model": {"path": str(model), "device": "cpu", "dtype": "float32"},
            "data": {"train": task},
            "rollout": {
                "engine": "vllm_server", "server": {"urls": urls}, "prompts_per_step": args.prompts,
                "num_generations": args.generations, "max_completion_length": args.tokens, **ahead,
                "vllm": {"engine_kwargs": batched},
            },
            "rewards": [{"name": "length", "max_length": 2 * args.tokens}],
            "optim": {"learning_rate": 1e-6},
            "algorithm": {"num_iterations": args.iterations},
            "run": {
                "dir": str(folder), "max_steps": args.steps, "overwrite": True, "report": False, "save_every": 0,
                "save_model": False, "sight_every": 0,
                "guards": {"no_update": "warn", "clipped_lengths": "warn", "logp_gap": "off"},
            },
        }
    )  # fmt: skip


class Steps:
    """A callback that keeps the metrics of each step."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_step_end(self, metrics: dict[str, float]) -> None:
        self.metrics.append(dict(metrics))


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__, machine=False)
    parser.add_argument("--prompts", type=positive, default=8, help="rows of a step")
    parser.add_argument("--generations", type=positive, default=8, help="completions of a row")
    parser.add_argument("--image", type=positive, default=84, help="pixels of an image's side")
    parser.add_argument("--tokens", type=positive, default=64, help="most tokens of a completion")
    parser.add_argument("--steps", type=positive, default=12, help="steps of a run")
    parser.add_argument("--rounds", type=positive, default=1, help="runs of each order")
    parser.add_argument(
        "--iterations", type=positive, default=1, help="times that a step's completions are learned from"
    )
    parser.add_argument(
        "--batched-tokens", type=positive, help="tokens of a step of vLLM (max_num_batched_tokens)"
    )
    args = parse(parser, argv, "vllm")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        parser.error("needs two cores")
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        model = long_winded(root / "model")
        settings = server_settings(config_of(args, model, root / "r", "synchronous", ["unix:///unused"]), 1)
        os.sched_setaffinity(0, {cores[1]})  # what is started from here on stays there
        with serve(settings, log_folder=root / "logs") as servers:
            os.sched_setaffinity(0, {cores[0]})
            runs: dict[str, list[dict[str, float]]] = {order: [] for order in ORDERS}
            for _ in range(args.rounds):
                for order in ORDERS:
                    steps, config = Steps(), config_of(args, model, root / "r", order, [servers[0].url])
                    with open(devnull, "w") as nowhere, redirect_stdout(nowhere):
                        GRPOTrainer(config, callbacks=[steps]).train()
                    runs[order] += steps.metrics[2:]
    print(f"{'order':>14}" + "".join(f"{name.rpartition('/')[2]:>11}" for name in SHOWN) + f"{'ratio':>8}")
    for order in ORDERS:
        row = {name: median(m.get(name, 0.0) for m in runs[order]) for name in SHOWN}
        ratio = row["step_time"] / median(m["step_time"] for m in runs["synchronous"])
        found.append({"order": order, **row, "ratio": ratio})
        print(
            f"{order:>14}" + "".join(f"{row[name]:>11.2f}" for name in SHOWN) + f"{ratio:>8.2f}", flush=True
        )
    names = ("prompts", "generations", "tokens", "image", "iterations", "batched_tokens", "steps", "rounds")
    sizes = {name: getattr(args, name) for name in names}
    write_json(args.json, versions() | sizes, found)


if __name__ == "__main__":
    main()
