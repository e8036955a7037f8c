"""The twin view on images that the policy sees at too few pixels: held-out scores by steps, with and without it.

    python benchmarks/twin_view.py OUT [--seeds 3] [--steps 60] [--coefs 0 0.1 1]

The base is that of the shapes recipe, taught to name colours and shapes at 84 x 84 pixels; the policy sees 28 x 28 of
them (one token), the teacher all. OUT/twin_view.json has the curves. results/sight.md has what was seen.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoProcessor
from transformers import Qwen2_5_VLForConditionalGeneration as Model

from mm_grpo import GRPOConfig, GRPOTrainer
from mm_grpo.data.shapes import shapes_rows

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "examples"))
import small_bases  # noqa: E402

BASE = ROOT / "examples/shapes/base"
SEEN, ALL = 28 * 28, 84 * 84
"""Pixels of an image for the policy and for its teacher."""
BATCH, EVERY = 32, 10


def rows(split: Any, size: int, seed: int) -> list[dict[str, Any]]:
    """Questions for the colour or the shape of one object."""
    return list(shapes_rows(split=split, size=size, seed=seed, kinds=["colour", "shape"], max_objects=1))


def make_base(out: Path, steps: int) -> None:
    """Teach the base of the shapes recipe the answers, from images at their full size."""
    torch.manual_seed(0)
    model, processor = Model.from_pretrained(BASE, dtype=torch.float32), AutoProcessor.from_pretrained(BASE)
    lessons = rows("train", BATCH * steps, 9)

    def batch_at(step: int) -> dict[str, torch.Tensor]:
        conversations: list[small_bases.Conversation] = []
        for row in lessons[BATCH * step : BATCH * (step + 1)]:
            messages = [*row["prompt"], {"role": "assistant", "content": row["answer"]}]
            conversations.append((messages, [image.convert("RGB") for image in row["images"]], None))
        return small_bases.encode(processor, conversations)

    small_bases.train(model, batch_at, steps=steps, rate=5e-4)
    model.save_pretrained(out)
    processor.save_pretrained(out)


def run(base: Path, out: Path, coef: float, seed: int, steps: int) -> list[dict[str, float]]:
    """Scores on held-out rows, by steps, of a run whose twin view has this weight; 0 is plain GRPO."""
    twin = {"view": "high_resolution", "coef": coef, "max_pixels": ALL} if coef else None
    config = GRPOConfig.from_dict(
        {
            "model": {"path": str(base), "dtype": "float32"},
            "data": {"max_pixels": SEEN},
            "rollout": {"prompts_per_step": 16, "num_generations": 8, "max_completion_length": 6},
            "algorithm": {"entropy_coef": 0.02, "twin_view": twin},
            "optim": {"learning_rate": 1e-4, "warmup_steps": 5},
            "run": {
                "dir": str(out / f"{coef}-{seed}"), "seed": seed, "max_steps": steps, "eval_every": EVERY,
                "overwrite": True, "report": False, "save_every": 0, "save_model": False,
            },
        }
    )  # fmt: skip
    trainer = GRPOTrainer(
        config, train=rows("train", 4000, 1), eval=rows("heldout", 300, 2), rewards=["exact_match"]
    )
    trainer.train()
    trainer.close()
    log = [json.loads(line) for line in (out / f"{coef}-{seed}" / "metrics.jsonl").read_text().splitlines()]
    kept = ("eval/eval/score", "reward", "twin_view/kl", "twin_view/share")
    return [{"step": row["step"]} | {k: row[k] for k in kept if k in row} for row in log]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lessons", type=int, default=200, help="supervised steps of the base")
    parser.add_argument("--coefs", nargs="+", type=float, default=[0, 0.1, 1])
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    base, file = given.out / "base", given.out / "twin_view.json"
    if not base.exists():
        make_base(base, given.lessons)
    found = json.loads(file.read_text()) if file.exists() else {}
    for seed in range(given.seeds):
        for coef in given.coefs:
            curve = found[f"{coef} {seed}"] = run(base, given.out, coef, seed, given.steps)
            file.write_text(json.dumps(found))
            scores = [f"{row['eval/eval/score']:.2f}" for row in curve if "eval/eval/score" in row]
            print(f"coef {coef} seed {seed}: held-out {' '.join(scores)}", flush=True)


if __name__ == "__main__":
    main()
