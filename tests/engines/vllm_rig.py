"""A learner's model, its processor and a vLLM engine over one folder, for the tests of this folder."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from helpers import tiny
from helpers.families import plain_inputs
from torch import Tensor
from transformers import AutoModelForImageTextToText

from mm_grpo.processors.base import Processor, load_processor, mm_processor_kwargs
from mm_grpo.rollout.vllm.engine import VLLMEngine
from mm_grpo.rollout.vllm.launch import EngineSettings
from mm_grpo.rollout.weights import Transfer, WeightLedger
from mm_grpo.types import Completion, Prompt


class Rig:
    """Both sides. `change` moves the learner's weights, `reset` brings both back to those on disk."""

    shift = 0.003

    def __init__(self, path: Path, dtype: str = "float32", **kwargs: Any) -> None:
        self.processor: Processor = load_processor(str(path))
        kind = getattr(torch, dtype)
        self.model: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=kind).eval()
        self.settings = EngineSettings(
            model=str(path),
            dtype=dtype,
            max_model_len=1024,
            mm_processor_kwargs=tuple(mm_processor_kwargs(self.processor).items()),
            max_images=3,
            max_videos=2,
            engine_kwargs=tuple(kwargs.items()),
        )
        self.engine = VLLMEngine(self.settings, self.processor)
        self.ledger = WeightLedger()
        self.original = {n: t.clone() for n, t in self.tensors()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What a learner yields: every name, the tied head under both of its names."""
        for name, tensor in self.model.named_parameters(remove_duplicate=False):
            yield name, tensor.detach()

    def change(self, *parts: str, scale: float = 1.3) -> None:
        """Scale every weight whose name holds one of `parts`."""
        seen: set[int] = set()
        for name, tensor in self.tensors():
            if any(part in name for part in parts) and tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                tensor.mul_(scale).add_(self.shift)

    def reset(self) -> None:
        """Both sides back to the weights on disk."""
        for name, tensor in self.tensors():
            tensor.copy_(self.original[name])
        if self.engine._handle.owner is not self.engine:
            self.engine = VLLMEngine(self.settings, self.processor)
        self.send(0)

    def send(self, version: int, tensors: Iterable[tuple[str, Tensor]] | None = None) -> Transfer:
        """Bring the engine to the learner's weights as a run does; the record of what was sent."""
        return self.ledger.send(self.engine, self.tensors() if tensors is None else tensors, version)

    def prompt(
        self, uid: str, *images: Any, videos: tuple[Any, ...] = (), text: str = "what is it"
    ) -> Prompt:
        return self.processor.prompt(tiny.sample(uid, text, images, videos))

    def prompts(self) -> list[Prompt]:
        """One image, two of different sizes, none."""
        return [
            self.prompt("one", tiny.picture(1)),
            self.prompt("two", tiny.picture(2, 168, 84), tiny.picture(3, 56, 140)),
            self.prompt("none", text="say something"),
        ]

    @torch.no_grad()
    def expected(
        self, prompt: Prompt, token_ids: Sequence[int], *, temperature: float = 1.0, mask: bool = True
    ) -> list[float]:
        """Log-probs [T] by a plain transformers forward."""
        logits = self.model(**plain_inputs(self.processor, prompt, token_ids)).logits[0].float()
        logits = logits[len(prompt.token_ids) - 1 : -1] / temperature
        if mask:
            logits[:, sorted(self.processor.media_token_ids)] = -torch.inf
        chosen = torch.tensor(token_ids)[:, None]
        values: list[float] = logits.log_softmax(-1).gather(1, chosen)[:, 0].tolist()
        return values

    def gap(
        self, prompts: Iterable[Prompt], completions: Sequence[Completion], *, temperature: float = 1.0
    ) -> float:
        """Largest difference of any token's log-prob from the plain forward's; prompts repeat evenly."""
        prompts = list(prompts)
        each = len(completions) // len(prompts)
        return max(
            abs(a - b)
            for i, c in enumerate(completions)
            for a, b in zip(
                c.logprobs,
                self.expected(prompts[i // each], c.token_ids, temperature=temperature),
                strict=True,
            )
        )


def process_state() -> dict[str, Any]:
    """What a library may disturb in the process it is started in."""
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state()[1].tolist(),  # type: ignore[index]
        "torch": torch.get_rng_state().tolist(),
        "environment": dict(os.environ),
        "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads,
        "affinity": os.sched_getaffinity(0),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "precision": torch.get_float32_matmul_precision(),
    }
