"""vLLM in the trainer's process: a seed per generation, the learner's tokens, weights with their digests.

For each row the ids that vLLM ran are compared with the ids that the learner trains on; `update_weights` returns a
digest of every tensor as the worker took it. For any engine `rollout/weights.py` decides which tensors are due and
whether they arrived, and `parity/sync.py` verifies what the engine makes of them. vLLM itself is behind `internals.py`
and `launch.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from mm_grpo.errors import ConfigError, EngineError
from mm_grpo.processors.base import Processor
from mm_grpo.rollout.engine import Digest, RequestStream, RolloutEngine
from mm_grpo.rollout.vllm import internals
from mm_grpo.rollout.vllm.adapters import is_factor
from mm_grpo.rollout.vllm.four_bits import require_all
from mm_grpo.rollout.vllm.launch import EngineSettings, Handle, can_free_cache_alone, launch
from mm_grpo.rollout.vllm.requests import EngineRequest, GroupStream, RequestFormat
from mm_grpo.rollout.weights import digest
from mm_grpo.types import Completion, Prompt


class VLLMEngine(RolloutEngine):
    """vLLM in this process as an engine.

    vLLM outlives this object. A second object with equal settings takes it over, and must `update_weights` before it
    samples. `four_bits` are the learner's layers of `settings.four_bits`.
    """

    def __init__(
        self, settings: EngineSettings, processor: Processor, four_bits: Mapping[str, Module] | None = None
    ) -> None:
        self.settings, self.processor = settings, processor
        if processor.family.looks_ahead and not torch.cuda.is_available():
            raise ConfigError(
                f"rollout.engine = 'vllm': on a CPU vLLM lets no token of an image see those that follow in it, and "
                f"'{settings.model}' is a model whose images are read so: it would sample from another distribution "
                "than the learner's; write rollout.engine=transformers"
            )
        self._handle = launch(settings)
        internals.wake(self._handle)
        internals.give_back(self._handle)
        self._handle.adapter = None  # that of an earlier trainer, which vLLM forgets with the next weights
        # a fresh engine holds the weights on disk; one that is taken over, whatever its last trainer sent
        self._current = self._handle.owner is None
        self._handle.owner = self
        self._factors: dict[str, Tensor] = {}
        self._handle.four_bits |= four_bits or {}
        self._four_bits = {f"{layer}.weight" for layer in settings.four_bits}
        self.version = 0
        self.requests = RequestFormat(
            processor,
            settings.max_model_len,
            settings.max_media,
            # -inf, not vLLM's documented floor of -100: a hard mask that leaves the others' sum exact
            mask={token: -math.inf for token in sorted(processor.media_token_ids)},
            params={"flat_logprobs": True},
            version=lambda: self.version,
        )

    def stream(self) -> RequestStream:
        """Open a stream of requests; vLLM's prefix cache finds what they share."""
        self._ready()
        return VLLMStream(self)

    @property
    def sampler_version(self) -> str:
        """Return vLLM's version and its model runner: each of the two draws differently from a seed."""
        import vllm

        second = getattr(self._handle.llm.llm_engine.vllm_config, "use_v2_model_runner", False)
        return f"vLLM {vllm.__version__}, model runner {2 if second else 1}"

    @property
    def holds_weights(self) -> bool:
        """Return True when vLLM holds this trainer's weights, or the weights on disk and none were sent."""
        return self._current and self._handle.owner is self

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> Digest:
        """Take `tensors`, whole layers, as weights number `version`, and empty the caches of older weights.

        Returns digests of what vLLM's own layers hold afterwards if they can be read back, else of what the worker was
        given (`read_back.py`). Without `holds_weights` every tensor has to come.
        """
        handle = self._own_handle()
        internals.wake(handle, "weights")
        handle.read_back.begin()
        factors: dict[str, Tensor] = {}
        received: dict[str, str] = {}
        weights = self._weights(tensors, factors, received)
        first = next(weights, None)
        try:
            if first is not None:
                internals.reload(handle, handle.read_back.note_all(chain([first], weights)))
                received |= internals.read_back(handle)
            self._factors |= factors
            if self._factors:  # vLLM forgets its adapter when it loads weights
                digests = internals.put_adapter(handle, self._factors)
                received |= {name: digests[name] for name in factors}
        except BaseException:  # the engine now holds a mixture: only all tensors make it whole
            self._current = False
            raise
        internals.wake(handle)
        # both caches hold what older weights made of images and prompts
        internals.reset_prefix_cache(handle)
        internals.reset_encoder_cache(handle)
        self.version, self._current = version, True
        return received

    def adapter_layers(self, layers: Iterable[str]) -> frozenset[str]:
        """Return the layers for which vLLM has LoRA layers (`adapters.py`)."""
        adapted = list(layers)
        supported = internals.supported_layers(self._handle, adapted)
        # a merge could not be in four bits
        require_all({*self.settings.four_bits} & {*adapted}, supported, "LoRA layer")
        return supported

    def share(self, parameters: Mapping[str, Parameter]) -> int:
        """Lend the tensors that lie in vLLM's layers as they came.

        From then on sleep frees only keys and values. Some versions of vLLM cannot do that: they lend nothing unless
        `sleep_level` is 0.
        """
        if self._can_sleep and not can_free_cache_alone():
            return 0
        return internals.lend(self._handle, parameters)

    def score(self, prompt: Prompt, token_ids: Sequence[int]) -> list[float]:
        if not token_ids:
            return []
        answer = internals.run(self._ready(), self.requests.scored(prompt, token_ids))
        return self.requests.scores(prompt, token_ids, answer)

    def close(self) -> None:
        """Put vLLM to sleep if it can; it stays until the process ends."""
        if self._handle.owner is self:
            if self._can_sleep and not self._handle.asleep and self._handle.fault is None:
                internals.sleep(self._handle, 2)
            self._current = False

    def sleep(self) -> None:
        """Free the GPU for the learner, as `settings.sleep_level` says. Does nothing on a CPU, or at level 0."""
        handle = self._own_handle()
        level = self.settings.sleep_level
        if self._can_sleep and not handle.asleep:
            internals.sleep(handle, level)
            if level >= 2 and "weights" in handle.asleep:
                self._current = False

    def wake(self) -> None:
        """Take the memory back. After level 2 the weights are gone until `update_weights` sends all."""
        internals.wake(self._own_handle())

    @property
    def _can_sleep(self) -> bool:
        return self.settings.sleep_level > 0 and torch.cuda.is_available()

    def _own_handle(self) -> Handle:
        """Return vLLM. Raises EngineError when it failed, or another trainer uses it now."""
        if self._handle.fault is not None:
            raise EngineError(
                f"the vLLM engine of this process is lost: {self._handle.fault}; start a new process"
            )
        if self._handle.owner is not self:
            raise EngineError(
                "another trainer of this process has taken the vLLM engine over; go on with that trainer, or make this "
                "one again"
            )
        return self._handle

    def _ready(self) -> Handle:
        """Return vLLM, awake. Raises EngineError when it does not hold this trainer's weights."""
        handle = self._own_handle()
        if not self._current:
            raise EngineError(
                "the vLLM engine does not hold this trainer's weights (they were freed, or belong to an earlier one); "
                "call update_weights with every tensor first"
            )
        self.wake()
        return handle

    def _weights(
        self, tensors: Iterable[tuple[str, Tensor]], factors: dict[str, Tensor], received: dict[str, str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors to load. Put factors into `factors`, and digests of layers in four bits into `received`."""
        for name, tensor in tensors:
            if is_factor(name):
                factors[name] = tensor
            elif name in self._four_bits:
                received[name] = digest(tensor)
            else:
                yield name, tensor


class VLLMStream(GroupStream):
    """Stream of a `VLLMEngine`. After an error it has aborted the other requests.

    Raises DataError for a row that does not fit the engine, GuardStop when vLLM ran other tokens than the learner's,
    EngineError when vLLM failed.
    """

    def __init__(self, engine: VLLMEngine) -> None:
        super().__init__(engine.requests)
        self.engine = engine

    def send(self, request: EngineRequest) -> str:
        return internals.add(self.engine._ready(), request)

    def step(self) -> list[tuple[int, Completion]]:
        if not self.running:
            return []
        uids = [request.prompt.uid for _, group in self.running.values() for request in group]
        answers = internals.step(self.engine._ready(), uids)
        return [pair for name, answer in answers for pair in self.finish(name, answer)]

    def close(self) -> None:
        if self.running:
            self.running = {}
            internals.abort_all(self.engine._handle)
