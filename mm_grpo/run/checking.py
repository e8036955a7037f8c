"""`mm-grpo check`: everything a run would stumble over, found before a model is loaded.

Every row of every set is decoded and made into a prompt, every reward is resolved and its arguments
compared with the columns. All failing rows are listed, not only the first.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from mm_grpo.data.sets import load_eval, load_train
from mm_grpo.errors import UserError
from mm_grpo.processors.base import load_processor
from mm_grpo.rewards.scoring import Scorer
from mm_grpo.rollout.prompting import Prompter
from mm_grpo.rollout.seeds import SeedPlan

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig
    from mm_grpo.data.dataset import Dataset

SHOWN = 20
"""Failing rows listed per set; the others are counted."""


def check_config(config: GRPOConfig) -> bool:
    """Print what a run would load; True when every row can be used.

    Raises UserError for what is wrong with the config itself, the sources or the rewards.
    """
    console = Console()
    sets = {"train": load_train(config, verify=False), **load_eval(config, verify=False)}
    config.require_rewards()
    scorer = Scorer(config.rewards)
    for dataset in sets.values():
        scorer.check(dataset.columns)
    steps = config.run.max_steps or math.ceil(len(sets["train"]) / config.rollout.prompts_per_step)
    rollout = config.rollout
    SeedPlan(config.run.seed, rollout.prompts_per_step, rollout.num_generations, rollout.max_attempts, steps)
    processor = load_processor(
        config.model.path, min_pixels=config.data.min_pixels, max_pixels=config.data.max_pixels
    )
    prompter = Prompter(processor, config, context=None)

    table = Table(title="rows")
    for title in ("set", "rows", "usable", "images", "prompt tokens (min / mean / max)"):
        table.add_column(title, justify="left" if title == "set" else "right")
    failures: list[str] = []
    for name, dataset in sets.items():
        lengths, images, failed = _walk(dataset, prompter)
        spread = f"{min(lengths)} / {fmean(lengths):.0f} / {max(lengths)}" if lengths else "-"
        table.add_row(name, str(len(dataset)), str(len(lengths)), str(images), spread)
        failures += failed[:SHOWN]
        if len(failed) > SHOWN:
            failures.append(f"{name}: {len(failed) - SHOWN} more rows fail")
    console.print(table)
    console.print(
        "rewards: " + ", ".join(f"{s.name} (weight {s.weight:g})" for s in scorer.specs), highlight=False
    )
    console.print(config.batch_sentence(processes=1) + f", {steps} steps", highlight=False)
    for failure in failures:
        console.print(failure, style="red", highlight=False, markup=False)
    console.print("ok" if not failures else f"{len(failures)} problem(s)")
    return not failures


def _walk(dataset: Dataset, prompter: Prompter) -> tuple[list[int], int, list[str]]:
    """Prompt lengths and image count of the rows that can be used, and the messages of those that cannot."""
    lengths: list[int] = []
    images = 0
    failed: list[str] = []
    for index in range(len(dataset)):
        try:
            prompt = prompter.process(dataset.sample(index))
        except UserError as error:
            failed.append(str(error))
            continue
        lengths.append(len(prompt.token_ids))
        images += len(prompt.engine_prompt.images)
    return lengths, images, failed
