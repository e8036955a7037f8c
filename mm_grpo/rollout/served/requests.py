"""Requests and answers between this house's words and a server's: prompts and seeds in, completions and scores out.

What is asked and checked is as in the in-process engine (`vllm/requests.py`); how it goes over the wire is
`protocol.py`'s affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from mm_grpo.errors import ConfigError, DataError, EngineError
from mm_grpo.rollout.served.client import ServerRefused
from mm_grpo.rollout.served.protocol import Answer, Work, key_refused
from mm_grpo.rollout.vllm.requests import check_ids, check_size, completion_of, sampling_params

if TYPE_CHECKING:
    from mm_grpo.processors.base import Processor
    from mm_grpo.rollout.engine import Request
    from mm_grpo.types import Completion, Prompt


class RequestFormat:
    """Requests of a run's processor, within the limits that servers were started with (`rollout.vllm`)."""

    def __init__(self, processor: Processor, max_model_len: int, max_images: int) -> None:
        self.processor, self.max_model_len, self.max_images = processor, max_model_len, max_images
        self.stops = sorted(processor.stop_token_ids)
        self.media = sorted(processor.media_token_ids)

    def sampled(self, group: Sequence[Request]) -> Work:
        """A group of requests."""
        prompt, sampling, seed = group[0].prompt, group[0].sampling, group[0].seed
        params = sampling_params(prompt, sampling, seed, len(group), self.stops)
        check_size(prompt, sampling.max_tokens, self.max_model_len, self.max_images)
        sent = prompt.engine_prompt
        return Work(prompt.uid, sent.token_ids, sent.images, params, self.media)

    def scored(self, prompt: Prompt, token_ids: Sequence[int]) -> Work:
        """A completion to be scored after its prompt."""
        check_size(prompt, len(token_ids) + 1, self.max_model_len, self.max_images)
        sent = prompt.engine_prompt
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        return Work(prompt.uid, (*sent.token_ids, *token_ids), sent.images, params, self.media)

    def completions(self, group: Sequence[Request], answer: Answer) -> list[Completion]:
        """One completion per request of the group. GuardStop where the server ran other ids than the learner's."""
        prompt = group[0].prompt
        check_ids(prompt, prompt.token_ids, answer.prompt_token_ids)
        if len(answer.sequences) != len(group):
            raise EngineError(
                f"{prompt.uid}: {answer.url} answered {len(group)} generations with {len(answer.sequences)}"
            )
        return [
            completion_of(
                request,
                self.processor,
                sampled.token_ids,
                sampled.logprobs,
                sampled.finish_reason,
                tuple((start, int(name.rpartition(":")[2])) for start, name in sampled.versions),
            )
            for request, sampled in zip(group, answer.sequences, strict=True)
        ]

    def scores(self, prompt: Prompt, token_ids: Sequence[int], answer: Answer) -> list[float]:
        """The log-probs [T] of the completion that was scored."""
        check_ids(prompt, (*prompt.token_ids, *token_ids), answer.prompt_token_ids)
        return [cast(float, x) for x in answer.prompt_logprobs[-len(token_ids) :]]


def raise_as_ours(error: BaseException, uid: str) -> None:
    """Raise what a request of a row ended with, in this house's errors."""
    if isinstance(error, ServerRefused):
        if error.status in (401, 403):
            raise ConfigError(key_refused(error.url, error.reason)) from error
        raise DataError(f"{uid}: vLLM refuses the prompt: {error}") from error
    raise error
