"""Vision towers that attend to all windows of one length in one call, against transformers' own loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.steps import load
from torch import Tensor

from mm_grpo.learner import vision_attention as towers

pytestmark = pytest.mark.lowest

# patches (time, height, width): windows are 8 x 8 where there are any, so these have whole and cut ones
GRIDS = [[1, 12, 20], [1, 8, 8], [1, 12, 20], [1, 4, 26]]


def encoded(model: Any, grids: list[list[int]]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Features of random pixels, and the gradients of every parameter of the tower."""
    tower = model.model.visual
    width = tower.patch_embed.proj.weight[0].numel()
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(sum(t * h * w for t, h, w in grids), width, generator=generator)
    found = model.model.get_image_features(pixels, torch.tensor(grids), return_dict=True)
    levels = getattr(found, "deepstack_features", None) or ()
    features = [*found.pooler_output, *(f for level in levels for f in level)]
    sum((f * torch.linspace(-1, 1, f.shape[-1])).sum() for f in features).backward()
    grads = {n: p.grad for n, p in tower.named_parameters() if p.grad is not None}
    return [f.detach() for f in features], grads


@pytest.mark.parametrize(("family", "checkpointing"), [("qwen3_vl", False), ("qwen2_5_vl", True)])
def test_features_and_gradients_are_those_of_one_call_per_length(
    family: str, checkpointing: bool, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    sdpa = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        towers, "scaled_dot_product_attention", lambda *a, **k: calls.append(len(a[0])) or sdpa(*a, **k)
    )
    found = []
    for ours in (False, True):
        model = load(models[family])
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if ours:
            towers.patch_vision_tower(model.model.visual)
        found.append(encoded(model, GRIDS))
        assert bool(calls) == ours
    (features, grads), (own, own_grads) = found
    assert grads.keys() == own_grads.keys() and grads
    for want, got in zip([*features, *grads.values()], [*own, *own_grads.values()], strict=True):
        assert want.norm() > 0
        assert float((got - want).norm()) <= 5e-6 * float(want.norm())
    # 4 images of 3 sizes; qwen2_5_vl cuts them into 17 windows of 4 lengths in the first of 2 layers
    windowed = family == "qwen2_5_vl"
    passes = 2 if checkpointing else 1
    assert len(calls) == passes * (4 + 3 if windowed else 3 + 3)
    assert sum(calls) == passes * (17 + 4 if windowed else 4 + 4)


def test_one_length_is_a_matter_of_views() -> None:
    found = towers.varlen_batches(torch.tensor([0, 64, 128, 192]))
    assert found == towers.VarlenBatches(((3, 64),), None, None)
    mixed = towers.varlen_batches(torch.tensor([0, 2, 5, 7]))
    assert mixed.batches == ((2, 2), (1, 3))
    assert mixed.order is not None and mixed.order.tolist() == [0, 1, 5, 6, 2, 3, 4]
    assert mixed.back is not None and mixed.order[mixed.back].tolist() == list(range(7))
