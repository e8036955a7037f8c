"""A learning rate at which the weights blow up ends in one message that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.small_runs import ROWS, config_for, vowels

from mm_grpo import GRPOTrainer
from mm_grpo.errors import GuardStop

OFF = {"update_happens": "off", "logp_gap": "off"}


@pytest.mark.parametrize(
    ("rate", "dtype", "guards"),
    [
        (1e3, "bfloat16", {}),  # every token has probability 1
        (1e15, "float32", OFF),  # logits are NaN, and the engine is to sample from them
    ],
)
def test_a_rate_that_is_far_too_large_stops_the_run_with_one_message(
    rate: float, dtype: str, guards: dict[str, str], models: dict[str, Path], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"model": {"dtype": dtype}, "run": {"max_steps": 5, "guards": guards}}
    config = config_for(models["qwen2_5_vl"], tmp_path / "run", optim={"learning_rate": rate}, **settings)
    with pytest.raises(GuardStop, match=r"lower optim\.learning_rate"):
        GRPOTrainer(config, train=ROWS, rewards=[vowels]).train()
