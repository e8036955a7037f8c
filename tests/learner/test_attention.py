"""Attention block by block against one dense mask: outputs and gradients, for rows of many shapes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.steps import segments_of
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mm_grpo.learner.attention import Masks, prefix_attention, prefix_layout
from mm_grpo.learner.pack import PADDING, attention_mask
from mm_grpo.learner.pack import SEGMENTS_PER_GROUP as GROUP
from mm_grpo.learner.prompt_states import Prefixes, PromptState

RAGGED = [[[300, 5, 200, 7, 6], [10, 90, 3, 120], [280, 4, 4], [9, 1, 2]]]
"""Rows of several batches."""
CASES: dict[str, tuple[list[Any], set[int]]] = {
    "uneven": ([[40, 9, 3, 12, 1]], set()),
    "rows": ([[40, 9, 9, 9, 9], [31, 20, 2, 8]], set()),
    "groups and rows": ([[[40, 9, 3], [12, 20, 2]], [[50, 8, 8]]], set()),
    "ragged": (RAGGED, set()),
    "apart, alone": ([[40, 9, 9, 9]], {0}),
    "apart, alone and uneven": ([[40, 9, 3, 12]], {0}),
    "apart, several": ([[[40, 9, 9], [31, 20, 2], [12, 3, 8]]], {0, 2}),
    "apart, one row of two": ([[[40, 9, 9]], [[10, 2, 3], [31, 20, 2]]], {1}),
    "apart, ragged": (RAGGED, {0, 1}),
}
"""Rows, and the groups whose prompts are run apart."""


@pytest.mark.parametrize("dense", [False, True], ids=["blocks", "mask"])
@pytest.mark.parametrize("name", CASES)
def test_blocks_equal_the_dense_mask_also_after_prompts_that_are_run_apart(name: str, dense: bool) -> None:
    """Outputs and gradients of all else in the row, and those of the prompts' keys and values."""
    rows, numbers = CASES[name]
    segments = segments_of(rows)
    batch = prefix_layout(segments).batch
    assert (len(batch.prompts) > 1) == (len(batch.completions) > 1) == (rows is RAGGED)
    chosen = torch.tensor([n * GROUP for n in numbers])
    apart = torch.isin(segments, chosen)
    torch.manual_seed(0)
    q, k, v = (torch.randn(len(segments), h, segments.shape[1], 8, dtype=torch.float64) for h in (4, 2, 2))
    weight = torch.randn(q.shape, dtype=torch.float64)
    weight *= (~apart & (segments != PADDING))[:, None, :, None]

    own, before = (_left(mask) for mask in (~apart, apart))
    own_segments, kept_segments = _taken(segments, own), _taken(segments, before)
    width = kept_segments.shape[1]
    whole = torch.cat([kept_segments, own_segments], 1)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        module: Any = torch.nn.Module()
        module.layer_idx, module.num_key_value_groups = 7, 2
        places = [(b, s) for b, row in enumerate(segments) for s in chosen if bool((row == s).any())]
        states = [PromptState(int((segments[b] == s).sum())) for b, s in places]
        for state, (b, s) in zip(states, places, strict=True):
            part = segments[b] == s
            state.keep(7, lambda b=b, part=part: (k[b : b + 1, :, part], v[b : b + 1, :, part]))
        counts = [sum(b == number for b, _ in places) for number in range(len(segments))]
        layout = None if dense else prefix_layout(whole, before=width)
        mask = attention_mask(whole)[:, :, width:]
        q, k, v = (_taken(x.transpose(1, 2), own).transpose(1, 2) for x in (q, k, v))
        prefixes = Prefixes(states, counts, width) if states else None
        return prefix_attention(module, q, k, v, mask, scaling=0.3, prefix=layout, prefixes=prefixes)[0]

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = attention_mask(segments)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)
        return _taken(out.transpose(1, 2), own)

    found = []
    weight = _taken(weight.transpose(1, 2), own)
    for run in (ours, plain):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = run(*leaves) * (weight != 0)
        found.append([out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)])
    for mine, want in zip(*found, strict=True):
        assert want.abs().max() > 0.01
        torch.testing.assert_close(mine, want, rtol=1e-10, atol=1e-12)


def test_a_prompt_that_is_run_alone_keeps_its_own_places() -> None:
    """Of three, padded to a block, as a kernel of whole blocks asks for it."""
    module: Any = torch.nn.Module()
    module.layer_idx, state = 7, PromptState(3)
    q, k, v = (torch.randn(1, h, 8, 4) for h in (4, 2, 2))
    layout = prefix_layout(torch.tensor([[0] * 3 + [PADDING] * 5]))
    prefix_attention(module, q, k, v, None, prefix=layout, keep_prompt=state)
    pairs = zip(state.layers[7], (k, v), strict=True)
    assert all(torch.equal(kept, whole[:, :, :3]) for kept, whole in pairs)


@pytest.mark.parametrize("layers", [("full_attention", "sliding_attention"), None])
def test_windows_of_a_model_that_does_not_look_ahead_are_in_its_masks(layers: Any) -> None:
    model: Any = torch.nn.Module()
    text = SimpleNamespace(layer_types=layers, sliding_window=3, model_type="windowed")
    model.config = SimpleNamespace(get_text_config=lambda: text)
    masks, segments = Masks(model), segments_of([[2, 4, 1]])
    pack: Any = SimpleNamespace(whole_segments=segments)
    assert not masks.blocks and not masks.flex
    made = masks.of_pack(pack)["attention_mask"]
    seen = made["sliding_attention"] if layers else made
    assert torch.equal(seen, attention_mask(segments, window=3))
    assert not layers or torch.equal(made["full_attention"], attention_mask(segments))
    # the last of a completion of four, behind a prompt of two: itself and the two before it
    assert seen[0, 0, 5].int().tolist() == [0, 0, 0, 1, 1, 1, 0]


def _left(mask: Tensor) -> Tensor:
    """The columns of each row where `mask` is True, in order, and -1 behind."""
    found = [row.nonzero()[:, 0].tolist() for row in mask]
    width = max(map(len, found))
    return torch.tensor([row + [-1] * (width - len(row)) for row in found], dtype=torch.long)


def _taken(x: Tensor, columns: Tensor) -> Tensor:
    """[B, N, ...] at the columns of each row; PADDING where there is none, of other than segments 0."""
    index = columns.clamp(0).view(*columns.shape, *[1] * (x.ndim - 2)).expand(*columns.shape, *x.shape[2:])
    found = x.gather(1, index)
    fill = PADDING if x.ndim == 2 else 0
    return found.masked_fill((columns < 0).view(*columns.shape, *[1] * (x.ndim - 2)), fill)
