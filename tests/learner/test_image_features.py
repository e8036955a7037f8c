"""Images that several packs look at go through the tower once or twice, and change nothing.

Twice with gradients, where each pack runs its prompt itself: with eager attention, and images of observations.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import passes, tiny
from helpers.steps import config_for, load, make_groups, plain_logp
from torch import Tensor

from mm_grpo.learner.forward import PackForward
from mm_grpo.learner.image_features import SharedFeatures
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.minibatch import make_items
from mm_grpo.learner.pack import Item, Pack, layout
from mm_grpo.processors.base import Processor, load_processor
from mm_grpo.processors.family import VisionFeatures

Rows = list[list[Item]]

# Packs of rows of completions, by their place in the step: the first group's three in three packs, twice beside
# others; the third's in two rows of one pack; the fourth's alone in one.
PLAN = [[[0], [6, 7]], [[1], [3, 4]], [[2], [9, 10, 11], [8]], [[5]]]
IMAGES = 2 * 2 + 2 * 1 + 1 * 2
"""How often images go through the tower: groups 1 and 3 are in several packs and take two runs each, group 4 one."""


def rows_of(processor: Processor, config: Any) -> list[Rows]:
    items = make_items(make_groups(processor), config.algorithm)
    return [[[items[i] for i in row] for row in pack] for pack in PLAN]


def forward_of(model: Any, processor: Processor, config: Any, planned: Sequence[Rows] | None) -> PackForward:
    """The module, sharing features over `planned` where that is given."""
    module = passes.forward_of(model, processor, config.rollout.temperature)
    if planned is not None:
        prompts = ([row[0].prompt for row in rows if row[0].prompt.vision] for rows in planned)
        module.features = SharedFeatures(model, processor.family, prompts)
    return module


def loss_of(logp: Tensor, entropy: Tensor, numbers: Sequence[int]) -> Tensor:
    """Weights that differ between completions, so that none can stand in for another."""
    weights = torch.tensor([1.0 - 0.3 * n for n in numbers])
    return (weights * logp + 0.1 * entropy).sum()


def packed_gradients(
    module: PackForward, planned: Sequence[Rows], media: frozenset[int]
) -> dict[str, Tensor]:
    for rows in planned:
        pack = layout(rows, media)
        logp, entropy = module(pack)
        loss_of(logp, entropy, pack.completion_index.tolist()).backward()
    return gradients(module.model)


def gradients(model: Any) -> dict[str, Tensor]:
    return {n: p.grad.float() for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("family", "checkpointing"), [*((family, False) for family in tiny.FAMILIES), ("qwen3_vl", True)]
)
def test_shared_features_give_the_gradients_of_transformers_forward(
    family: str, checkpointing: bool, models: dict[str, Path]
) -> None:
    path = models[family]
    processor, config = load_processor(str(path)), config_for(models[family])
    model, plain = load(path), load(path)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    planned = rows_of(processor, config)
    module = forward_of(model, processor, config, planned)
    ours = packed_gradients(module, planned, processor.media_token_ids)
    assert isinstance(module.features, SharedFeatures)
    assert module.features.encoded == IMAGES
    assert not module.features._kept and not module.features._sums

    pairs = [(g, c) for g in make_groups(processor) for c in g.completions]
    for number, (group, completion) in enumerate(pairs):
        logp, entropy = plain_logp(plain, config, sorted(processor.media_token_ids), group, completion)
        loss_of(logp, entropy, [number] * len(logp)).backward()
    for name, want in gradients(plain).items():
        assert float(want.norm()) > 0, name
        assert float((ours[name] - want).norm()) <= 1e-5 * float(want.norm()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_features_are_summed_in_float32(dtype: torch.dtype) -> None:
    """1, 2^-8 and 2^-8: each of the small ones is lost where 1 is bfloat16."""
    weight = torch.ones(1, 1, dtype=dtype, requires_grad=True)
    family: Any = SimpleNamespace(
        tower_is_frozen=lambda model: False,
        vision=lambda prompts: {},
        count=lambda vision: 1,
        features=lambda model, vision: VisionFeatures((weight * 1,)),
    )
    prompt: Any = SimpleNamespace(vision={})
    shared = SharedFeatures(SimpleNamespace(device="cpu"), family, [[prompt]] * 3, blanks=False)
    for factor in (1.0, 2.0**-8, 2.0**-8):
        (shared.of([prompt]).images[0] * factor).sum().backward()
    assert weight.grad is not None and float(weight.grad) == 1 + 2.0**-7


def test_gradients_are_ready_in_one_order_in_every_pack(models: dict[str, Path]) -> None:
    """In packs whose groups are all unfinished, some, or all; ZeRO-2 relies on it (see test_gradient_order.py)."""
    path = models["qwen3_vl"]
    processor, config, model = load_processor(str(path)), config_for(path), load(path)
    order = passes.orders_of(model)
    orders: list[list[str]] = []
    for planned in (rows_of(processor, config), None):
        module = forward_of(model, processor, config, planned)
        for rows in rows_of(processor, config):
            order.clear()
            logp, entropy = module(layout(rows, processor.media_token_ids))
            (logp + entropy).sum().backward()
            orders.append(list(order))
    assert sorted(orders[0]) == sorted(n for n, _ in model.named_parameters())
    assert all(each == orders[0] for each in orders)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_a_learner_encodes_the_images_of_a_group_in_many_packs_once(
    attn: str, frozen: bool, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three live completions with two images, three with one and two with two, each in a pack of its own.

    Eager attention cannot go on from a prompt that is run apart: a trained tower runs twice there.
    """
    path = models["qwen2_5_vl"]
    processor, groups = load_processor(str(path)), make_groups(load_processor(str(path)))
    longest = max(len(g.prompt.token_ids) for g in groups) + 8
    config = config_for(path, optim={"max_tokens_per_pack": longest})
    model = load(path, attn_implementation=attn)
    model.model.visual.requires_grad_(not frozen)
    learner = Learner(model, processor, config, 10)
    packs: list[Pack] = []
    forward = learner.optimizer.forward

    def noted(pack: Any) -> Any:
        packs.extend([pack] if isinstance(pack, Pack) else [])
        return forward(pack)

    monkeypatch.setattr(learner.module.masks, "plan", lambda items, *_: [[[item]] for item in items])
    learner.optimizer.forward = noted
    metrics = learner.update(groups).metrics
    assert len(packs) == metrics["learner/packs"] == 8
    looked_at = sum(processor.family.count(p.vision) for pack in packs for p in pack.pictured)
    assert looked_at == (3 * 2 + 3 * 1 + 2 * 2 if attn == "eager" else 0)
    assert metrics["learner/prompts_run"] == (8 if attn == "eager" else 3)
    assert metrics["learner/images_encoded"] == (10 if attn == "eager" and not frozen else 5)


def test_in_bfloat16_shared_features_lose_nothing(models: dict[str, Path]) -> None:
    """The tower's gradients are as far from those of fp32 as where every row encodes its images itself."""
    path = models["qwen3_vl"]
    processor, config = load_processor(str(path)), config_for(models["qwen3_vl"])
    planned = rows_of(processor, config)

    def tower_gradient(dtype: torch.dtype, shared: bool) -> Tensor:
        module = forward_of(load(path).to(dtype), processor, config, planned if shared else None)
        found = packed_gradients(module, planned, processor.media_token_ids)
        return torch.cat([g.flatten() for name, g in found.items() if ".visual." in name])

    want = tower_gradient(torch.float32, True)
    shared, alone = (
        float((tower_gradient(torch.bfloat16, s) - want).norm() / want.norm()) for s in (True, False)
    )
    assert 0 < shared <= 1.1 * alone < 0.1
