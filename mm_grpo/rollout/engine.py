"""What the trainer asks of a rollout engine, and how it asks.

A `Request` is one generation: a prompt, a seed and a sampling setting. Requests that share a prompt
object stand side by side, so that an engine can run the prompt once for all of them; the seeds stay
one per generation however the engine batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from mm_grpo.types import Completion, Prompt

Digest = Mapping[str, str]
"""`weight_sync.digest` of every tensor as the engine received it, by name."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Temperature 0 is greedy; truncation and penalties are for evaluation only."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0

    @property
    def truncated(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or bool(self.min_p) or self.repetition_penalty != 1.0


@dataclass(frozen=True)
class Request:
    """One generation: its prompt, its own seed and how to sample."""

    prompt: Prompt
    seed: int
    sampling: Sampling


class RolloutEngine(Protocol):
    """An engine that samples completions and follows the learner's weights."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion per request, in order. Media tokens are never sampled."""
        ...

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> Digest:
        """Take the learner's tensors as weights number `version`; returns the digests as received."""
        ...

    def score(self, prompt: Prompt, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities [T] of a given completion, without media mask, at temperature 1."""
        ...

    def close(self) -> None:
        """Free what the engine holds."""
        ...


def requests_for(
    prompts: Sequence[Prompt], seeds: Sequence[Sequence[int]], sampling: Sampling
) -> list[Request]:
    """Requests for P prompts with their seeds [P][G], prompt by prompt."""
    return [
        Request(prompt, seed, sampling)
        for prompt, group in zip(prompts, seeds, strict=True)
        for seed in group
    ]
