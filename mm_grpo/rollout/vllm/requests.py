"""Requests to vLLM and checks of its answers, the same for the engine in this process and for servers.

Groups of requests that one vLLM request stands for, its sampling parameters, the limits that a row has to fit, the ids
that were run, and completions made of what came back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from mm_grpo.errors import ConfigError, DataError, EngineError, GuardStop
from mm_grpo.types import Completion, FinishReason

if TYPE_CHECKING:
    from mm_grpo.processors.base import Processor
    from mm_grpo.rollout.engine import Request, Sampling
    from mm_grpo.types import Prompt

SEEDS = 1 << 32
"""vLLM's worker fails on seeds past 64 bits and CPU generators ignore those past 32; ours end there."""
TEMPERATURES = (0.01, 2.0)


def request_groups(requests: Sequence[Request]) -> list[list[Request]]:
    """Runs of requests that one vLLM request with n generations stands for."""
    groups: list[list[Request]] = []
    for request in requests:
        last = groups[-1][-1] if groups else None
        joined = (
            last is not None
            and last.prompt is request.prompt
            and last.sampling == request.sampling
            and last.seed + 1 == request.seed
            and request.sampling.temperature > 0
        )
        if joined:
            groups[-1].append(request)
        else:
            groups.append([request])
    return groups


def sampling_params(
    prompt: Prompt, sampling: Sampling, seed: int, count: int, stops: Sequence[int]
) -> dict[str, Any]:
    """vLLM's parameters for `count` generations from consecutive seeds; media tokens are not masked by these."""
    if not 0 <= seed <= SEEDS - count:
        raise ValueError(f"{prompt.uid}: seed {seed} is outside [0, 2^32 - {count}]")
    low, high = TEMPERATURES
    if sampling.temperature and not low <= sampling.temperature <= high:
        raise ConfigError(
            f"temperature = {sampling.temperature:g}: vLLM samples at 0, or from {low} to {high} (it raises "
            "smaller values without a word); set rollout.temperature or rollout.eval.temperature within that"
        )
    return {
        "n": count,  # generation i is seeded seed + i
        "seed": seed,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(stops),
        "logprobs": 0,
        "detokenize": False,
    }


def check_size(prompt: Prompt, room: int, max_model_len: int, max_images: int) -> None:
    """DataError for a prompt that leaves no `room`, in tokens, or has more images than an engine was started for."""
    length = len(prompt.token_ids)
    if length + room > max_model_len:
        raise DataError(
            f"{prompt.uid}: the prompt has {length} tokens and {room} more are asked for; "
            f"rollout.vllm.max_model_len = {max_model_len} allows {max_model_len} in all. Raise it, lower "
            "data.max_pixels or rollout.max_completion_length, or drop such rows with data.max_prompt_length and "
            "data.on_overlong=drop"
        )
    images, most = len(prompt.engine_prompt.images), max(1, max_images)
    if images > most:
        raise DataError(
            f"{prompt.uid}: the row has {images} images, and the engine was started for at most {most} in a "
            "prompt; raise rollout.vllm.max_images, or leave the row out"
        )


def check_ids(prompt: Prompt, expected: Sequence[int], got: Sequence[int]) -> None:
    """GuardStop where vLLM ran other ids than were expected."""
    if tuple(got) != tuple(expected):
        place = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), None)
        where = "at the end" if place is None else f"first at place {place}"
        raise GuardStop(
            f"{prompt.uid}: vLLM ran {len(got)} prompt tokens where the learner trains on {len(expected)}; they "
            f"differ {where}. Both must see the same image at the same size: check that nothing but mm_grpo "
            "resizes images, and that the engine's processor is the learner's"
        )


def completion_of(
    request: Request,
    processor: Processor,
    token_ids: tuple[int, ...],
    logprobs: tuple[float, ...],
    finish_reason: str | None,
    weight_versions: tuple[tuple[int, int], ...],
) -> Completion:
    """The completion of a request. EngineError where it did not end, GuardStop where log-probs are none."""
    uid = request.prompt.uid
    if finish_reason not in ("stop", "length"):
        raise EngineError(f"{uid}: vLLM ended seed {request.seed} with '{finish_reason}'")
    if len(logprobs) != len(token_ids) or not all(x <= 1e-4 for x in logprobs):
        raise GuardStop(
            f"{uid}: vLLM returned {len(logprobs)} log-probs for {len(token_ids)} tokens, or some that are not "
            "numbers below 0; its weights are damaged, or its version reports them otherwise"
        )
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        text=processor.decode(token_ids),
        finish_reason=cast(FinishReason, finish_reason),
        seed=request.seed,
        weight_versions=weight_versions,
    )
