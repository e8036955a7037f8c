"""FlexAttention on a GPU: equal to plain attention, whatever the lengths, and compiled a few times at most."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from steps import config_for, make_groups, segments_of
from torch.nn.functional import scaled_dot_product_attention

from mm_grpo.learner import flex
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.pack import attention_mask
from mm_grpo.learner.policy import load_policy
from mm_grpo.processors.base import load_processor

# heads, heads of keys and values, size: of Qwen2.5-VL-3B and 7B, Qwen3-VL-8B, the tiny models
SHAPES = [(16, 2, 128), (28, 4, 128), (32, 8, 128), (4, 2, 16)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_is_right_for_the_shapes_of_real_models(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    assert flex.fault(torch.device("cuda:0"), dtype, *shape) is None


def test_lengths_do_not_compile_it_anew() -> None:
    torch._dynamo.reset()
    flex._compiled.cache_clear()
    torch.manual_seed(0)
    rows = [[[140, 30, 20]], [[300, 30, 20, 50]], [[900, 9]], [[131, 5, 5, 5, 5]], [[400, 128]], [[2000, 7]]]
    with torch._dynamo.config.patch(error_on_recompile=False):
        for each in rows:
            segments = segments_of(each).cuda()
            width = -(-segments.shape[1] // flex.BLOCK) * flex.BLOCK
            segments = torch.nn.functional.pad(segments, (0, width - segments.shape[1]), value=-1)
            q, k, v = (torch.randn(1, h, width, 64, device="cuda", requires_grad=True) for h in (8, 2, 2))
            out = flex.attend(q, k, v, flex.block_mask(segments))
            out.sum().backward()
            want = scaled_dot_product_attention(q, k, v, attn_mask=attention_mask(segments), enable_gqa=True)
            torch.testing.assert_close(out, want, rtol=2e-3, atol=2e-3)
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert compiled <= 3, f"{compiled} graphs for {len(rows)} lengths"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_updates_are_those_of_dense_masks(
    family: str, checkpointing: bool, dtype: str, models: dict[str, Any]
) -> None:
    processor = load_processor(str(models[family]))
    groups = make_groups(processor)
    found = {}
    for attn in ("flex_attention", "sdpa", "eager"):
        config = config_for(
            models[family],
            model={"path": str(models[family]), "attn": attn, "dtype": dtype, "device": "cuda"},
            optim={"gradient_checkpointing": checkpointing, "learning_rate": 0.0, "max_grad_norm": 0.0},
        )
        learner = Learner(load_policy(config.model), processor, config, 10)
        items = learner._items(groups)
        logps = torch.cat([*learner._run(items, learner.module)[0].values()])
        record = learner.step(groups).updates[0]
        found[attn] = logps, record.grad_norm
    logps, norm = found["eager"]
    gap, rel = (1e-4, 1e-3) if dtype == "float32" else (0.05, 0.02)
    for attn in ("flex_attention", "sdpa"):
        assert float((found[attn][0] - logps).abs().mean()) <= gap, attn
        assert found[attn][1] == pytest.approx(norm, rel=rel), attn
