"""FlexAttention on a GPU: equal to plain attention, whatever the lengths, and compiled a few times at most."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.steps import config_for, make_groups, segments_of
from torch.nn.functional import scaled_dot_product_attention

from mm_grpo.learner import flex
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.minibatch import make_items
from mm_grpo.learner.model import load_model
from mm_grpo.learner.pack import attention_mask
from mm_grpo.processors.base import load_processor

# heads, heads of keys and values, size: of Qwen2.5-VL-3B and 7B, Qwen3-VL-8B, the tiny models
SHAPES = [(16, 2, 128), (28, 4, 128), (32, 8, 128), (4, 2, 16)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_is_right_for_shapes_of_real_models(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    assert flex.fault(torch.device("cuda:0"), dtype, *shape) is None


def graphs() -> int:
    """How many graphs torch has compiled in this process."""
    count: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return count


ROWS = [
    [[140, 30, 20]],
    [[60, 20, 30]],
    [[300, 200], [100, 9], [90, 30, 40], [200, 7]],
    [[131, 5, 5, 5, 5]],
    [[400, 128]] * 8,
    [[2000, 7]] * 2,
]


def test_nothing_is_compiled_but_what_was_compared() -> None:
    flex.fault.cache_clear()
    assert flex.fault(torch.device("cuda:0"), torch.float32, 8, 2, 64) is None
    before = graphs()
    torch.manual_seed(0)
    for number, rows in enumerate(ROWS):
        segments = segments_of(rows).cuda()
        batch, width = segments.shape
        q, k, v = (torch.randn(batch, width, h, 64, device="cuda").transpose(1, 2) for h in (8, 2, 2))
        q.requires_grad_()
        k.requires_grad_(number % 2 == 0)
        leaves = [x for x in (q, k) if x.requires_grad]
        mask, dense = flex.block_mask(segments), attention_mask(segments)
        out = flex.attend(q, k, v, mask, 0.125)
        want = scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True)
        found = torch.autograd.grad(out.square().sum(), leaves)
        wanted = torch.autograd.grad(want.square().sum(), leaves)
        with torch.no_grad():
            alone = flex.attend(q, k, v, mask, 0.125)
        for a, b in zip((out, alone, *found), (want, want, *wanted), strict=True):
            assert float((a - b).norm() / b.norm()) <= 2e-3, rows
    assert graphs() == before


def test_it_does_not_hold_all_scores() -> None:
    """Eager FlexAttention would: 8 heads of 16,384 x 16,384 scores are 4 GiB in bfloat16."""
    assert flex.fault(torch.device("cuda:0"), torch.bfloat16, 8, 2, 64) is None
    segments = segments_of([[8192, *[1024] * 8]]).cuda()
    q, k, v = (
        torch.randn(1, 16384, h, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for h in (8, 2, 2)
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    flex.attend(q, k, v, flex.block_mask(segments)).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 2**29


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_updates_are_those_of_dense_masks(checkpointing: bool, dtype: str, models: dict[str, Any]) -> None:
    path = models["qwen2_5_vl"]  # the text layers of all families call the same kernel
    processor = load_processor(str(path))
    groups = make_groups(processor)
    found = {}
    for attn in ("flex_attention", "sdpa", "dense"):
        config = config_for(
            path,
            model={"attn": "sdpa" if attn == "dense" else attn, "dtype": dtype, "device": "cuda"},
            optim={"gradient_checkpointing": checkpointing, "learning_rate": 0.0, "max_grad_norm": 0.0},
        )
        learner = Learner(load_model(config.model, processor.family), processor, config, 10)
        learner.module.masks.blocks = attn != "dense"
        items = make_items(groups, config.algorithm)
        logps = torch.cat([*learner.run(items)[0].values()])
        before = graphs()
        report = learner.update(groups)
        if attn == "flex_attention":
            assert graphs() == before  # layers run again in autograd's thread, too
        found[attn] = logps, report.updates[0].grad_norm
    logps, norm = found["dense"]
    gap, rel = (1e-4, 1e-3) if dtype == "float32" else (0.05, 0.02)
    for attn in ("flex_attention", "sdpa"):
        assert float((found[attn][0] - logps).abs().mean()) <= gap, attn
        assert found[attn][1] == pytest.approx(norm, rel=rel), attn
