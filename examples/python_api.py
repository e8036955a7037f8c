"""GRPO from Python, with nothing to download: a small model learns to name colours.

    python examples/python_api.py

20 steps take about 10 s on two CPU cores. The mean reward on held-out rows goes from about 0.25 to above 0.9, and the
run leaves runs/python_api/report.html. docs/python.md explains each part.
"""

from pathlib import Path

from mm_grpo import GRPOConfig, GRPOTrainer, ModelConfig, OptimConfig, RolloutConfig, RunConfig
from mm_grpo.data.shapes import shapes_rows

# A row is a mapping: the prompt, its images, and columns of any name, which rewards can ask for.
train = shapes_rows(split="train", size=400, kinds=["colour"], max_objects=1)
heldout = shapes_rows(split="heldout", size=40, kinds=["colour"], max_objects=1)
print(train[0]["prompt"], "->", train[0]["answer"])

# Every field has a default but model.path; docs/config.md lists them.
config = GRPOConfig(
    model=ModelConfig(path=str(Path(__file__).parent / "shapes" / "base")),
    rollout=RolloutConfig(prompts_per_step=8, num_generations=8, max_completion_length=6),
    optim=OptimConfig(learning_rate=3e-4),
    run=RunConfig(dir="runs/python_api", max_steps=20, eval_every=10, overwrite=True),
)


class StopWhenRight:
    """Ends the run when the held-out rows are answered; it is called on the first process."""

    def on_step_end(self, step: int, metrics: dict[str, float]) -> None:
        print(f"step {step}: reward {metrics['reward']:.2f}, update {metrics['learner/update_norm']:.4f}")

    def on_evaluate(self, trainer: GRPOTrainer, step: int, metrics: dict[str, float]) -> None:
        if metrics["eval/eval/score"] >= 0.999:
            trainer.stop(f"every held-out row is right after step {step}")


# Rewards are names of those that ship (`mm-grpo rewards`), functions, or both; see own_reward.py.
trainer = GRPOTrainer(config, train=train, eval=heldout, rewards=["exact_match"], callbacks=[StopWhenRight()])
summary = trainer.train()
print(f"held-out reward {summary['score_before']:.2f} -> {summary['score_after']:.2f}")

# runs/python_api/model holds the weights and the processor, as transformers reads them; this is one more copy.
trainer.save("runs/python_api/copy")
