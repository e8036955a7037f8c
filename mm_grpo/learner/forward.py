"""The one module that the learner calls: a pack in, log-probabilities and entropies out.

Everything that carries gradients happens inside this forward, so that a data-parallel wrapper sees one
module and gradients become ready in one order for every pack. A pack without images runs a blank image
through the vision tower and adds 0 times its features: the tower's parameters then get zero
gradients at the same moment at which others get theirs. Where no optimizer looks at the order (`blank_images` false)
it is left out.

A prompt that several packs go on from is run ahead of the first of them (prompt_states.py), and its end is given in
the place of a pack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mm_grpo.config import GRPOConfig
from mm_grpo.learner.attention import Masks
from mm_grpo.learner.image_features import ImageFeatures, zero_of_blank
from mm_grpo.learner.logprobs import token_logprobs
from mm_grpo.learner.minibatch import to_pack_order
from mm_grpo.learner.pack import Pack, prompt_pack
from mm_grpo.learner.prompt_states import Prefixes, PromptEnd, PromptState, PromptStates
from mm_grpo.learner.transformers_patches import features_for_pixels
from mm_grpo.learner.vision_attention import patch_vision_tower
from mm_grpo.processors.base import Processor
from mm_grpo.processors.family import Family
from mm_grpo.types import Prompt


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
        chunk_bytes: int | None = None,
    ) -> None:
        super().__init__()
        family.check(model)
        self.model = model
        self.family = family
        self.media_token_ids = sorted(media_token_ids)
        self.blank = family.blank(model)
        self.temperature = temperature
        self.chunk_bytes = chunk_bytes
        self.features: ImageFeatures | None = None  # set for passes that share them
        self.prompts: PromptStates | None = None  # as well, where packs go on from prompts that are run apart
        self.teacher: Mapping[int, Tensor] = {}  # by completion, for updates of the twin view
        self.blank_images = True  # false where no optimizer looks at the order of gradients
        self.masks = Masks(model, attn, family=family, shared=shared)
        patch_vision_tower(family.tower(model))

    def forward(self, pack: Pack | PromptEnd) -> tuple[Tensor, ...]:
        """Log-probabilities [M] and entropies [M] of the pack's completion tokens, in the pack's order.

        Where a completion has a `teacher`, whose states [T, D] are given, the third is the KL of its tokens from that,
        and 0 of others. Of a prompt's end both are the scalar 0 whose backward is that of the prompt.
        """
        head = self.family.head(self.model).weight
        if isinstance(pack, PromptEnd):
            assert self.prompts is not None
            tied = head is self.model.get_input_embeddings().weight  # which the prompt reaches as it is
            end = self.prompts.joined(pack.prompt, None if tied else head)
            return end, end
        states, teacher = self.states(pack), None
        order = pack.completion_index.tolist() if self.teacher else []
        if not self.teacher.keys().isdisjoint(order):
            kept = {index: self.teacher[index].to(states) for index in {*order} & self.teacher.keys()}
            teacher = to_pack_order(kept, order, states)
        return token_logprobs(
            states,
            head,
            pack.targets.to(states.device),
            temperature=self.temperature,
            banned=self.media_token_ids,
            chunk_bytes=self.chunk_bytes,
            teacher=teacher,
        )

    def states(self, pack: Pack) -> Tensor:
        """The last hidden states [M, D] that predict the pack's completion tokens."""
        pack = pack.to(self.model.device)
        prefixes = self._prefixes(pack)
        states = self._hidden_states(pack, prefixes=prefixes).flatten(0, 1)
        if prefixes is not None:
            states = torch.cat([states, *(state.last for state in prefixes.states)])
        return states.index_select(0, pack.sources)

    def _hidden_states(self, pack: Pack, **states: Any) -> Tensor:
        """The last hidden states [B, N, D] of a pack."""
        with self._inputs(pack) as inputs:
            return self.family.hidden_states(
                self.model,
                **inputs,
                **self.masks.of_pack(pack, **states),
                position_ids=pack.position_ids,
                use_cache=False,
            )

    def _prefixes(self, pack: Pack) -> Prefixes | None:
        """States of the prompts that the pack goes on from; None where there are none."""
        if not pack.prefixes:
            return None
        assert self.prompts is not None and pack.prefix_segments is not None
        states = self.prompts.of([p for row in pack.prefixes for p in row], self._run_prompt)
        return Prefixes(states, [len(row) for row in pack.prefixes], pack.prefix_segments.shape[1])

    def _run_prompt(self, prompt: Prompt) -> PromptState:
        pack = prompt_pack(prompt, self.masks.multiple).to(self.model.device)
        state = PromptState(len(prompt.token_ids))
        states = self._hidden_states(pack, keep_prompt=state).flatten(0, 1)
        state.last = states.index_select(0, pack.sources)
        return state

    @contextmanager
    def _inputs(self, pack: Pack) -> Iterator[dict[str, Any]]:
        """The tokens with the features of their images."""
        family, model = self.family, self.model
        inputs: dict[str, Any] = {"input_ids": pack.input_ids}
        if not pack.pictured and self.blank_images and not family.tower_is_frozen(model):
            yield {"inputs_embeds": self._embeds_touched_by_blank(pack.input_ids)}
        elif pack.pictured:
            features = self.features or ImageFeatures(model, family)
            with features_for_pixels(
                family.backbone(model), lambda: family.output(features.of(pack.pictured))
            ) as pixels:
                yield inputs | pixels
        else:
            yield inputs

    def _embeds_touched_by_blank(self, input_ids: Tensor) -> Tensor:
        # The embedding first, as the models do it: backward goes through nodes in the reverse order of their
        # making, and an embedding made after the tower would have its gradient ready before the tower's.
        embeds: Tensor = self.model.get_input_embeddings()(input_ids)
        zero = zero_of_blank(self.model, self.family, self.blank)
        return embeds + zero.to(embeds.dtype)


def wrap_model(model: Any, processor: Processor, config: GRPOConfig) -> PackForward:
    """The module that a learner of this config calls."""
    return PackForward(
        model,
        family=processor.family,
        media_token_ids=processor.media_token_ids,
        temperature=config.rollout.temperature,
        attn=config.model.attn,
        shared=processor.layout == "shared_prefix",
    )
