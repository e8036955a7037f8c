"""Attention block by block against one dense mask: outputs and gradients, for even and uneven rows."""

from __future__ import annotations

import pytest
import torch
from helpers.steps import segments_of
from torch.nn.functional import scaled_dot_product_attention

from mm_grpo.learner.attention import prefix_attention, prefix_layout
from mm_grpo.learner.pack import PADDING, attention_mask

ROWS = {
    "even": [[40, 9, 9, 9, 9]],
    "uneven": [[40, 9, 3, 12, 1]],
    "rows": [[40, 9, 9, 9, 9], [31, 20, 2, 8]],
    "rows-alike": [[40, 9, 9, 9], [40, 9, 9, 9]],
}


@pytest.mark.parametrize("name", ROWS)
def test_blocks_equal_the_dense_mask(name: str) -> None:
    segments = segments_of(ROWS[name])
    layout = prefix_layout(segments)
    assert layout is not None and layout.batch.even == (name == "even")
    torch.manual_seed(0)
    shapes = [(len(segments), heads, segments.shape[1], 8) for heads in (4, 2, 2)]
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    # layers hand over views of [B, N, heads, d], and so are not contiguous
    inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    weight = torch.randn(shapes[0], dtype=torch.float64) * (segments != PADDING)[:, None, :, None]
    found = []
    for run in (
        lambda q, k, v: prefix_attention(torch.nn.Module(), q, k, v, None, scaling=0.3, prefix=layout)[0],
        lambda q, k, v: scaled_dot_product_attention(
            q, k, v, attn_mask=attention_mask(segments), scale=0.3, enable_gqa=True
        ).transpose(1, 2),
    ):
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = run(*leaves).transpose(1, 2) * (weight != 0)
        found.append([out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)])
    for ours, dense in zip(*found, strict=True):
        assert dense.abs().max() > 0.01
        torch.testing.assert_close(ours, dense, rtol=1e-10, atol=1e-12)


def test_one_mask_is_taken_where_it_is_no_dearer() -> None:
    assert prefix_layout(segments_of([[14, 1, 60]])) is None
    assert prefix_layout(segments_of([[14, 256, 256]])) is not None
