"""A whole run on a GPU in bfloat16: engine and learner agree, updates happen, memory stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mm_grpo import GRPOConfig, GRPOTrainer
from mm_grpo.data.shapes import shapes_rows
from mm_grpo.preflight.out_of_memory import OutOfDeviceMemory

BASE = Path(__file__).parents[2] / "examples" / "shapes" / "base"


def brevity(completion: str) -> float:
    return -len(completion) / 10


def trainer_of(folder: Path, *callbacks: Any, **rollout: Any) -> GRPOTrainer:
    config = GRPOConfig.from_dict(
        {
            "model": {"path": str(BASE), "device": "cuda", "dtype": "bfloat16"},
            "rollout": {"prompts_per_step": 8, "num_generations": 8, "max_completion_length": 8, **rollout},
            "algorithm": {"beta": 0.05},
            "optim": {"learning_rate": 1e-4},
            "run": {"dir": str(folder / "r"), "max_steps": 4},
        }
    )
    rows = shapes_rows(split="train", size=32, seed=0)
    return GRPOTrainer(config, train=rows, rewards=[brevity], callbacks=callbacks)


def check_metrics(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "r" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    assert all(r["sampling/sampling_logp_difference/mean"] < 0.1 for r in rows)
    assert all(r["learner/update_norm"] > 0 for r in rows)
    return rows


def test_a_run_in_bfloat16(tmp_path: Path) -> None:
    torch.cuda.reset_peak_memory_stats()
    trainer_of(tmp_path).train()
    rows = check_metrics(tmp_path)
    assert rows[0]["kl"] < 1e-3 < rows[-1]["kl"] + 1e-3
    assert torch.cuda.max_memory_allocated() < 4e9


def test_a_card_that_is_full_in_an_update_ends_the_run_with_what_helps(tmp_path: Path) -> None:
    class Full:
        def on_rollouts(self, **values: Any) -> None:
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(1e-5)

    try:
        with pytest.raises(OutOfDeviceMemory, match=r"optim.max_tokens_per_pack"):
            trainer_of(tmp_path, Full()).train()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
