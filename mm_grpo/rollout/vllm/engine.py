"""vLLM in the trainer's process: own seed per generation, the learner's tokens, weights with their digests.

`generate` compares the ids that vLLM ran with those that the learner trains on, row by row; `update_weights`
returns a digest of every tensor as the worker took it. Which tensors are due, and whether they arrived, is
`rollout/weights.py`'s affair, and what the engine makes of them is verified by `parity/sync.py`, for any engine.
vLLM itself is behind `internals.py` and `launch.py`.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from mm_grpo.errors import ConfigError, DataError, EngineError, GuardStop
from mm_grpo.rollout.engine import Request, Sampling
from mm_grpo.rollout.vllm import internals as internals
from mm_grpo.rollout.vllm.internals import Answer, EngineRequest, Sampled
from mm_grpo.rollout.vllm.launch import EngineSettings, Handle, launch
from mm_grpo.rollout.weights import digest
from mm_grpo.types import Completion, FinishReason, Prompt

if TYPE_CHECKING:
    from torch import Tensor

    from mm_grpo.processors.base import Processor
    from mm_grpo.rollout.engine import Digest

SEEDS = 1 << 32
"""vLLM's worker fails on seeds past 64 bits and CPU generators ignore those past 32; ours end there."""
TEMPERATURES = (0.01, 2.0)


