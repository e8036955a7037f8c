"""Mistakes that type checkers find in users' programs: mypy asks for every `type: ignore` below. Nothing runs this."""

from mm_grpo import GRPOConfig, GRPOTrainer
from mm_grpo.config import ModelConfig, RolloutConfig, RunConfig


def slips() -> None:
    config = GRPOConfig(model=ModelConfig(path="x"))
    RolloutConfig(prompts_per_stp=4)  # type: ignore[call-arg]
    RunConfig(max_steps="20")  # type: ignore[arg-type]
    GRPOTrainer(config, train_dataset=[])  # type: ignore[call-arg]
