"""The FlexAttention path on a machine without a GPU: its mask, its block table, and what is compiled how often.

The kernel has no backward pass on a CPU: plain attention over the pairs that the table and `mask_mod` let through
stands in for it, so that a wrong one changes log-probs and gradients here too. The kernel is tested in tests/gpu.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import assert_same
from helpers.steps import config_for, load, make_groups, segments_of, update_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.nn.functional import scaled_dot_product_attention

from mm_grpo.config import ModelConfig
from mm_grpo.errors import ConfigError
from mm_grpo.learner import flex
from mm_grpo.learner.attention import Masks
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.model import load_model
from mm_grpo.learner.pack import PADDING, attention_mask
from mm_grpo.learner.pack import SEGMENTS_PER_GROUP as GROUP
from mm_grpo.processors.base import load_processor
from mm_grpo.processors.qwen_vl import QwenVLFamily


def padded(segments: Tensor) -> Tensor:
    """Segments as `block_mask` fills them up: to whole blocks, and two at least."""
    width = max(-(-segments.shape[1] // flex.BLOCK), 2) * flex.BLOCK
    return torch.nn.functional.pad(segments, (0, width - segments.shape[1]), value=PADDING)


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


GROUP_LENGTHS = st.lists(st.integers(1, 180), min_size=2, max_size=6)
ROWS = st.lists(st.lists(GROUP_LENGTHS, min_size=1, max_size=3), min_size=1, max_size=3)


@pytest.mark.slow
@settings(max_examples=20)
@given(ROWS)
def test_table_and_mask_let_through_what_the_dense_mask_does(rows: list[list[list[int]]]) -> None:
    segments = segments_of(rows)
    assert torch.equal(pairs(flex.block_mask(segments)), attention_mask(padded(segments)))


@settings(max_examples=15)
@given(ROWS, st.integers(1, 7))
def test_prompts_run_apart_are_seen_as_in_their_row(rows: list[list[list[int]]], chosen: int) -> None:
    """The bits of `chosen` say which groups of a row have their prompt before it."""
    before, own = [], []
    for row in rows:
        kept = [n for n in range(len(row)) if chosen >> n & 1]
        before.append([n * GROUP for n in kept for _ in range(row[n][0])])
        whole = [
            n * GROUP + k
            for n, group in enumerate(row)
            for k, count in enumerate(group)
            for _ in range(count)
        ]
        own.append([s for s in whole if s % GROUP or s // GROUP not in kept])
    width = -(-max(map(len, before)) // flex.BLOCK) * flex.BLOCK
    rest = max(map(len, own))
    segments = torch.tensor(
        [
            [*b, *[PADDING] * (width - len(b)), *o, *[PADDING] * (rest - len(o))]
            for b, o in zip(before, own, strict=True)
        ]
    )
    found = pairs(flex.block_mask(segments, width))
    assert torch.equal(found[:, :, width:], attention_mask(padded(segments))[:, :, width:])
    blocks = flex.block_mask(segments, width).kv_num_blocks[:, 0, : width // flex.BLOCK]
    assert (blocks == 1).all()  # nobody looks at what is asked there


def test_blocks_of_other_groups_are_skipped() -> None:
    # a prompt of 2 blocks and a completion of 2, then a group of a prompt of 1 block and completions of 1 and 2
    mask = flex.block_mask(segments_of([[[256, 256], [128, 128, 256]]]))
    run = mask.kv_num_blocks[0, 0] + mask.full_kv_num_blocks[0, 0]
    assert run.tolist() == [1, 2, 3, 4, 1, 2, 2, 3]
    assert mask.kv_num_blocks[0, 0].tolist() == [1] * 8


def emulated(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    mask, gqa = pairs(options["block_mask"]), options["enable_gqa"]
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=options["scale"], enable_gqa=gqa
    )


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    flex.fault.cache_clear()
    yield
    flex.fault.cache_clear()


@pytest.fixture
def emulation(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """FlexAttention with a backward pass; the list counts its calls."""
    calls: list[int] = []

    def noted(*args: Any, **options: Any) -> Tensor:
        calls.append(1)
        return emulated(*args, **options)

    monkeypatch.setattr(flex, "_compiled", lambda: noted)
    return calls


@pytest.mark.slow
def test_updates_are_those_of_blocks_and_dense_masks(models: dict[str, Any], emulation: list[int]) -> None:
    """Of many packs those of `dense` run the prompts again, the others go on from them; recomputed layers too."""
    path = models["qwen3_vl"]  # the text layers of all families call the same kernel
    processor = load_processor(str(path))
    groups = make_groups(processor)
    tokens = max(len(g.prompt.token_ids) for g in groups) + 8
    updates = {}
    for attn in ("flex_attention", "sdpa", "dense"):
        config = config_for(
            path,
            model={"path": str(path), "attn": "sdpa" if attn == "dense" else attn},
            algorithm={"entropy_coef": 0.1},
            optim={"gradient_checkpointing": True, "max_tokens_per_pack": tokens},
        )
        emulation.clear()
        model = load_model(config.model, processor.family)
        learner = Learner(model, processor, config, 10)
        if attn == "dense":
            learner.module.masks.blocks = learner.module.masks.apart = False
        assert learner.module.masks.multiple == (128 if attn == "flex_attention" else 1)
        updates[attn], metrics = update_of(learner, groups)
        assert (metrics["learner/prompts_run"] == 4) == (attn != "dense")
        assert bool(emulation) == (attn == "flex_attention")
    assert all(bool(change.any()) for change in updates["dense"].values())
    for attn in ("flex_attention", "sdpa"):
        assert_same(updates[attn], updates["dense"], 1e-4)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounter]:
    """FlexAttention through torch's compiler but without a kernel, with a backward pass; counts what is compiled."""
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    torch._dynamo.reset()
    flex._compiled.cache_clear()
    yield counter
    torch._dynamo.reset()
    flex._compiled.cache_clear()


