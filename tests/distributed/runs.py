"""Run as a script, `runs.py CONFIG`: a whole run in as many processes as were launched."""

from __future__ import annotations

import sys
from pathlib import Path

from transformers.utils import logging

from mm_grpo import GRPOConfig, GRPOTrainer
from mm_grpo.rollout import evaluate


def train(config: str) -> None:
    logging.disable_progress_bar()
    evaluate.CHUNK = 1  # so that an evaluation of a few rows takes several, which grow
    GRPOTrainer(GRPOConfig.from_yaml(config), resume=True).train()


def rows_of(folder: Path) -> int:
    """Rows of the log; that of step 0 is the first evaluation."""
    file = folder / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    return sum(line.endswith(b"\n") and not line.startswith(b'{"step": 0,') for line in lines)


if __name__ == "__main__":
    train(sys.argv[1])
