"""Requests to vLLM and checks of its answers for the engine in this process and for servers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from mm_grpo.errors import ConfigError, DataError, EngineError, GuardStop
from mm_grpo.processors.base import Processor
from mm_grpo.processors.video_input import frames_array, video_metadata
from mm_grpo.rollout.engine import Follows, Request, RequestStream, Sampling
from mm_grpo.types import Completion, FinishReason, Medium, Prompt, split_media

SEEDS = 1 << 32
"""vLLM's worker fails on seeds past 64 bits, and CPU generators ignore bits past 32."""
TEMPERATURES = (0.01, 2.0)


@dataclass(frozen=True)
class EngineRequest:
    """Request with collapsed ids and media, and vLLM's sampling parameters for its `n` generations."""

    uid: str
    """Name of the row in messages."""
    token_ids: Sequence[int]
    media: Sequence[Medium]
    params: Mapping[str, Any]

    @property
    def sequences(self) -> int:
        return int(self.params.get("n", 1))


@dataclass(frozen=True)
class Sampled:
    """A sampled sequence in vLLM's answer."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str | None


@dataclass(frozen=True)
class EngineAnswer:
    """vLLM's answer to one `EngineRequest`."""

    prompt_token_ids: tuple[int, ...]
    """The ids that it ran."""
    sequences: tuple[Sampled, ...]
    """By generation."""
    prompt_logprobs: Sequence[float | None] = ()
    url: str = ""
    """The server that answered."""
    weights: str = ""
    """The server's name of the weights that it sampled under."""


class RequestFormat:
    """Maker of requests, within the limits that vLLM was started with, and of completions and scores from answers.

    `max_media` are the most media of a prompt by kind, `mask` is a logit bias against media tokens, `params` join those
    of each request, `version` numbers the weights.
    """

    def __init__(
        self,
        processor: Processor,
        max_model_len: int,
        max_media: Mapping[str, int],
        *,
        mask: Mapping[Any, float],
        params: Mapping[str, Any],
        version: Callable[[], int],
    ) -> None:
        self.processor, self.max_model_len, self.max_media = processor, max_model_len, max_media
        self.mask, self.params, self.version = mask, params, version
        self.stops = sorted(processor.stop_token_ids)

    def sampled(self, group: Sequence[Request]) -> EngineRequest:
        """Make the request that samples a group (`request_groups`)."""
        prompt, sampling, seed = group[0].prompt, group[0].sampling, group[0].seed
        params = sampling_params(prompt, sampling, seed, len(group), self.stops)
        params |= {"logit_bias": self.mask, **self.params}
        check_size(prompt, sampling.max_tokens, self.max_model_len, self.max_media)
        return EngineRequest(prompt.uid, prompt.engine_prompt.token_ids, prompt.engine_prompt.media, params)

    def scored(self, prompt: Prompt, token_ids: Sequence[int]) -> EngineRequest:
        """Make the request that scores a completion after its prompt: no mask, temperature 1."""
        check_size(prompt, len(token_ids) + 1, self.max_model_len, self.max_media)
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, **self.params}
        ids = (*prompt.engine_prompt.token_ids, *token_ids)
        return EngineRequest(prompt.uid, ids, prompt.engine_prompt.media, params)

    def completions(self, group: Sequence[Request], answer: EngineAnswer) -> list[Completion]:
        """Return one completion per request of the group. GuardStop if vLLM ran other ids than the learner's."""
        prompt = group[0].prompt
        check_ids(prompt, prompt.token_ids, answer.prompt_token_ids)
        if len(answer.sequences) != len(group):
            raise EngineError(
                f"{prompt.uid}: {answer.url or 'vLLM'} answered {len(group)} generations with "
                f"{len(answer.sequences)}"
            )
        pairs = zip(group, answer.sequences, strict=True)
        return [completion_of(request, self.processor, sampled, self.version()) for request, sampled in pairs]

    def scores(self, prompt: Prompt, token_ids: Sequence[int], answer: EngineAnswer) -> list[float]:
        """Return the log-probs [T] of a completion that was scored."""
        check_ids(prompt, (*prompt.token_ids, *token_ids), answer.prompt_token_ids)
        return [cast(float, x) for x in answer.prompt_logprobs[-len(token_ids) :]]


class GroupStream(RequestStream):
    """Base of streams that send neighbours of one prompt with consecutive seeds as one; they are answered together."""

    def __init__(self, form: RequestFormat) -> None:
        self.form = form
        # by the key that `send` returned: first number and requests of a group
        self.running: dict[Any, tuple[int, Sequence[Request]]] = {}
        self._count = 0

    @abstractmethod
    def send(self, request: EngineRequest) -> Any:
        """Send a request, and return a key by which its answer is known."""

    @property
    def unfinished(self) -> int:
        return sum(len(group) for _, group in self.running.values())

    def add_request(self, request: Request, follows: Follows | None = None) -> int:
        return self.add_group([request])[0]

    def add_group(self, requests: Sequence[Request]) -> list[int]:
        start = self._count
        for group in request_groups(requests):
            self.running[self.send(self.form.sampled(group))] = self._count, group
            self._count += len(group)
        return list(range(start, self._count))

    def finish(self, key: Any, answer: EngineAnswer) -> list[tuple[int, Completion]]:
        """Return numbers and completions of an answered group."""
        first, group = self.running.pop(key)
        return list(enumerate(self.form.completions(group, answer), first))


