"""The perception term of PAPO (arXiv:2507.06448): answers should change if the image is masked.

With logp and masked_logp the log-probabilities of a sampled token after the image and after the masked image:

    loss = ... - perception_coef * KL_prcp - perception_entropy_coef * (logp + masked_logp)

KL_prcp is k3 of kl.py, an estimate of KL(policy with the image || policy with the masked one), so its sign is that of
a reward: the term is maximised. The second part is the paper's double entropy loss: -logp and -masked_logp are the
samples' estimates of both entropies, and both are kept small, because answers that are noise maximise a KL too.
Gradients go through both log-probabilities, as the paper writes it.

As in the authors' code, differences of log-probabilities are bounded by 20 and a token's KL by 10 nats; past a bound it
has no gradient. Their code takes masked_logp as a constant unless a switch is set; here it never is.

The mask is the paper's: squares of 14 x 14 pixels are made black, each with the chance `perception_mask_ratio`.
Departure: they mask a row's image as it was stored, here it is masked at its final size, so squares stay what they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

SQUARE = 14
"""Side of a square, in pixels."""
LARGEST_DIFFERENCE, LARGEST_KL = 20.0, 10.0
"""Bounds in nats: of the difference of two log-probabilities, and of a token's KL."""


def perception_kl(logp: Tensor, masked_logp: Tensor) -> Tensor:
    """Return KL_prcp [M] of tokens in nats, from 0 to LARGEST_KL, with gradients to both."""
    d = (masked_logp - logp).clamp(-LARGEST_DIFFERENCE, LARGEST_DIFFERENCE)
    return (torch.exp(d) - d - 1).clamp(max=LARGEST_KL)


def masked_image(image: Image, ratio: float, generator: torch.Generator) -> Image:
    """Return the image with squares made black, each with the chance `ratio`; the last of a side may be cut."""
    from PIL.Image import fromarray

    pixels = np.array(image)
    rows, columns = (-(-side // SQUARE) for side in pixels.shape[:2])
    black = (torch.rand(rows, columns, generator=generator) < ratio).numpy()
    black = black.repeat(SQUARE, 0).repeat(SQUARE, 1)[: pixels.shape[0], : pixels.shape[1]]
    pixels[black] = 0
    return fromarray(pixels)
