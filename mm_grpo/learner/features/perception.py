"""The perception term in packs: the masked image is one more prefix of the same completions.

A pack holds its rows and, after them, each row's groups with images once more with the masked ones. One forward gives
both log-probabilities of a token, so the gradient is that of the term as it is written (algorithm/perception.py).
`optim.max_tokens_per_pack` counts both. Rows without images and videos have no term.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mm_grpo.algorithm.perception import masked_image, perception_kl
from mm_grpo.config import GRPOConfig
from mm_grpo.data.base import Rows
from mm_grpo.learner.alternate_prompts import AlternatePrompts, require_images
from mm_grpo.learner.features.base import FeatureLearner, FeaturePack, LossFeature, PackRows
from mm_grpo.learner.minibatch import Minibatch
from mm_grpo.learner.step_report import LossStatistics
from mm_grpo.processors.base import Processor
from mm_grpo.types import Group, Prompt, Video


class Perception(LossFeature):
    """PAPO's term: the KL between the answers to an image and to its masked copy, which is maximised."""

    extra_copies = 1

    @classmethod
    def check_rows(cls, config: GRPOConfig, train: Rows, *, several_turns: bool) -> None:
        require_images(train, "perception_coef", several_turns=several_turns)

    def has_gradient(self, prompt: Prompt) -> bool:
        return bool(prompt.vision)

    def begin_step(self, groups: Sequence[Group], minibatches: Sequence[Minibatch]) -> None:
        self.masked_prompts = masked_prompts(groups, self.learner)

    def added_rows(self, rows: PackRows) -> PackRows:
        """Return the rows' groups with images after the masked prompts."""
        return [masked for row in rows if (masked := self.masked_prompts.items(row))]

    def loss(self, pack: FeaturePack, statistics: LossStatistics) -> Tensor:
        """Return the term of the tokens after images.

        The KL is weighed as the KL from the reference is. The entropies are of the tokens of the entropy bonus.
        """
        tokens, pictured = pack.tokens, pack.mask(lambda item: bool(item.prompt.vision))
        # the added rows hold the completions with images in the same order
        logp, masked_logp, weights = tokens.logp[pictured], pack.added.logp, pack.weights[pictured]
        active, kl = weights > 0, perception_kl(logp, masked_logp)
        statistics.add(active, perception_kl=kl, pictured=active)
        loss = -self.algorithm.perception_coef * (weights * kl).sum()
        if entropy_coef := self.algorithm.perception_entropy_coef:
            in_bonus = active if tokens.mask is None else active * tokens.mask[pictured]
            logps = ((logp + masked_logp) * in_bonus).sum()
            loss = loss - entropy_coef * logps / max(pack.inputs.tokens, 1)
        return loss

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        del self.masked_prompts
        return {"perception/kl": sums["perception_kl"] / sums["pictured"]} if sums.get("pictured") else {}


def masked_prompts(groups: Sequence[Group], learner: FeatureLearner) -> AlternatePrompts:
    """Return the prompts of the step's `groups` with their images masked; rows without images have none.

    A mask is drawn from the seed of the group's first completion. So it is another one at every step, and the same in
    all updates of a step, on any number of processes and in a resumed run. Each is made once, whichever feature asks.
    """
    processor, ratio = learner.processor, learner.config.algorithm.perception_mask_ratio

    def make(group: Group) -> Prompt | None:
        if not group.prompt.vision:
            return None
        return masked_prompt(processor, group.prompt, ratio, group.completions[0].seed)

    return learner.alternates.setdefault("masked", AlternatePrompts(groups, make))


def masked_prompt(processor: Processor, prompt: Prompt, ratio: float, seed: int) -> Prompt:
    """Return the prompt with all its images and videos masked; they keep their size, so its tokens stay."""
    generator, media = torch.Generator().manual_seed(seed), prompt.engine_prompt
    images = tuple(masked_image(image, ratio, generator) for image in media.images)
    videos = tuple(masked_video(video, ratio, generator) for video in media.videos)
    return processor.prompt(replace(prompt.sample, images=images, videos=videos))


def masked_video(video: Video, ratio: float, generator: torch.Generator) -> Video:
    """Return the video with the same squares black in all frames: a frame would show what another one hides."""
    state = generator.get_state()
    frames = (masked_image(frame, ratio, generator.set_state(state)) for frame in video.frames)
    return replace(video, frames=tuple(frames))
