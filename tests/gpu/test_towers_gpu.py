"""Vision towers on a GPU: features are those that transformers' own attention and convolution make."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import tiny
from transformers import AutoModelForImageTextToText

from mm_grpo.learner.transformers_patches import VARLEN_ATTENTION
from mm_grpo.learner.vision_attention import patch_vision_tower

GRIDS = [[1, 12, 20], [1, 8, 8], [1, 12, 20], [1, 4, 26]]


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 2e-3), (torch.bfloat16, 3e-2)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_features_are_transformers_own(
    family: str, dtype: torch.dtype, limit: float, models: dict[str, Path]
) -> None:
    model = AutoModelForImageTextToText.from_pretrained(models[family], dtype=dtype).cuda()
    width = model.model.visual.patch_embed.proj.weight[0].numel()
    torch.manual_seed(0)
    pixels = torch.randn(sum(t * h * w for t, h, w in GRIDS), width, device="cuda", dtype=dtype)
    found = []
    for ours in (False, True):
        if ours:
            patch_vision_tower(model.model.visual)
        made = model.model.get_image_features(pixels, torch.tensor(GRIDS).cuda(), return_dict=True)
        found.append(torch.cat([*made.pooler_output]).float())
    assert model.config.vision_config._attn_implementation == VARLEN_ATTENTION
    assert float((found[1] - found[0]).norm()) <= limit * float(found[0].norm())
