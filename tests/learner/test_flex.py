"""The FlexAttention path on a machine without a GPU: its mask, its block table, and what is compiled how often.

The kernel itself has no backward pass on a CPU. In its place stands plain attention over exactly the pairs that
the table and `mask_mod` together let through, so a wrong table or a wrong mask changes log-probs and
gradients here as it would there. The kernel is tested in tests/gpu.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import config_for, load, make_groups, segments_of
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.nn.functional import scaled_dot_product_attention

from mm_grpo.config import ModelConfig
from mm_grpo.errors import ConfigError
from mm_grpo.learner import flex
from mm_grpo.learner.attention import Masks
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.pack import attention_mask
from mm_grpo.learner.policy import load_policy
from mm_grpo.processors.base import load_processor


def pairs(mask: BlockMask) -> Tensor:
    """The pairs [B, 1, N, N] that a kernel would run: all of a full block, those of `mask_mod` in a mixed one."""
    width = mask.seq_lengths[0]
    batch = mask.kv_num_blocks.shape[0]
    decided = create_mask(mask.mask_mod, batch, 1, width, width, device="cpu")

    def spread(count: Tensor, order: Tensor) -> Tensor:
        blocks = torch.zeros(order.shape, dtype=torch.bool)
        for b, q in torch.cartesian_prod(torch.arange(batch), torch.arange(order.shape[-2])).tolist():
            blocks[b, 0, q, order[b, 0, q, : int(count[b, 0, q])].long()] = True
        wide = blocks.repeat_interleave(flex.BLOCK, -1).repeat_interleave(flex.BLOCK, -2)
        return wide[..., :width, :width]

    full_count, full_order = mask.full_kv_num_blocks, mask.full_kv_indices
    assert full_count is not None and full_order is not None
    return spread(full_count, full_order) | (spread(mask.kv_num_blocks, mask.kv_indices) & decided)


ROWS = st.lists(st.lists(st.integers(1, 180), min_size=2, max_size=6), min_size=1, max_size=3)


@settings(max_examples=40)
@given(ROWS)
def test_table_and_mask_let_through_what_the_dense_mask_does(rows: list[list[int]]) -> None:
    segments = segments_of(rows)
    assert torch.equal(pairs(flex.block_mask(segments)), attention_mask(segments))


def test_blocks_that_nobody_sees_are_skipped() -> None:
    # a prompt of 2 blocks and 4 completions of 2: each completion block sees the prompt and its own
    mask = flex.block_mask(segments_of([[256, 256, 256, 256, 256]]))
    run = mask.kv_num_blocks[0, 0] + mask.full_kv_num_blocks[0, 0]
    assert run.tolist() == [1, 2] + 4 * [3, 4]  # of up to 10
    assert mask.kv_num_blocks[0, 0].tolist() == [1] * 10  # the diagonal alone has pairs to decide
    assert mask.full_kv_num_blocks[0, 0].tolist() == [0, 1] + 4 * [2, 3]


def emulated(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    mask, gqa = pairs(options["block_mask"]), options["enable_gqa"]
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=options["scale"], enable_gqa=gqa
    )


@pytest.fixture
def emulation(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """FlexAttention with a backward pass; the list counts its calls."""
    calls: list[int] = []

    def noted(*args: Any, **options: Any) -> Tensor:
        calls.append(1)
        return emulated(*args, **options)

    monkeypatch.setattr(flex, "_compiled", lambda: noted)
    flex.fault.cache_clear()
    yield calls  # type: ignore[misc]
    flex.fault.cache_clear()


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_updates_are_those_of_blocks_and_dense_masks(
    family: str, checkpointing: bool, models: dict[str, Any], emulation: list[int]
) -> None:
    """Recomputed layers see the same segments: a lost mask would change every gradient."""
    processor = load_processor(str(models[family]))
    groups = make_groups(processor)
    updates = {}
    for attn in ("flex_attention", "sdpa", "eager"):
        config = config_for(
            models[family],
            model={"path": str(models[family]), "attn": attn},
            algorithm={"entropy_coef": 0.1},
            optim={"gradient_checkpointing": checkpointing},
        )
        emulation.clear()
        model = load_policy(config.model)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        learner = Learner(model, processor, config, 10)
        assert learner.module.masks.multiple == (128 if attn == "flex_attention" else 1)
        learner.step(groups)
        updates[attn] = {n: p.detach() - before[n] for n, p in model.named_parameters()}
        assert bool(emulation) == (attn == "flex_attention")
    for name, want in updates["eager"].items():
        assert want.norm() > 0, name
        for attn in ("flex_attention", "sdpa"):
            assert float((updates[attn][name] - want).norm()) <= 1e-4 * float(want.norm()), (attn, name)


def test_it_is_compiled_for_all_lengths_at_once() -> None:
    counter = CompileCounter()
    compiled = torch.compile(flex.flex_attention, dynamic=True, backend=counter)
    torch.manual_seed(0)
    counts = []
    for rows in [[[140, 30, 20]], [[300, 30, 20, 50]], [[900, 9]], [[131, 5, 5, 5, 5]], [[400, 128]]]:
        segments = segments_of(rows)
        query, key, value = (torch.randn(1, h, segments.shape[1], 16) for h in (4, 2, 2))
        with torch.no_grad():
            out = compiled(query, key, value, block_mask=flex.block_mask(segments), enable_gqa=True)
        mask = attention_mask(segments)
        want = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        torch.testing.assert_close(out, want, rtol=1e-5, atol=2e-6)
        counts.append(counter.frame_count)
    assert counts == [1, 2, 2, 2, 2]  # the second length tells the compiler that lengths differ


def test_a_kernel_that_is_wrong_is_found_out_and_not_used(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device, shape = torch.device("cpu"), (torch.float32, 4, 2, 16)

    def fault_with(run: Any) -> str | None:
        monkeypatch.setattr(flex, "_compiled", lambda: run)
        flex.fault.cache_clear()
        return flex.fault(device, *shape)

    def no_mask(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=options["enable_gqa"]
        )

    def no_gradient_of_values(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return emulated(query, key, value.detach() + 0 * value, **options)

    assert fault_with(emulated) is None
    wrong = fault_with(no_mask)
    assert wrong is not None and wrong.startswith("its output is ")
    assert str(fault_with(no_gradient_of_values)).startswith("its gradient of the value is ")
    config = ModelConfig(path=str(models["qwen2_vl"]), attn="flex_attention")
    with pytest.raises(
        ConfigError, match="'flex_attention' does not work on cpu: its gradient of the value is"
    ):
        Masks(load_policy(config), config.attn)
    flex.fault.cache_clear()


def test_it_needs_a_gpu(models: dict[str, Path]) -> None:
    flex.fault.cache_clear()
    model = load(models["qwen2_vl"])
    assert Masks(model, "auto").multiple == 1
    with pytest.raises(ConfigError, match=r"does not work on cpu: .*; write auto or sdpa"):
        Masks(model, "flex_attention")
