"""The one module that the learner calls: a pack in, log-probabilities and entropies out.

Everything that carries gradients happens inside this forward, so that a data-parallel wrapper sees one
module and gradients become ready in one order for every pack. A pack without images runs a blank image
through the vision tower and adds 0 times its features: the tower's parameters then get zero
gradients at the same moment at which others get theirs. This is left out if no optimizer looks at the order
(`blank_images` false).

A prompt that several packs go on from is run before the first of them (prompt_states.py), and its end is given in
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
from mm_grpo.learner.logprobs import PackResult, token_logprobs
from mm_grpo.learner.minibatch import to_pack_order
from mm_grpo.learner.pack import Pack, prompt_pack
from mm_grpo.learner.prompt_states import Prefixes, PromptEnd, PromptState, PromptStates
from mm_grpo.learner.shards import gathered
from mm_grpo.learner.transformers_patches import features_for_pixels
from mm_grpo.learner.vision_attention import patch_vision_tower
from mm_grpo.processors.base import Processor
from mm_grpo.types import Prompt


class PackForward(nn.Module):
    """Wrapper of a transformers vision-language model, whose layout the processor's family knows.

    Its distribution is the one that training samples from, or without `as_sampled` the one over the whole vocabulary at
    temperature 1.
    """

    def __init__(
        self,
        model: Any,
        processor: Processor,
        config: GRPOConfig,
        *,
        as_sampled: bool = True,
        blank_images: bool = True,
    ) -> None:
        super().__init__()
        self.model, self.family = model, processor.family
        self.family.check(model)
        self.media_token_ids = sorted(processor.media_token_ids) if as_sampled else []
        self.temperature = config.rollout.temperature if as_sampled else 1.0
        self.blank, self.blank_images = self.family.blank(model), blank_images
        self.features: ImageFeatures | None = None
        self.prompts: PromptStates | None = None
        self._step_features: ImageFeatures | None = None
        shared = processor.layout == "shared_prefix"
        self.masks = Masks(model, config.model.attn, family=self.family, shared=shared)
        patch_vision_tower(self.family.tower(model))

    def keep_features(self, features: ImageFeatures | None) -> None:
        """Use these image features in all passes from now on; None for features of each pass alone."""
        self.features = self._step_features = features

    def begin_pass(self, prompts: PromptStates) -> None:
        """Share image features, and `prompts` that are run apart, among the packs that follow."""
        self.prompts = prompts
        self.features = self._step_features or ImageFeatures(self.model, self.family)

    def end_pass(self) -> int:
        """Share nothing any longer; return the count of images that were encoded for this pass alone."""
        encoded = 0 if self.features is None or self._step_features is not None else self.features.encoded
        self.prompts, self.features = None, self._step_features
        return encoded

    def forward(self, pack: Pack | PromptEnd, kl_states: Mapping[int, Tensor] | None = None) -> PackResult:
        """Return the values [M] of the pack's completion tokens, in the pack's order.

        `kl_states` [T, D], by completion, are states of another distribution q. If a completion of the pack has some,
        the result has the KL from q, 0 for tokens of completions without. For a `PromptEnd` the values are 0, and their
        backward is that of the prompt.
        """
        # through forward, because DeepSpeed prepares every backward in its own forward
        if isinstance(pack, PromptEnd):
            assert self.prompts is not None
            head = self.family.head(self.model).weight
            # the prompt's backward reaches a tied head through the embedding, and any other head only here
            is_tied = head is self.model.get_input_embeddings().weight
            end = self.prompts.joined(pack.prompt, None if is_tied else head)
            return PackResult(end, end)
        states, q_hidden = self.states(pack), None
        order = pack.completion_index.tolist() if kl_states else []
        if kl_states and not kl_states.keys().isdisjoint(order):
            on_device = {index: kl_states[index].to(states) for index in {*order} & kl_states.keys()}
            q_hidden = to_pack_order(on_device, order, states)
        return token_logprobs(
            states,
            gathered(self.family.head(self.model).weight),
            pack.targets.to(states.device),
            temperature=self.temperature,
            banned=self.media_token_ids,
            q_hidden=q_hidden,
        )

    def states(self, pack: Pack) -> Tensor:
        """Return the last hidden states [M, D] that predict the pack's completion tokens."""
        pack = pack.to(self.model.device)
        prefixes = self._prefixes(pack)
        states = self._hidden_states(pack, prefixes=prefixes).flatten(0, 1)
        if prefixes is not None:
            states = torch.cat([states, *(state.last for state in prefixes.states)])
        return states.index_select(0, pack.sources)

    def _hidden_states(self, pack: Pack, **states: Any) -> Tensor:
        """Return the last hidden states [B, N, D] of a pack."""
        with self._inputs(pack) as inputs:
            options = {**inputs, **self.masks.of_pack(pack, **states), "position_ids": pack.position_ids}
            return self.family.hidden_states(self.model, **options, use_cache=False)

    def _prefixes(self, pack: Pack) -> Prefixes | None:
        """Return the states of the pack's prompts that run apart; None if there are none."""
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
        """Yield keyword arguments of the model's forward: the tokens with the features of their images."""
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
        # The embedding first, as the models do it: backward goes through nodes in the reverse order in which they
        # were made, and an embedding made after the tower would have its gradient ready before the tower's.
        embeds: Tensor = self.model.get_input_embeddings()(input_ids)
        zero = zero_of_blank(self.model, self.family, self.blank)
        return embeds + zero.to(embeds.dtype)
