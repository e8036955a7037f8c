"""Rows of one step that rewards are called with, and what their functions log. Axis letters: n = P·G rows, flat."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mm_grpo.errors import RewardError
from mm_grpo.rewards.scores import score_of, shown

if TYPE_CHECKING:
    from mm_grpo.rewards.spec import RewardSpec
    from mm_grpo.types import Completion, Prompt

RESERVED = re.compile(
    "step|reward|reward_(std|min|max)|frac_reward_.*|num_tokens|loss|grad_norm|learning_rate|entropy|kl|epoch|step_time|"
    "rewards|time|advantages|completions|learner|clip_ratio|credit|twin_view|perception|sampling|served|sync|lora|images|"
    "sight|prompts|task|dynamic_sampling|turns|tools|eval|rollouts|tokens_per_second|log|start|run"
)
"""First parts of the names of the trainer's metrics (docs/metrics.md) and of the certificate's counts."""


@dataclass(frozen=True)
class TrainerState:
    """Progress of the run that rewards may read; `max_steps` is 0 when the run has no bound."""

    global_step: int
    max_steps: int = 0


@dataclass
class Batch:
    """Rows of one step: `prompts[i]` belongs to `completions[i]`, n of each."""

    prompts: Sequence[Prompt]
    completions: Sequence[Completion]
    columns: tuple[str, ...]
    """Columns of the dataset; a row that lacks one reads None."""
    conversational: bool
    state: TrainerState
    extra: dict[str, tuple[str, list[Any]]] = field(default_factory=dict)
    """By column of `log_extra`, the name of its reward and n values."""
    logged: dict[str, list[float]] = field(default_factory=dict)
    """Values of `log_metric` by metric."""

    def log_extra(self, spec: RewardSpec, rows: Sequence[int], column: str, values: Sequence[Any]) -> None:
        """Store a function's values for a column of the rollout log, one for each of the rows of its call."""
        if len(values) != len(rows):
            wrong = f"log_extra({column!r}) got {len(values)} values for {len(rows)} completions"
            raise RewardError(wrong)
        owner, column_values = self.extra.setdefault(column, (spec.name, [None] * len(self.completions)))
        if owner != spec.name:
            raise RewardError(f"log_extra({column!r}): reward {owner!r} logs that column too; rename it")
        for row, value in zip(rows, values, strict=True):
            column_values[row] = value

    def log_metric(self, name: str, value: Any) -> None:
        """Store a function's value for a metric of the step."""
        try:
            number = score_of(value)
        except ValueError:
            number = None
        if number is None:
            raise RewardError(f"log_metric({name!r}) got {shown(value)}; legal is a finite number")
        if RESERVED.fullmatch(first := name.partition("/")[0]):
            raise RewardError(f"log_metric({name!r}): '{first}' is the trainer's; log it as my/{name}")
        self.logged.setdefault(name, []).append(number)
