"""What benchmarks of curves share: a base that is taught ways to answer, runs from it, their scores by steps."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoProcessor
from transformers import Qwen2_5_VLForConditionalGeneration as Model

from mm_grpo import GRPOConfig, GRPOTrainer

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples"))
import small_bases  # noqa: E402

BASE = ROOT / "examples/shapes/base"
BATCH, EVERY = 32, 10
Row = dict[str, Any]


def parser(about: str, *, lessons: int, steps: int) -> ArgumentParser:
    found = ArgumentParser(description=about.splitlines()[0])
    found.add_argument("out", type=Path)
    found.add_argument("--seeds", type=int, default=3)
    found.add_argument("--steps", type=int, default=steps)
    found.add_argument("--lessons", type=int, default=lessons, help="supervised steps of the base")
    return found


def make_base(out: Path, lessons: Sequence[Row], reply: Callable[[Row], str]) -> None:
    """Teach the base of the shapes recipe to answer rows with `reply`, BATCH of them a step."""
    torch.manual_seed(0)
    model, processor = Model.from_pretrained(BASE, dtype=torch.float32), AutoProcessor.from_pretrained(BASE)

    def batch_at(step: int) -> dict[str, torch.Tensor]:
        conversations: list[small_bases.Conversation] = []
        for row in lessons[BATCH * step : BATCH * (step + 1)]:
            messages = [*row["prompt"], {"role": "assistant", "content": reply(row)}]
            conversations.append((messages, [image.convert("RGB") for image in row["images"]], None))
        return small_bases.encode(processor, conversations)

    small_bases.train(model, batch_at, steps=len(lessons) // BATCH, rate=5e-4)
    model.save_pretrained(out)
    processor.save_pretrained(out)


def run(
    given: Namespace,
    name: str,
    seed: int,
    settings: Mapping[str, Any],
    *,
    train: Sequence[Row],
    held: Mapping[str, Sequence[Row]],
) -> list[dict[str, float]]:
    """The metrics of a run from OUT/base, by steps; `settings` are added to those that all runs share."""
    folder = given.out / f"{name}-{seed}".replace("/", "-")
    shared = {
        "model": {"path": str(given.out / "base"), "dtype": "float32"},
        "rollout": {"prompts_per_step": 16, "num_generations": 8, "max_completion_length": 6},
        "algorithm": {"entropy_coef": 0.02},
        "optim": {"learning_rate": 1e-4, "warmup_steps": 5},
        "run": {
            "dir": str(folder), "seed": seed, "max_steps": given.steps, "eval_every": EVERY, "overwrite": True,
            "report": False, "save_every": 0, "save_model": False,
        },
    }  # fmt: skip
    sections = {key: {**shared.get(key, {}), **settings.get(key, {})} for key in {**shared, **settings}}
    trainer = GRPOTrainer(
        GRPOConfig.from_dict(sections), train=list(train), eval=dict(held), rewards=["exact_match"]
    )
    trainer.train()
    trainer.close()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def compare(
    given: Namespace,
    names: Sequence[str],
    curve_of: Callable[[str, int], list[dict[str, float]]],
    file: str,
    kept: Sequence[str],
) -> None:
    """Run every name with every seed, and print the first metric of `kept` by steps; OUT/`file` has all of them.

    A run that the file has is not made again.
    """
    path = given.out / file
    found = json.loads(path.read_text()) if path.exists() else {}
    for seed in range(given.seeds):
        for name in names:
            if f"{name} {seed}" in found:
                continue
            log = curve_of(name, seed)
            found[f"{name} {seed}"] = [
                {"step": row["step"]} | {k: row[k] for k in kept if k in row} for row in log
            ]
            path.write_text(json.dumps(found))
            scores = [f"{row[kept[0]]:.2f}" for row in log if kept[0] in row]
            print(f"{name} seed {seed}: {kept[0]} {' '.join(scores)}", flush=True)
