"""Credit by sight where a text gives the answer away: in most training rows a hint is right, in held-out rows never.

    python benchmarks/shortcut.py OUT [--seeds 3] [--steps 60] [--rules none pgpo vppo pgpo/masked]

The base is that of the shapes recipe, taught to answer in three ways: to copy the hint, to look at the image, and to
guess. In training rows copying is right in AGREES of the cases, looking always. Prints what each run scores on held-out
rows whose hint is wrong, by steps; OUT/shortcut.json has it with their sight. results/sight.md has what was seen.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoProcessor
from transformers import Qwen2_5_VLForConditionalGeneration as Model

from mm_grpo import GRPOConfig, GRPOTrainer
from mm_grpo.data.shapes import COLOURS, shapes_rows

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "examples"))
import small_bases  # noqa: E402

BASE = ROOT / "examples/shapes/base"
COPIES, LOOKS = 0.5, 0.15
"""Shares of the base's answers that copy the hint, and that name what is there; the others are guesses."""
AGREES = 0.9
BATCH, EVERY = 32, 10


def rows(split: Any, size: int, agrees: float, seed: int) -> list[dict[str, Any]]:
    """Questions for the colour of one object, with a hint that is right in the share `agrees` of them."""
    rng, found = random.Random(f"shortcut/{split}/{agrees}/{seed}"), []
    for row in shapes_rows(split=split, size=size, seed=seed, kinds=["colour"], max_objects=1):
        others = [colour for colour in COLOURS if colour != row["answer"]]
        hint = row["answer"] if rng.random() < agrees else rng.choice(others)
        (message,) = row["prompt"]
        image, text = message["content"]
        content = [image, {**text, "text": f"{text['text']} {hint}?"}]
        found.append({**row, "prompt": [{**message, "content": content}], "hint": hint})
    return found


def make_base(out: Path, steps: int) -> None:
    """Teach the base of the shapes recipe to copy, to look and to guess."""
    torch.manual_seed(0)
    model, processor = Model.from_pretrained(BASE, dtype=torch.float32), AutoProcessor.from_pretrained(BASE)
    lessons, rng = rows("train", BATCH * steps, 0.2, 9), random.Random(9)

    def batch_at(step: int) -> dict[str, torch.Tensor]:
        conversations: list[small_bases.Conversation] = []
        for row in lessons[BATCH * step : BATCH * (step + 1)]:
            drawn = rng.random()
            guess = rng.choice([*COLOURS])
            reply = row["hint"] if drawn < COPIES else row["answer"] if drawn < COPIES + LOOKS else guess
            messages = [*row["prompt"], {"role": "assistant", "content": reply}]
            conversations.append((messages, [image.convert("RGB") for image in row["images"]], None))
        return small_bases.encode(processor, conversations)

    small_bases.train(model, batch_at, steps=steps, rate=5e-4)
    model.save_pretrained(out)
    processor.save_pretrained(out)


def run(base: Path, out: Path, rule: str, seed: int, steps: int) -> list[dict[str, float]]:
    """Scores on held-out rows, by steps, of a run from `base` with this rule of credit, and its control behind a /."""
    name, _, control = rule.partition("/")
    credit = {} if name == "none" else {"credit": {"rule": name, "control": control or "other_image"}}
    folder = out / f"{name}-{control}-{seed}"
    config = GRPOConfig.from_dict(
        {
            "model": {"path": str(base), "dtype": "float32"},
            "rollout": {"prompts_per_step": 16, "num_generations": 8, "max_completion_length": 6},
            "algorithm": {"entropy_coef": 0.02, **credit},
            "optim": {"learning_rate": 1e-4, "warmup_steps": 5},
            "run": {
                "dir": str(folder), "seed": seed, "max_steps": steps, "eval_every": EVERY,
                "sight_every": EVERY, "overwrite": True, "report": False, "save_every": 0, "save_model": False,
                "guards": {"sight_lost": "off"},
            },
        }
    )  # fmt: skip
    held = {"wrong_hint": rows("heldout", 200, 0.0, 2), "right_hint": rows("heldout", 100, 1.0, 3)}
    trainer = GRPOTrainer(config, train=rows("train", 4000, AGREES, 1), eval=held, rewards=["exact_match"])
    trainer.train()
    trainer.close()
    log = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = ("eval/wrong_hint/score", "eval/right_hint/score", "sight/nats", "reward")
    return [{"step": row["step"]} | {k: row[k] for k in kept if k in row} for row in log]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lessons", type=int, default=300, help="supervised steps of the base")
    parser.add_argument("--rules", nargs="+", default=["none", "pgpo", "vppo"])
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    base, file = given.out / "base", given.out / "shortcut.json"
    if not base.exists():
        make_base(base, given.lessons)
    found = json.loads(file.read_text()) if file.exists() else {}
    for seed in range(given.seeds):
        for rule in given.rules:
            if f"{rule} {seed}" in found:
                continue
            curve = found[f"{rule} {seed}"] = run(base, given.out, rule, seed, given.steps)
            file.write_text(json.dumps(found))
            scores = [
                f"{row['eval/wrong_hint/score']:.2f}" for row in curve if "eval/wrong_hint/score" in row
            ]
            print(f"{rule} seed {seed}: wrong hint {' '.join(scores)}", flush=True)


if __name__ == "__main__":
    main()
