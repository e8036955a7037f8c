"""The one module that the learner calls: a pack in, log-probabilities and entropies out.

Everything that carries gradients happens inside this forward, so that a data-parallel wrapper sees one
module and gradients become ready in one order for every pack. A pack without images runs a blank image
through the vision tower and adds 0 times its features: the tower's parameters then get zero
gradients at the same moment at which others get theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mm_grpo.learner.attention import Masks
from mm_grpo.learner.features import KeptFeatures, tower_is_frozen
from mm_grpo.learner.logprobs import CHUNK_BYTES, token_logprobs
from mm_grpo.learner.pack import Pack
from mm_grpo.learner.towers import speed_up_tower


class PackForward(nn.Module):
    """Wraps a transformers vision-language model. `blank` are the vision tensors of a blank image."""

    def __init__(
        self,
        model: Any,
        *,
        media_token_ids: frozenset[int],
        blank: Mapping[str, Tensor],
        temperature: float,
        attn: str = "auto",
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        super().__init__()
        self.model = model
        self.media_token_ids = sorted(media_token_ids)
        self.blank = dict(blank)
        self.temperature = temperature
        self.chunk_bytes = chunk_bytes
        self.features: KeptFeatures | None = None  # set for a step whose images need to be encoded only once
        self.masks = Masks(model, attn)
        speed_up_tower(model)

    def forward(self, pack: Pack) -> tuple[Tensor, Tensor]:
        """Log-probabilities [M] and entropies [M] of the pack's completion tokens, in the pack's order."""
        pack = pack.to(self.model.device)
        with self._inputs(pack) as inputs:
            hidden = self.model.model(
                **inputs,
                **self.masks.of(pack.segments),
                position_ids=pack.position_ids,
                use_cache=False,
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

    @contextmanager
    def _inputs(self, pack: Pack) -> Iterator[dict[str, Any]]:
        """The tokens with their images: as pixels, or as features that an earlier pass of the step kept."""
        inputs: dict[str, Any] = {"input_ids": pack.input_ids}
        if not pack.prompts and not tower_is_frozen(self.model):
            yield {"inputs_embeds": self._embeds_touched_by_blank(pack.input_ids)}
        elif pack.prompts and self.features is not None:
            with self.features.given_to(self.model, pack.prompts):
                yield inputs | {"pixel_values": torch.empty(0)}  # asked for, and not looked at
        else:
            yield inputs | {key: tensor.to(self.model.device) for key, tensor in pack.vision.items()}

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