class VLLMEngine:
    """A `RolloutEngine` over vLLM, one per process (or per tensor-parallel group of processes).

    The vLLM engine outlives this object; a second one with equal settings takes it over and must then
    `update_weights` before it samples. Where vLLM makes no step for `timeout` seconds, the process is ended.
    """

    def __init__(self, settings: EngineSettings, processor: Processor, timeout: float = 600.0) -> None:
        self.settings, self.processor = settings, processor
        if processor.family.looks_ahead and not torch.cuda.is_available():
            raise ConfigError(
                f"rollout.engine = 'vllm': on a CPU vLLM lets no token of an image see those that follow in it, and "
                f"'{settings.model}' is a model whose images are read so: it would sample from another distribution "
                "than the learner's; write rollout.engine=transformers"
            )
        self._handle = launch(settings)
        self._handle.timeout = timeout
        internals.wake(self._handle)
        # a fresh engine holds what is on disk; one that is taken over, whatever its last trainer sent
        self._current = self._handle.owner is None
        self._handle.owner = self
        self.version = 0
        # -inf, not vLLM's documented floor of -100: a hard mask that leaves the others' sum exact
        self._mask = {token: -math.inf for token in sorted(processor.media_token_ids)}
        self._stops = sorted(processor.stop_token_ids)

    # the protocol ----------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion per request, in order. Neighbours of one prompt with consecutive seeds go as one.

        Raises DataError for a row that does not fit the engine, GuardStop when vLLM ran other tokens than the
        learner's, EngineError when it failed.
        """
        if not requests:
            return []
        groups = _groups(requests)
        work = [self._engine_request(group) for group in groups]
        answers = self._run(work)
        completions: list[Completion] = []
        for group, answer in zip(groups, answers, strict=True):
            self._check_ids(group[0].prompt, group[0].prompt.token_ids, answer)
            completions += [self._completion(r, s) for r, s in zip(group, answer.sequences, strict=True)]
        return completions

    @property
    def holds_weights(self) -> bool:
        """Whether vLLM holds this trainer's weights, or those on disk when nobody has sent any."""
        return self._current and self._handle.owner is self

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> Digest:
        """Take `tensors`, whole layers, as weights number `version`; the caches of older ones are emptied.

        Returns digests of what vLLM's own parameters hold after it, where those can be read back, else of what the
        worker was given. Without `holds_weights` every tensor has to come.
        """
        handle = self._held()
        internals.wake(handle, "weights")
        received: dict[str, str] = {}
        shapes: dict[str, torch.Size] = {}
        readable = handle.readable
        try:
            internals.reload(handle, _noted(tensors, shapes, received, readable or set()))
            loaded = {
                name: digest(part)
                for name, part in internals.read_back(handle, shapes).items()
                if readable is None or name in readable
            }
            if readable is None:  # the first update confirms which parameters lie where they seem to
                handle.readable = {name for name, value in loaded.items() if value == received[name]}
            else:
                received |= loaded
        except BaseException:  # what the engine holds now is a mixture: only all tensors make it whole
            self._current = False
            raise
        internals.wake(handle)
        self._reset_prefix_cache()
        self._reset_encoder_cache()
        self.version, self._current = version, True
        return received

    def score(self, prompt: Prompt, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities [T] of `token_ids` after `prompt`, images included: no mask, temperature 1."""
        if not token_ids:
            return []
        self._check_size(prompt, len(token_ids) + 1)
        sent = prompt.engine_prompt
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "flat_logprobs": True}
        answer = self._run([EngineRequest(prompt.uid, (*sent.token_ids, *token_ids), sent.images, params)])[0]
        self._check_ids(prompt, (*prompt.token_ids, *token_ids), answer)
        return [cast(float, x) for x in answer.prompt_logprobs[-len(token_ids) :]]

    def close(self) -> None:
        """Free what can be freed: vLLM itself stays to the end of the process, asleep where it can sleep."""
        if self._handle.owner is self:
            if self._can_sleep and not self._handle.asleep:
                internals.sleep(self._handle, 2)
            self._current = False

    # memory ----------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Free the GPU for the learner, as `settings.sleep_level` says. Does nothing on a CPU, or at level 0."""
        handle = self._held()
        level = self.settings.sleep_level
        if self._can_sleep and not handle.asleep:
            internals.sleep(handle, level)
            if level >= 2:
                self._current = False

    def wake(self) -> None:
        """Take the memory back. After level 2 the weights are gone until `update_weights` sends them all."""
        internals.wake(self._held())

    # parts -----------------------------------------------------------------------------------

    @property
    def _can_sleep(self) -> bool:
        return self.settings.sleep_level > 0 and torch.cuda.is_available()

    def _held(self) -> Handle:
        if self._handle.fault is not None:
            raise EngineError(
                f"the vLLM engine of this process is lost: {self._handle.fault}; start a new process"
            )
        if self._handle.owner is not self:
            raise EngineError(
                "another trainer of this process has taken the vLLM engine over; go on with that one, or make this "
                "one anew"
            )
        return self._handle

    def _run(self, work: Sequence[EngineRequest]) -> list[Answer]:
        handle = self._held()
        if not self._current:
            raise EngineError(
                "the vLLM engine does not hold this trainer's weights (they were freed, or are an earlier trainer's); "
                "call update_weights with every tensor first"
            )
        self.wake()
        return internals.run(handle, work)

    def _engine_request(self, group: Sequence[Request]) -> EngineRequest:
        prompt, sampling, seed = group[0].prompt, group[0].sampling, group[0].seed
        if not 0 <= seed <= SEEDS - len(group):
            raise ValueError(f"{prompt.uid}: seed {seed} is outside [0, 2^32 - {len(group)}]")
        self._check_size(prompt, sampling.max_tokens)
        sent = prompt.engine_prompt
        return EngineRequest(
            prompt.uid, sent.token_ids, sent.images, self._params(sampling, seed, len(group))
        )

    def _params(self, sampling: Sampling, seed: int, count: int) -> dict[str, Any]:
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
            "logit_bias": self._mask,
            "stop_token_ids": self._stops,
            "logprobs": 0,
            "flat_logprobs": True,
            "detokenize": False,
        }

    def _check_size(self, prompt: Prompt, room: int) -> None:
        length, limit = len(prompt.token_ids), self.settings.max_model_len
        if length + room > limit:
            raise DataError(
                f"{prompt.uid}: the prompt has {length} tokens and {room} more are asked for; "
                f"rollout.vllm.max_model_len = {limit} allows {limit} in all. Raise it, lower data.max_pixels or "
                "rollout.max_completion_length, or drop such rows with data.max_prompt_length and data.on_overlong=drop"
            )
        images, most = len(prompt.engine_prompt.images), max(1, self.settings.max_images)
        if images > most:
            raise DataError(
                f"{prompt.uid}: the row has {images} images, and the engine was started for at most {most} in a "
                "prompt; raise rollout.vllm.max_images, or leave the row out"
            )

    def _check_ids(self, prompt: Prompt, expected: Sequence[int], answer: Answer) -> None:
        got = answer.prompt_token_ids
        if got != tuple(expected):
            place = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), None)
            where = "at the end" if place is None else f"first at place {place}"
            raise GuardStop(
                f"{prompt.uid}: vLLM ran {len(got)} prompt tokens where the learner trains on {len(expected)}; they "
                f"differ {where}. Both must see the same image at the same size: check that nothing but mm_grpo "
                "resizes images, and that the engine's processor is the learner's"
            )

    def _completion(self, request: Request, sampled: Sampled) -> Completion:
        uid, ids = request.prompt.uid, sampled.token_ids
        if sampled.finish_reason not in ("stop", "length"):
            raise EngineError(f"{uid}: vLLM ended seed {request.seed} with '{sampled.finish_reason}'")
        if len(sampled.logprobs) != len(ids) or not all(x <= 1e-4 for x in sampled.logprobs):
            raise GuardStop(
                f"{uid}: vLLM returned {len(sampled.logprobs)} log-probs for {len(ids)} tokens, or some that are not "
                "numbers below 0; its weights are damaged, or its version reports them otherwise"
            )
        return Completion(
            token_ids=ids,
            logprobs=sampled.logprobs,
            text=self.processor.decode(ids),
            finish_reason=cast(FinishReason, sampled.finish_reason),
            seed=request.seed,
            weight_versions=((0, self.version),),
        )

    # both caches hold what older weights made of images and prompts
    def _reset_prefix_cache(self) -> None:
        internals.reset_prefix_cache(self._handle)

    def _reset_encoder_cache(self) -> None:
        internals.reset_encoder_cache(self._handle)


def _groups(requests: Sequence[Request]) -> list[list[Request]]:
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


def _noted(
    tensors: Iterable[tuple[str, Tensor]],
    shapes: dict[str, torch.Size],
    received: dict[str, str],
    readable: Container[str],
) -> Iterable[tuple[str, Tensor]]:
    """Passes tensors on to the worker, noting their shapes and the digests of those that cannot be read back."""
    for name, tensor in tensors:
        shapes[name] = tensor.shape
        if name not in readable:
            received[name] = digest(tensor)
        yield name, tensor
