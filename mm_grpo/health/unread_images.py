"""Images that nobody reads: the learner's log-probs are the same without the image.

A vision-language model whose image does not reach its text layers trains without an error: pixel values that are
dropped, placeholders that are not replaced by features, a mask that hides them. The parity check does not
see it where the engine makes the same mistake. So a completion of the step is scored once more with its pixels
replaced by others. Attention sees every token of the prompt, so any image that is read changes the log-probs by
rounding at the least; exactly equal ones, of up to 32 tokens, mean that it is not.

The completion is the one that the weight sync scores anyway, filled up with arbitrary tokens where it is
short: log-probs of a sure answer may round to 0 with either image, those of arbitrary tokens do not. The change is
logged as `images/logp_change`, in nats per token; how small it may be in a healthy run depends on how much of an
answer is text, so only 0 raises the alarm. A model that answers from the text alone although it could look is not
found by this; an evaluation set with shuffled images is for that.

Cost: one forward of one prompt without gradients, at the first step and every 50th.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from mm_grpo.types import Prompt

EVERY = 50
"""Steps from one measurement to the next."""


def is_due(step: int) -> bool:
    """Whether the step is one that measures: the first, and every 50th, in a resumed run too."""
    return step == 1 or step % EVERY == 0


def with_other_pixels(prompt: Prompt) -> Prompt | None:
    """The prompt with every pixel value 0 (mid-grey, mostly), of the same shape; None where it has no pixels.

    Pixels are the floating tensors of `vision`; grids and masks are whole numbers. Those that are 0 already become 1.
    """
    pixels = {k: t for k, t in prompt.vision.items() if t.is_floating_point()}
    if not pixels:
        return None
    other = {k: torch.zeros_like(t) if t.any() else torch.ones_like(t) for k, t in pixels.items()}
    return replace(prompt, vision={**prompt.vision, **other})


def unread_images(change: float, uid: str) -> str | None:
    """A message when other pixels change the log-probs of a completion (mean `change`, nats per token) not at all."""
    if change != 0.0:
        return None
    return (
        f"the learner's log-probs of a completion of {uid} are the same to the last bit when its image is replaced by "
        "another: the image does not reach the text layers. Likely the processor makes no image tokens or pixels for "
        "the row, or the model does not put image features in their places; see `mm-grpo doctor CONFIG`"
    )
