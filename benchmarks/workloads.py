"""Training runs to measure on the shapes task: our trainer and TRL's, set up to do the same work.

Same rows in the same order, same model, P prompts and G completions of exactly T tokens: no token ends a
completion on either side, and neither side samples tokens of images. Rewards are 0 and 1 in turn, so each group
has a spread and nothing leaves the learner early. AdamW, learning rate and clipping are equal. Both write no
completions, checkpoints or reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import BASE, Machine, load_shapes_processor, make_model
from transformers import AutoModelForImageTextToText

from mm_grpo.data.shapes import shapes_rows

NEVER = 1 << 29
"""A token id that no model here has; named as the one that ends a completion."""
RATE = 1e-5


@dataclass(frozen=True)
class Workload:
    """P prompts with an image of `side` pixels, G completions of T tokens each, and a model's size or `base`."""

    prompts: int
    generations: int
    tokens: int
    side: int
    model: str


WORKLOADS = {
    "shapes": Workload(16, 8, 6, 84, "base"),
    "24M, 448 px": Workload(2, 8, 64, 448, "24m"),
    "24M, 448 px, 8 prompts": Workload(8, 8, 64, 448, "24m"),
    "tiny": Workload(2, 4, 3, 56, "tiny"),
}


def alternate(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """Rewards that give every group the same spread."""
    return [float(i % 2) for i in range(len(completions))]


def parts(work: Workload) -> tuple[Any, Any, list[dict[str, Any]]]:
    """Model, processor and rows of a workload, on the CPU in fp32."""
    processor = load_shapes_processor(work.side**2)
    if work.model == "base":
        model = AutoModelForImageTextToText.from_pretrained(BASE, dtype=torch.float32).train()
    else:
        model = make_model(processor, work.model, Machine(torch.device("cpu"), torch.float32))
    rows = shapes_rows(split="train", size=8 * work.prompts, image_size=work.side, max_objects=1)
    return model, processor, rows


def our_trainer(work: Workload, steps: int, folder: Path, callbacks: Sequence[Any]) -> Any:
    from mm_grpo import GRPOConfig, GRPOTrainer

    model, processor, rows = parts(work)
    processor.stop_token_ids = frozenset({NEVER})
    config = GRPOConfig.from_dict(
        {
            "model": {"path": str(BASE), "device": "cpu"},
            "data": {"shuffle": False},
            "rollout": {
                "prompts_per_step": work.prompts,
                "num_generations": work.generations,
                "max_completion_length": work.tokens,
            },
            "optim": {"learning_rate": RATE, "max_grad_norm": 1.0},
            "run": {
                "dir": str(folder / "ours"), "max_steps": steps,
                "report": False, "save_model": False, "save_every": 0, "sight_every": 0, "guards": {"logp_gap": "off"},
            },
        }
    )  # fmt: skip
    return GRPOTrainer(
        config, train=rows, rewards=[alternate], model=model, processor=processor, callbacks=callbacks
    )


def trl_trainer(work: Workload, steps: int, folder: Path, callbacks: Sequence[Any]) -> Any:
    import datasets
    from trl import GRPOConfig, GRPOTrainer

    model, processor, rows = parts(work)
    flat = [
        {
            "prompt": [{"role": "user", "content": row["prompt"][0]["content"][1]["text"]}],
            "images": row["images"],
        }
        for row in rows
    ]  # TRL puts the image before the text of such a message, as our rows do
    count = work.prompts * work.generations
    arguments = GRPOConfig(
        output_dir=str(folder / "trl"), use_cpu=True, bf16=False, max_steps=steps, seed=42,
        per_device_train_batch_size=count, gradient_accumulation_steps=1, num_generations=work.generations,
        max_completion_length=work.tokens, gradient_checkpointing=False, shuffle_dataset=False,
        learning_rate=RATE, lr_scheduler_type="constant", optim="adamw_torch", weight_decay=0.0,
        max_grad_norm=1.0, beta=0.0, loss_type="dapo", temperature=1.0, top_p=1.0, top_k=0,
        save_strategy="no", report_to="none", logging_steps=1, disable_tqdm=True,
        generation_kwargs={
            "eos_token_id": [NEVER], "suppress_tokens": sorted(processor.media_token_ids),
        },
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model, args=arguments, processing_class=processor.hf, reward_funcs=[alternate],
        train_dataset=datasets.Dataset.from_list(flat), callbacks=list(callbacks),
    )  # fmt: skip
    trainer.eos_token_ids = [NEVER]
    return trainer
