"""The embedded engine: continuous batching over a transformers model.

Each prompt is prefilled once for its generations; the rows of many prompts then decode together, and where one has
ended another one that waits takes its place (transformers_stream.py). A row draws one uniform number per token from its
own `torch.Generator` and takes the token where the cumulative probability passes it, so its noise depends on its seed
alone, never on its batch mates. By default the engine holds the learner's own module: there is no second copy of the
weights and nothing to transfer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from mm_grpo.rollout.engine import RolloutEngine, answered
from mm_grpo.rollout.transformers_stream import ModelRunner, TransformersStream
from mm_grpo.rollout.weights import digest

if TYPE_CHECKING:
    from torch import Tensor

    from mm_grpo.processors.base import Processor
    from mm_grpo.rollout.engine import Digest, Request
    from mm_grpo.types import Completion, Prompt

MAX_ROWS = 512
"""Rows decoded together. More rows cost memory for their caches, fewer cost speed."""
KEPT_BYTES = 2 << 30
"""Keys and values that are kept of rows that have ended, for requests that follow them."""


class TransformersEngine(ModelRunner, RolloutEngine):
    """Samples from `model`, a transformers vision-language model, in this process.

    `model` may be the learner's: it is put in evaluation mode while the engine works and back after.
    """

    def __init__(self, model: Any, processor: Processor, *, max_rows: int = MAX_ROWS) -> None:
        super().__init__(model, processor, max_rows)

    @property
    def sentence(self) -> str:
        """On a GPU with vLLM, what that would bring."""
        if self.model.device.type != "cuda" or find_spec("vllm") is None:
            return ""
        return (
            "rollout.engine = transformers: Python starts each operation of each token; vLLM, which is installed here, "
            "replays them as one CUDA graph and pages its cache: rollout.engine=vllm (see `mm-grpo estimate`)"
        )

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion per request, in order; neighbours that share a prompt share its prefill."""
        with TransformersStream(self, keep=False, kept_bytes=0) as stream:
            return answered(stream, requests)

    def stream(self) -> TransformersStream:
        """Requests that are answered one by one, as they end; what ended can be gone on from."""
        return TransformersStream(self, keep=True, kept_bytes=KEPT_BYTES)

    def score(self, prompt: Prompt, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities [T] of `token_ids` after `prompt`: no media mask, temperature 1."""
        with self.evaluating(), torch.no_grad():
            ids = torch.tensor([[*prompt.token_ids, *token_ids]])
            tail = prompt.next_position + torch.arange(len(token_ids)).expand(*self.family.position_axes, -1)
            positions = torch.cat([prompt.position_ids, tail], -1)[..., None, :]
            hidden = self.hidden_states(ids, positions, None, None, [prompt])
            logits = self.family.head(self.model)(hidden[0, len(prompt.token_ids) - 1 : -1]).float()
            chosen = torch.tensor(token_ids, device=logits.device)[:, None]
            return [float(x) for x in logits.log_softmax(-1).gather(1, chosen)[:, 0]]

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> Digest:
        """Copy tensors that are not already the model's own; the digests name those copied.

        A layer that holds adapters of its own is the learner's module itself: what is sent for it is their
        merged weight, and nothing is copied.
        """
        named = list(self.model.named_parameters(remove_duplicate=False))
        adapted = {name.replace(".base_layer.", ".") for name, _ in named if ".base_layer." in name}
        own = {name: tensor for name, tensor in named if ".base_layer." not in name}
        digests: dict[str, str] = {}
        with torch.no_grad():
            for name, tensor in tensors:
                if name in adapted:
                    continue
                if name not in own:
                    raise KeyError(f"weight sync sent '{name}', which the engine's model does not have")
                if own[name].data_ptr() != tensor.data_ptr():
                    own[name].copy_(tensor)
                    digests[name] = digest(own[name])
        self.version = version
        return digests
