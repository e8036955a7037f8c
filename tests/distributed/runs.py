"""Run as a script, `runs.py CONFIG`: a whole run in as many processes as were launched; and a mixture for such runs."""

from __future__ import annotations

import sys
from typing import Any

from PIL import Image
from transformers.utils import logging

from mm_grpo import GRPOConfig, GRPOTrainer
from mm_grpo.rollout import evaluate

SHAPES = {"task": "shapes", "image_size": 56, "max_objects": 2}


def source(kind: str, split: str, size: int, seed: int, **more: Any) -> dict[str, Any]:
    task = {**SHAPES, "kinds": [kind], "split": split, "size": size, "seed": seed}
    return {"path": task, "task": kind, **more}


MIXTURE: dict[str, Any] = {
    "data": {
        "train": [source("colour", "train", 7, 1, weight=2), source("count", "train", 30, 2)],
        "eval": [source("colour", "heldout", 3, 3), source("count", "heldout", 2, 4)],
    },
    "rewards": [
        {"name": "length", "max_length": 4, "when": {"task": "colour"}},
        {"name": "length", "as": "brief", "max_length": 2, "when": {"task": "count"}},
    ],
    "rollout": {"prompts_per_step": 6, "num_generations": 4, "max_completion_length": 6},
    "algorithm": {"credit": "pgpo"},
}


def partly_long() -> list[dict[str, Any]]:
    """Of six rows the third and the fourth have a prompt that is too long."""
    pictures = [Image.new("RGB", (56, 56), (40 * i, 9, 90)) for i in range(6)]
    prompts = ["what is it" * (99 if i in (2, 3) else 1) for i in range(6)]
    return [{"prompt": text, "image": image} for text, image in zip(prompts, pictures, strict=True)]


def films() -> list[dict[str, Any]]:
    """Rows of a video, of a text, and of an image and a video, in turn."""
    rows: list[dict[str, Any]] = []
    for i in range(9):
        frames = [Image.new("RGB", (56, 56), (25 * i, 30 * f, 90)) for f in range(4 + i % 2)]
        media = ({"video": frames}, {}, {"image": frames[0], "video": frames[1:]})[i % 3]
        rows.append({"prompt": f"what is it {i}", **media})
    return rows


def train(config: str) -> None:
    logging.disable_progress_bar()
    evaluate.LARGEST = 2  # rows at a time, so that an evaluation takes several
    GRPOTrainer(GRPOConfig.from_yaml(config), resume=True).train()


if __name__ == "__main__":
    train(sys.argv[1])