def request_groups(requests: Sequence[Request]) -> list[list[Request]]:
    """Split requests into runs that one vLLM request with n generations can stand for."""
    groups: list[list[Request]] = []
    for request in requests:
        last = groups[-1][-1] if groups else None
        if (
            last is not None
            and last.prompt is request.prompt
            and last.sampling == request.sampling
            and last.seed + 1 == request.seed
            and request.sampling.temperature > 0
        ):
            groups[-1].append(request)
        else:
            groups.append([request])
    return groups


def sampling_params(
    prompt: Prompt, sampling: Sampling, seed: int, count: int, stops: Sequence[int]
) -> dict[str, Any]:
    """Return vLLM's parameters for `count` generations from consecutive seeds, without the mask of media tokens."""
    if not 0 <= seed <= SEEDS - count:
        raise ValueError(f"{prompt.uid}: seed {seed} is outside [0, 2^32 - {count}]")
    low, high = TEMPERATURES
    if sampling.temperature and not low <= sampling.temperature <= high:
        raise ConfigError(
            f"temperature = {sampling.temperature:g}: vLLM samples at 0, or from {low} to {high} (it silently raises "
            "smaller values); set rollout.temperature or rollout.eval.temperature within that"
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


def multi_modal_data(media: Sequence[Medium]) -> dict[str, list[Any]]:
    """Return media as vLLM takes them in process: by kind, a video with metadata about its frames."""
    images, videos = split_media(media)
    clips = [(frames_array(video), {**video_metadata(video), "do_sample_frames": False}) for video in videos]
    return {kind: items for kind, items in (("image", list(images)), ("video", clips)) if items}


def check_size(prompt: Prompt, room: int, max_model_len: int, max_media: Mapping[str, int]) -> None:
    """Raise DataError if a prompt leaves no `room`, in tokens, or has more media than the engine takes."""
    length = len(prompt.token_ids)
    if length + room > max_model_len:
        raise DataError(
            f"{prompt.uid}: the prompt has {length} tokens and {room} more are asked for; "
            f"rollout.vllm.max_model_len = {max_model_len} allows {max_model_len} in all. Raise it, lower "
            "data.max_pixels or rollout.max_completion_length, or drop such rows with data.max_prompt_length and "
            "data.on_overlong=drop"
        )
    counts = {"image": len(prompt.engine_prompt.images), "video": len(prompt.engine_prompt.videos)}
    for kind, count in counts.items():
        if count > max_media.get(kind, 0):
            raise DataError(
                f"{prompt.uid}: the row has {count} {kind}s, and the engine was started for at most "
                f"{max_media.get(kind, 0)} in a prompt; raise rollout.vllm.max_{kind}s, or leave the row out"
            )


def check_ids(prompt: Prompt, expected: Sequence[int], actual: Sequence[int]) -> None:
    """Raise GuardStop if vLLM ran other ids than expected."""
    if tuple(actual) != tuple(expected):
        place = next((i for i, (a, b) in enumerate(zip(actual, expected, strict=False)) if a != b), None)
        where = "at the end" if place is None else f"first at place {place}"
        raise GuardStop(
            f"{prompt.uid}: vLLM ran {len(actual)} prompt tokens where the learner trains on {len(expected)}; they "
            f"differ {where}. Both must see the same image at the same size: check that nothing but mm_grpo "
            "resizes images, and that the engine's processor is the learner's"
        )


def completion_of(request: Request, processor: Processor, sampled: Sampled, version: int) -> Completion:
    """Return a completion. EngineError if unfinished, GuardStop if a log-prob is missing, not finite or positive."""
    uid, logprobs = request.prompt.uid, sampled.logprobs
    if sampled.finish_reason not in ("stop", "length"):
        raise EngineError(f"{uid}: vLLM ended seed {request.seed} with '{sampled.finish_reason}'")
    # NaN is not <= either
    if len(logprobs) != len(sampled.token_ids) or not all(x <= 1e-4 for x in logprobs):
        raise GuardStop(
            f"{uid}: vLLM returned {len(logprobs)} log-probs for {len(sampled.token_ids)} tokens, or some that are "
            "not numbers below 0; its weights are damaged, or its version reports them otherwise"
        )
    return Completion(
        token_ids=sampled.token_ids,
        logprobs=logprobs,
        text=processor.decode(sampled.token_ids),
        finish_reason=cast(FinishReason, sampled.finish_reason),
        seed=request.seed,
        weight_versions=((0, version),),
        ids_compared=len(request.prompt.token_ids),  # by `check_ids`
    )
