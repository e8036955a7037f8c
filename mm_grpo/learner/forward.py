"""The one module that the learner calls: a pack in, log-probabilities and entropies out.

Everything that carries gradients happens inside this forward, so that a data-parallel wrapper sees one
module and gradients become ready in one order for every pack. A pack without images runs a blank image
through the vision tower and adds 0 times its features: the tower's parameters then get zero
gradients at the same moment at which others get theirs. So does a pack whose images another one completes
(image_features.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from mm_grpo.learner.attention import Masks
from mm_grpo.learner.image_features import KeptFeatures, SharedFeatures, zero_of_blank
from mm_grpo.learner.logprobs import CHUNK_BYTES, token_logprobs
from mm_grpo.learner.pack import Pack
from mm_grpo.learner.transformers_patches import features_for_pixels
from mm_grpo.learner.vision_attention import patch_vision_tower
from mm_grpo.processors.family import Family


class PackForward(nn.Module):
    """Wraps a transformers vision-language model, whose layout `family` knows.

    Packs are `shared` rows, of a prompt and several completions, or of a prompt and one.
    """

    def __init__(
        self,
        model: Any,
        *,
        family: Family,
        media_token_ids: frozenset[int],
        temperature: float,
        attn: str = "auto",
        shared: bool = True,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        super().__init__()
        family.check(model)
        self.model = model
        self.family = family
        self.media_token_ids = sorted(media_token_ids)
        self.blank = family.blank(model)
        self.temperature = temperature
        self.chunk_bytes = chunk_bytes
        self.features: KeptFeatures | SharedFeatures | None = None  # set for passes that share them
        self.masks = Masks(model, attn, family=family, shared=shared)
        patch_vision_tower(family.tower(model))

    def forward(self, pack: Pack) -> tuple[Tensor, Tensor]:
        """Log-probabilities [M] and entropies [M] of the pack's completion tokens, in the pack's order."""
        pack = pack.to(self.model.device)
        with self._inputs(pack) as inputs:
            hidden = self.family.hidden_states(
                self.model,
                **inputs,
                **self.masks.of_pack(pack),
                position_ids=pack.position_ids,
                use_cache=False,
            )
        states = hidden.flatten(0, 1).index_select(0, pack.sources)
        return token_logprobs(
            states,
            self.family.head(self.model).weight,
            pack.targets,
            temperature=self.temperature,
            banned=self.media_token_ids,
            chunk_bytes=self.chunk_bytes,
        )

    @contextmanager
    def _inputs(self, pack: Pack) -> Iterator[dict[str, Any]]:
        """The tokens with their images: as pixels, or as features that passes or packs share."""
        family, model = self.family, self.model
        inputs: dict[str, Any] = {"input_ids": pack.input_ids}
        if not pack.pictured and not family.tower_is_frozen(model):
            yield {"inputs_embeds": self._embeds_touched_by_blank(pack.input_ids)}
        elif pack.pictured and self.features is not None:
            features = self.features
            with features_for_pixels(
                family.backbone(model), lambda: family.output(features.of(pack.pictured))
            ) as pixels:
                yield inputs | pixels
        else:
            vision = family.vision(pack.pictured)
            yield inputs | {key: tensor.to(model.device) for key, tensor in vision.items()}

    def _embeds_touched_by_blank(self, input_ids: Tensor) -> Tensor:
        # The embedding first, as the models do it: backward goes through nodes in the reverse order of their
        # making, and an embedding made after the tower would have its gradient ready before the tower's.
        embeds: Tensor = self.model.get_input_embeddings()(input_ids)
        zero = zero_of_blank(self.model, self.family, self.blank)
        return embeds + zero.to(embeds.dtype)
