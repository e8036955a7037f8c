"""The one module that the learner calls: a pack in, log-probabilities and entropies out.

Everything that carries gradients happens inside this forward, so that a data-parallel wrapper sees one
module and gradients become ready in one order for every pack. A pack without images runs a blank image
through the vision tower and adds 0 times its features: the tower's parameters then get zero
gradients at the same moment at which others get theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mm_grpo.learner import attention
from mm_grpo.learner.attention import prefix_layout
from mm_grpo.learner.logprobs import CHUNK_BYTES, token_logprobs
from mm_grpo.learner.pack import Pack, attention_mask


class PackForward(nn.Module):
    """Wraps a transformers vision-language model. `blank` are the vision tensors of a blank image."""

    def __init__(
        self,
        model: Any,
        *,
        media_token_ids: frozenset[int],
        blank: Mapping[str, Tensor],
        temperature: float,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        super().__init__()
        self.model = model
        self.media_token_ids = sorted(media_token_ids)
        self.blank = dict(blank)
        self.temperature = temperature
        self.chunk_bytes = chunk_bytes
        self.blockwise = attention.enable(model)

    def forward(self, pack: Pack) -> tuple[Tensor, Tensor]:
        """Log-probabilities [M] and entropies [M] of the pack's completion tokens, in the pack's order."""
        pack = pack.to(self.model.device)
        inputs: dict[str, Any] = {"input_ids": pack.input_ids, **pack.vision}
        if not pack.vision and any(p.requires_grad for p in self.model.model.visual.parameters()):
            inputs = {"inputs_embeds": self._embeds_touched_by_blank(pack.input_ids)}
        hidden = self.model.model(
            **inputs, **self._attention(pack.segments), position_ids=pack.position_ids, use_cache=False
        ).last_hidden_state
        states = hidden.flatten(0, 1).index_select(0, pack.sources)
        return token_logprobs(
            states,
            self.model.lm_head.weight,
            pack.targets,
            temperature=self.temperature,
            banned=self.media_token_ids,
            chunk_bytes=self.chunk_bytes,
        )

    def _attention(self, segments: Tensor) -> dict[str, Any]:
        """Who sees whom, as the model takes it: blocks where they are cheaper, else one dense mask."""
        prefix = prefix_layout(segments) if segments.device.type == "cpu" and self.blockwise else None
        if prefix is not None:
            return {"prefix": prefix}
        mask = attention_mask(segments)
        if self.model.config._attn_implementation == "eager":  # eager adds its mask, sdpa selects by it
            floor = torch.finfo(self.model.dtype).min
            added = torch.zeros(mask.shape, dtype=self.model.dtype, device=mask.device)
            mask = added.masked_fill_(~mask, floor)
        return {"attention_mask": mask}

    def _embeds_touched_by_blank(self, input_ids: Tensor) -> Tensor:
        # The embedding first, as the models do it: backward goes through nodes in the reverse order of their
        # making, and an embedding made after the tower would have its gradient ready before the tower's.
        embeds: Tensor = self.model.get_input_embeddings()(input_ids)
        features = self.model.model.get_image_features(
            self.blank["pixel_values"].to(self.model.device),
            self.blank["image_grid_thw"].to(self.model.device),
            return_dict=True,
        )
        tensors = [*features.pooler_output]
        for level in getattr(features, "deepstack_features", None) or ():
            tensors += level if isinstance(level, (list, tuple)) else [level]
        zero = torch.stack([t.sum() for t in tensors]).sum() * 0
        return embeds + zero.to(embeds.dtype)
