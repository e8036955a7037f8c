"""Finished runs of a tiny model whose best evaluation is not the last, with what the learner said after each step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers import tiny
from helpers.families import answers_of
from helpers.small_runs import HELDOUT, ROWS, config_for, vowels
from mm_grpo import GRPOTrainer
from mm_grpo.types import Prompt


@dataclass(frozen=True)
class Finished:
    """A run's folder, and what its trainer's learner said of a prompt with an image after each step."""

    root: Path
    trainer: GRPOTrainer
    prompt: Prompt
    answer: tuple[int, ...]
    scores: dict[int, list[float]]


class Steps:
    """Evaluations rise before that of step 2 and fall after; each step's log-probs are kept."""

    def __init__(self) -> None:
        self.bonus = 0.0
        self.scores: dict[int, list[float]] = {}
        self.prompt: Any = None
        self.answer: tuple[int, ...] = ()

    def on_step_end(self, trainer: GRPOTrainer, metrics: dict[str, Any]) -> None:
        if self.prompt is None:
            self.prompt = trainer.processor.prompt(tiny.sample("r", "what is it", (tiny.picture(1),)))
            self.answer = answers_of(trainer.processor, 1)[-1]
        self.bonus = 10.0 if not self.scores else -10.0
        (self.scores[len(self.scores) + 1],) = trainer.learner.score(self.prompt, [self.answer])


def finished(path: Path, root: Path, **changes: Any) -> Finished:
    steps = Steps()

    def score(completion: str) -> float:
        return vowels(completion) + steps.bonus

    config = config_for(
        path,
        root,
        **{
            "optim": {"learning_rate": 1e-2},
            "run": {"eval_every": 1, "save_every": 1, "keep_checkpoints": 1, "report": False},
            "data": {"system_prompt": "look well"},
            **changes,
        },
    )
    trainer = GRPOTrainer(config, train=ROWS, eval=HELDOUT, rewards=[score], callbacks=[steps])
    trainer.train()
    return Finished(root, trainer, steps.prompt, steps.answer, steps.scores)
