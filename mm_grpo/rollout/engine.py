"""What the trainer asks of a rollout engine, and how it asks.

A `Request` is one generation: a prompt, a seed and a sampling setting. Requests that share a prompt
object stand side by side, so that an engine can run the prompt once for all of them; the seeds stay
one per generation however the engine batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mm_grpo.errors import GuardStop

if TYPE_CHECKING:
    from torch import Tensor

    from mm_grpo.types import Completion, Prompt

Digest = Mapping[str, str]
"""`weights.digest` of every tensor as the engine received it, by name."""


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
    """An engine that samples completions under the learner's weights.

    It is awake once it is made. While the learner works it sleeps, and gives the device's memory back where it
    can; an engine that holds no memory of its own does nothing in `sleep` and `wake`.
    """

    @property
    def holds_weights(self) -> bool:
        """Whether the tensors of earlier updates are still there; if not, the next update brings every one."""
        ...

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion per request, in order. Media tokens are never sampled."""
        ...

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> Digest:
        """Take the learner's tensors as weights number `version`; returns the digests as received.

        `tensors` are whole layers (see `weights.unit_of`), those that changed since the last update.
        """
        ...

    def score(self, prompt: Prompt, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities [T] of a given completion, without media mask, at temperature 1."""
        ...

    def sleep(self) -> None:
        """Free the device for the learner."""
        ...

    def wake(self) -> None:
        """Take the device's memory back."""
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


def wrong_answer(requests: Sequence[Request], completions: Sequence[Completion], version: int) -> str | None:
    """What is wrong with an engine's answers to `requests` under weights number `version`, else None."""
    if len(completions) != len(requests):
        return f"the engine answered {len(requests)} requests with {len(completions)} completions"
    for request, completion in zip(requests, completions, strict=True):
        uid = request.prompt.uid
        if completion.seed != request.seed:
            return (
                f"{uid}: the engine was asked for seed {request.seed} and says that it used {completion.seed}; "
                "completions of one seed repeat each other. Every request must be sampled with its own seed"
            )
        if len(completion.logprobs) != len(completion.token_ids) or not completion.token_ids:
            return (
                f"{uid}: seed {request.seed} came back with {len(completion.token_ids)} tokens and "
                f"{len(completion.logprobs)} log-probs; every sampled token needs one, and there must be a token"
            )
        versions = versions_of(completion)
        if versions != (version,):
            return (
                f"{uid}: seed {request.seed} was sampled under weight version {_listed(versions)}, and the learner "
                f"is at version {version}: the engine did not take the last weight update"
            )
    return None


def require_answers(requests: Sequence[Request], completions: Sequence[Completion], version: int) -> None:
    """GuardStop unless each request was answered with its seed, under weights number `version`."""
    message = wrong_answer(requests, completions, version)
    if message is not None:
        raise GuardStop(message)


def versions_of(*completions: Completion) -> tuple[int, ...]:
    """The weight versions that completions were sampled under, each once, in order."""
    return tuple(sorted({version for c in completions for _, version in c.weight_versions}))


def _listed(versions: Sequence[int]) -> str:
    return " and ".join(map(str, versions)) or "none"
