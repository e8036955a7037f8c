"""Rollout engines with their own copy of the weights, as a remote engine has, and the faults of one.

`FakeRemoteEngine(model, processor)` behaves. With one of FAULTS it goes wrong in silence: it still answers,
and only a check can tell. Faults of the weight transfer begin with weight version 1, so that the first
sync passes. In a run: `use_engine(monkeypatch, fault)`.

`FakeServer` may be called from several threads, as a served engine is. In a run also set
`ENGINE_FACTS["transformers"] = EngineFacts(embedded=True, remote=True)`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any

import pytest
from torch import Tensor

from mm_grpo import build
from mm_grpo.rollout.engine import BatchStream, Digest, Request, answer_all
from mm_grpo.rollout.transformers_engine import TransformersEngine, TransformersStream
from mm_grpo.rollout.weights import digest
from mm_grpo.types import Completion, Prompt

FAULTS = (
    "no transfer", "no load", "one tensor lost", "stale version", "old cache", "wrong image", "constant seed",
    "constant seed, hidden", "image dropped later", "batch sent twice", "wrong after wake",
)  # fmt: skip
"""Faults of FakeRemoteEngine."""


class FakeRemoteEngine(TransformersEngine):
    """The in-process engine over deep copies of `model`; `fault` is one of FAULTS, or empty."""

    def __init__(self, model: Any, processor: Any, fault: str = "") -> None:
        super().__init__(copy.deepcopy(model), processor)
        assert fault in ("", *FAULTS)
        self.fault = fault
        self.old = TransformersEngine(copy.deepcopy(model), processor) if fault == "old cache" else self
        self.flipped: dict[int, tuple[Prompt, Prompt]] = {}
        self.batches: list[list[Completion]] = []

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> Digest:
        fault = self.fault if version >= 1 else ""
        if fault == "no transfer":
            self.version = version
            return {}
        if fault == "no load":  # takes the tensors and does not use them
            self.version = version
            return {name: digest(tensor) for name, tensor in tensors}
        if fault == "one tensor lost":
            tensors = [(n, t) for n, t in tensors if not n.endswith("layers.1.mlp.up_proj.weight")]
        received = super().update_weights(tensors, version)
        if fault == "stale version":
            self.version = version - 1
        return received

    def wake(self) -> None:
        if self.fault == "wrong after wake" and self.version > 0:
            self.model.get_output_embeddings().weight.data.mul_(1.1)

    def stream(self) -> Any:
        return BatchStream(self.generate)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        sent = [self._distort(r) for r in requests]
        if self.old is not self:  # samples from a cache that the first weights filled
            self.old.version = self.version
            return self.old.generate(sent)
        with TransformersStream(self) as stream:
            done = answer_all(stream, sent)
        if self.fault == "batch sent twice" and len(done) == 8:  # a whole step's answers
            self.batches.append(done)
            done = [replace(c, weight_versions=((0, self.version),)) for c in self.batches[-2:][0]]
        if self.fault in ("constant seed, hidden", "batch sent twice"):
            return [replace(c, seed=r.seed) for c, r in zip(done, requests, strict=True)]
        return done

    def score(self, prompt: Prompt, token_ids: Sequence[int]) -> list[float]:
        return super().score(self._seen(prompt), token_ids)

    def _distort(self, request: Request) -> Request:
        seed = 7 if self.fault.startswith("constant seed") else request.seed
        return replace(request, prompt=self._seen(request.prompt), seed=seed)

    def _seen(self, prompt: Prompt) -> Prompt:
        """The prompt as this engine sees it: with another picture when it has that fault."""
        late = self.fault == "image dropped later" and self.version > 0
        if not (late or self.fault == "wrong image") or not prompt.vision:
            return prompt
        if id(prompt) not in self.flipped:
            vision = {**prompt.vision, "pixel_values": (0 if late else -1) * prompt.vision["pixel_values"]}
            self.flipped[id(prompt)] = (prompt, replace(prompt, vision=vision))
        return self.flipped[id(prompt)][1]


def use_engine(patch: pytest.MonkeyPatch, fault: str = "") -> None:
    """Put a FakeRemoteEngine in the place of the engine that configs name."""
    patch.setitem(build.ENGINES, "transformers", lambda c, m, p, r: FakeRemoteEngine(m, p, fault))


class FakeServer(FakeRemoteEngine):
    """A remote engine for several threads at once, which take turns token by token. `delay` are the seconds that a
    token takes besides, in which other threads run. Weights that are sent while it samples raise RuntimeError."""

    remote = True

    def __init__(self, model: Any, processor: Any, fault: str = "", *, delay: float = 0.0) -> None:
        super().__init__(model, processor, fault)
        self.model.eval()
        self.delay = delay
        self.lock, self.sampling, self.closed = Lock(), 0, False

    def stream(self) -> Any:
        return BatchStream(self.generate)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        with self.lock:
            self.sampling += 1
            stream = TransformersStream(self)
            numbers = stream.add_group([self._distort(request) for request in requests])
        try:
            found: dict[int, Completion] = {}
            while stream.unfinished:
                time.sleep(self.delay)  # other threads may ask meanwhile
                with self.lock:
                    if self.closed:
                        raise RuntimeError("the engine was closed")
                    found |= stream.step()
        finally:
            with self.lock:
                self.sampling -= 1
                stream.close()
        return [found[number] for number in numbers]

    def score(self, prompt: Prompt, token_ids: Sequence[int]) -> list[float]:
        with self.lock:
            return super().score(prompt, token_ids)

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> Digest:
        with self.lock:
            if self.sampling:
                raise RuntimeError(f"version {version} was sent while {self.sampling} requests ran")
            return super().update_weights(tensors, version)

    def close(self) -> None:
        with self.lock:
            self.closed = True