def check(segments: Tensor, needs: tuple[bool, ...], grads: bool, scaling: float | None) -> None:
    """Outputs and gradients of heads 4 over 2 of size 16 are plain attention's; `needs` says who has gradients."""
    batch, width = segments.shape
    tensors = [torch.randn(batch, width, h, 16).transpose(1, 2) for h in (4, 2, 2)]
    mask, results = attention_mask(segments), []
    for run in ("flex", "plain"):
        leaves = [x.clone().requires_grad_(need) for x, need in zip(tensors, needs, strict=True)]
        query, key, value = (x * 1.0 if n else x.view_as(x) for n, x in enumerate(leaves))
        with torch.set_grad_enabled(grads):
            if run == "flex":
                out = flex.attend(query, key, value, flex.block_mask(segments), scaling)
            else:
                out = scaled_dot_product_attention(
                    query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True
                )
            assert out.requires_grad == (grads and any(needs))
            if out.requires_grad:
                out.square().sum().backward()
        results.append([out.detach(), *(x.grad for x in leaves)])
    for got, want in zip(*results, strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


# widths below and above a block; as many rows, blocks and heads as one another; one row and several
PACKS = [
    [[1, 1]],
    [[300, 30, 20, 50]],
    [[300, 200], [100, 9], [90, 30, 40], [200, 7]],
    [[140, 9]] * 4,
    [[[140, 9], [60, 30, 200], [3, 1]]],
]
NEEDS = [(True, True, True), (True, False, True), (True, False, False), (False, False, True), (False,) * 3]


@pytest.mark.slow
def test_nothing_is_compiled_but_what_was_compared(compiled: CompileCounter) -> None:
    assert flex.fault(torch.device("cpu"), torch.float32, 4, 2, 16) is None
    assert compiled.frame_count == 4  # one row and several, with gradients and without
    torch.manual_seed(0)
    for number, rows in enumerate(PACKS):
        segments = segments_of(rows)
        wide = padded(segments)
        check(wide, NEEDS[number % len(NEEDS)], True, 0.25)
        check(wide, (True, True, True), True, 0.25)
        check(segments, (True, True, True), number % 2 == 0, None)
    assert compiled.frame_count == 4


def test_threads_with_other_settings_share_the_graphs(compiled: CompileCounter) -> None:
    """As autograd's thread, which has its own number of threads and its own recompile limit."""
    segments = segments_of([[140, 30, 20]])
    before = torch.get_num_threads()
    check(segments, (True, True, True), True, None)
    faults: list[BaseException] = []

    def run(threads: int) -> None:
        try:
            torch.set_num_threads(threads)
            check(segments, (True, True, True), True, None)
            assert torch.get_num_threads() == threads
        except BaseException as error:
            faults.append(error)

    for threads in (1, 2, 3):
        thread = threading.Thread(target=run, args=(threads,))
        thread.start()
        thread.join(120)
    assert not faults and compiled.frame_count == 1 and torch.get_num_threads() == before


@pytest.mark.slow
def test_a_step_compiles_nothing_more(models: dict[str, Any], compiled: CompileCounter) -> None:
    """With adapters (no gradient of the first keys), recomputed layers, a reference, and prompts run apart."""
    path = models["qwen2_5_vl"]
    processor = load_processor(str(path))
    tokens = max(len(g.prompt.token_ids) for g in make_groups(processor)) + 8
    config = config_for(
        path,
        model={"attn": "flex_attention", "lora": {"rank": 2, "target_modules": ["q_proj", "v_proj"]}},
        algorithm={"beta": 0.1},
        optim={"gradient_checkpointing": True, "max_tokens_per_pack": tokens},
    )
    learner = Learner(load_model(config.model, processor.family), processor, config, 10)
    assert compiled.frame_count == 4
    assert learner.update(make_groups(processor)).updates[0].update_norm > 0
    assert compiled.frame_count == 4


def test_a_kernel_that_is_wrong_is_found_out_and_not_used(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device, shape = torch.device("cpu"), (torch.float32, 4, 2, 16)

    def fault_with(run: Any) -> str | None:
        monkeypatch.setattr(flex, "_compiled", lambda: run)
        flex.fault.cache_clear()
        return flex.fault(device, *shape)

    def no_mask(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    def no_gradient_of_values(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return emulated(query, key, value.detach() + 0 * value, **options)

    assert fault_with(emulated) is None
    wrong = fault_with(no_mask)
    assert wrong is not None and wrong.startswith("its output is ")
    assert str(fault_with(no_gradient_of_values)).startswith("its gradient of the value is ")
    table = flex._table

    def lost_square(wanted: Tensor) -> Any:  # of the second row: one completion in both blocks, and no prompt
        place = wanted[0].numel() + 2 * 4 + 1
        return table(wanted & (torch.arange(wanted.numel()).view(wanted.shape) != place))

    with monkeypatch.context() as patch:
        patch.setattr(flex, "_table", lost_square)
        assert str(fault_with(emulated)).startswith("its output is ")
    monkeypatch.setattr(flex, "_compiled", lambda: no_gradient_of_values)
    flex.fault.cache_clear()
    config = ModelConfig(path=str(models["qwen2_vl"]), attn="flex_attention")
    words = "'flex_attention' does not work on cpu: its gradient of the value is"
    with pytest.raises(ConfigError, match=words):
        Masks(load_model(config, QwenVLFamily()), config.attn)


def test_it_needs_a_gpu(models: dict[str, Path]) -> None:
    model = load(models["qwen2_vl"])
    assert Masks(model, "auto").multiple == 1
    with pytest.raises(ConfigError, match=r"does not work on cpu: .*; write auto or sdpa"):
        Masks(model, "flex_attention")
