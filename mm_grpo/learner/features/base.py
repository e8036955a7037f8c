"""`LossFeature`, the base of everything that may be added to an update, and a pack as a feature's loss sees it.

Axes: [M], the tokens of a pack's own rows, in order; [K], the tokens of the rows that the feature added to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from mm_grpo.config import GRPOConfig
from mm_grpo.data.base import Rows
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.learner.alternate_prompts import AlternatePrompts
from mm_grpo.learner.forward import PackForward
from mm_grpo.learner.logprobs import PackResult
from mm_grpo.learner.loss import LossInputs, PackTokens
from mm_grpo.learner.minibatch import ByCompletion, LogProbs, Minibatch
from mm_grpo.learner.pack import Item, Pack
from mm_grpo.learner.step_report import LossStatistics
from mm_grpo.processors.base import Processor
from mm_grpo.types import Group, Prompt

PackRows = Sequence[Sequence[Item]]
R = TypeVar("R")


class FeatureLearner(Protocol):
    """The parts of the learner that a feature may use."""

    model: Any
    processor: Processor
    config: GRPOConfig
    ranks: Ranks
    alternates: dict[str, AlternatePrompts]
    """Alternate prompts of the step by name, which features share; dropped after the step."""

    def run(self, items: Sequence[Item]) -> tuple[ByCompletion, ByCompletion]:
        """Return log-probs [T] and entropies [T] of each completion, without gradients. Collective."""

    def run_pass(self, items: Sequence[Item], read: Callable[[PackForward, Iterable[Pack]], R]) -> R:
        """Return what `read` makes of the packs of `items`. Collective."""


@dataclass(frozen=True)
class FeaturePack:
    """One pack of an update after its forward, for the loss of one feature."""

    rows: PackRows
    """The pack's own rows."""
    inputs: LossInputs
    """Advantages and weights of all completions of the update."""
    tokens: PackTokens
    """The tokens [M] of `rows`; `logp` and `entropy` carry gradients."""
    added: PackResult
    """The result [K] for the rows that the feature added, with gradients."""
    kl: Tensor | None
    """KL [M] from `Minibatch.kl_states`, with gradients; None if no completion of the pack has some."""

    @property
    def weights(self) -> Tensor:
        """Weights [M] of the tokens in the loss."""
        return self.inputs.weights[self.tokens.completion_index].to(self.tokens.logp)

    def mask(self, holds: Callable[[Item], bool]) -> Tensor:
        """Return a mask [M] of the tokens of the items for which `holds` is true."""
        flags = [holds(item) for row in self.rows for item in row for _ in item.token_ids]
        return torch.tensor(flags, device=self.tokens.logp.device)


class LossFeature:
    """Addition to the updates of a run. The hooks stand in the order of a step; by default they change nothing.

    A collective hook is called on every process in every step, also on one without groups, and may run passes with
    `learner.run`.
    """

    extra_copies: ClassVar[int] = 0
    """Rows that `added_rows` adds to a pack for each of the pack's own, at most."""
    extra_passes: ClassVar[int] = 0
    """Passes without gradients that `begin_update` makes over the prompts of the update."""

    def __init__(self, learner: FeatureLearner) -> None:
        self.learner, self.algorithm = learner, learner.config.algorithm

    @classmethod
    def check_rows(cls, config: GRPOConfig, train: Rows, *, several_turns: bool) -> None:
        """Raise ConfigError if the training rows do not have what the feature needs; called before a model loads."""

    @property
    def needs_old_logprobs(self) -> bool:
        """True if `weigh` needs log-probs of the policy at the step's start for the first minibatch too."""
        return False

    def has_gradient(self, prompt: Prompt) -> bool:
        """Return True if tokens after `prompt` have a gradient from the feature at advantage 0 too."""
        return False

    def begin_step(self, groups: Sequence[Group], minibatches: Sequence[Minibatch]) -> None:
        """Prepare the step of this process's `groups`. Collective."""

    def weigh(self, minibatches: list[Minibatch], logprobs: LogProbs) -> list[Minibatch]:
        """Return the minibatches with other advantages, once old and reference log-probs are there. Collective."""
        return minibatches

    def begin_update(self, minibatch: Minibatch) -> Minibatch:
        """Return the minibatch of an update with what the feature adds to it. Collective."""
        return minibatch

    def added_rows(self, rows: PackRows) -> PackRows:
        """Return rows to add to the pack of `rows`."""
        return ()

    def loss(self, pack: FeaturePack, statistics: LossStatistics) -> Tensor | None:
        """Return the share of one pack in the feature's loss, a scalar, or None.

        Sums for `metrics` are added to `statistics`. Divide by nothing that depends on the pack: use the weights.
        """
        return None

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the step's metrics from the sums of `statistics` over all processes. Drop what the step kept."""
        return {}
