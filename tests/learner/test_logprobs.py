"""Chunked log-probs: equal to the plain computation, and never more than a chunk of logits alive."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from mm_grpo.learner import logprobs
from mm_grpo.learner.logprobs import token_logprobs

Tensors = tuple[Tensor, ...]


def plain(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, banned: list[int], teacher: Tensor
) -> Tensors:
    """Log-probs of the targets, entropies, and KL from the distributions of the teacher's states."""
    keep = torch.ones(len(head), dtype=torch.bool)
    keep[banned] = False
    logp, q = (
        (states @ head.T / temperature).masked_fill(~keep, -1e9).log_softmax(-1)
        for states in (hidden, teacher)
    )
    entropy = -(logp.exp() * logp)[:, keep].sum(-1)
    kl = (q.detach().exp() * (q.detach() - logp)).sum(-1)
    return logp.gather(1, targets[:, None])[:, 0], entropy, kl


@pytest.mark.parametrize("chunk_bytes", [1, 4 * 3 * 26, 1 << 20])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("taught", [False, True])
def test_values_and_gradients_equal_plain_ones(taught: bool, chunk_bytes: int, temperature: float) -> None:
    """With gradients of all results, and a teacher far from the student."""
    torch.manual_seed(0)
    scale = 3 if taught else 1
    hidden, head, teacher = scale * torch.randn(10, 6), scale * torch.randn(50, 6), 3 * torch.randn(10, 6)
    targets, banned, scales = torch.arange(10) + 5, [0, 3, 49], torch.randn(3, 10)
    results = []
    for chunked in (True, False):
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        if chunked:
            options: Any = {"banned": banned, "chunk_bytes": chunk_bytes, "temperature": temperature}
            found = token_logprobs(h, w, targets, q_hidden=teacher if taught else None, **options)
        else:
            found = plain(h, w, targets, temperature, banned, teacher)
        values = found[: 2 + taught]
        torch.stack([(s * v).sum() for s, v in zip(scales, values, strict=False)]).sum().backward()
        results.append((*(v.detach() for v in values), h.grad, w.grad))
    for got, want in zip(*results, strict=True):
        assert got is not None and want is not None
        torch.testing.assert_close(got, want, atol=1e-4 if taught else 2e-6, rtol=1e-4 if taught else 1e-5)
    assert results[0][-1] is not None and not results[0][-1][banned].any()


def test_kl_by_hand_in_many_tiles() -> None:
    """Three entries, of which the last is banned: the teacher has 3/4 and 1/4, the student a half of each."""
    head = torch.tensor([[1.0, 0.0], [0.0, 1.0], [5.0, 5.0]], requires_grad=True)
    hidden = torch.tensor([[2.0, 2.0], [-1.0, -1.0]], requires_grad=True)
    teacher = torch.tensor([[2 * math.log(3) + 7, 7.0], [-1.0, -1.0]], requires_grad=True)
    options: Any = {"temperature": 2.0, "banned": [2], "chunk_bytes": 1, "q_hidden": teacher}
    logp, _, kl = token_logprobs(hidden, head, torch.tensor([0, 1]), **options)
    assert logp.tolist() == pytest.approx([-math.log(2)] * 2)
    # 3/4 log(3/2) + 1/4 log(1/2)
    assert kl.tolist() == pytest.approx([0.1308120, 0.0], abs=1e-6)
    kl.sum().backward()
    assert hidden.grad is not None and head.grad is not None and teacher.grad is None
    # (p - q) / temperature = (-1/8, 1/8) through the head, and times the states
    assert hidden.grad.flatten().tolist() == pytest.approx([-0.125, 0.125, 0.0, 0.0], abs=1e-6)
    assert head.grad.flatten().tolist() == pytest.approx([-0.25, -0.25, 0.25, 0.25, 0.0, 0.0], abs=1e-6)


def test_a_frozen_head_gets_no_gradient_and_a_frozen_body_none() -> None:
    h, w = torch.randn(3, 4, requires_grad=True), torch.randn(9, 4)
    token_logprobs(h, w, torch.tensor([1, 2, 3]))[0].sum().backward()
    assert h.grad is not None and w.grad is None
    h2, w2 = torch.randn(3, 4), torch.randn(9, 4, requires_grad=True)
    token_logprobs(h2, w2, torch.tensor([1, 2, 3]))[0].sum().backward()
    assert h2.grad is None and w2.grad is not None


class Live(torch.utils._python_dispatch.TorchDispatchMode):
    """The most bytes that tensors made under it held at once; views of what was there before are not counted."""

    def __init__(self, *before: torch.Tensor) -> None:
        super().__init__()
        self.before = {t.untyped_storage().data_ptr() for t in before}
        self.refs: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, (tuple, list)) else [out]
        self.refs += [weakref.ref(t) for t in made if isinstance(t, torch.Tensor)]
        self.refs = [r for r in self.refs if r() is not None]
        storages = [t.untyped_storage() for r in self.refs if (t := r()) is not None]
        held = {s.data_ptr(): s.nbytes() for s in storages}
        self.most = max(self.most, sum(n for place, n in held.items() if place not in self.before))
        return out


def test_memory_is_one_chunk_beside_gradients_and_states() -> None:
    """All logits would take 16 MB; one chunk and what is as large as the states come to less than 1."""
    rows, width, chunk = 512, 8, 1 << 19
    h = torch.randn(rows, width).bfloat16().requires_grad_()
    w = torch.randn(8000, width).bfloat16().requires_grad_()
    targets = torch.arange(rows)
    with Live(h, w) as live:
        logp, entropy, _ = token_logprobs(h, w, targets, chunk_bytes=chunk)
        (logp.sum() + entropy.sum()).backward()
    states = 20 * 4 * rows + 2 * 4 * h.numel()  # running sums of each row, and the gradient of the states
    assert w.grad is not None
    most = live.most - w.grad.numel() * w.grad.element_size()
    assert 0.3 * chunk < most <= chunk + states


def test_a_stretch_of_the_vocabulary_may_be_banned_as_a_whole() -> None:
    # tiles of two entries; the first and the last hold nothing legal
    head = torch.tensor([[9.0], [9.0], [0.0], [1.0], [9.0], [9.0]])
    hidden, target = torch.tensor([[1.0]]), torch.tensor([3])
    logp, entropy, _ = token_logprobs(hidden, head, target, banned=[0, 1, 4, 5], chunk_bytes=24)
    p = 1 / (1 + math.exp(-1))  # of e and 1
    assert float(logp) == pytest.approx(math.log(p), abs=1e-6)
    assert float(entropy) == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), abs=1e-6)


@pytest.mark.parametrize("chunk_bytes", [64, 1 << 20])
def test_large_logits_keep_their_digits_and_bf16_sums_are_fp32(chunk_bytes: int) -> None:
    torch.manual_seed(2)
    hidden = (100 * torch.randn(64, 8)).bfloat16()
    head, targets = torch.randn(40, 8).bfloat16(), torch.arange(64) % 40
    expected = plain(hidden.double(), head.double(), targets, 1.0, [0], hidden.double())
    h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    logp, entropy, _ = token_logprobs(h, w, targets, banned=[0], chunk_bytes=chunk_bytes)
    legal = targets > 0
    # a bf16 product of size 300 is off by up to 1
    assert float((logp - expected[0])[legal].detach().abs().max()) < 4
    assert float((entropy - expected[1]).detach().abs().max()) < 1
    logp[legal].sum().backward()
    assert h.grad is not None and w.grad is not None and w.grad.dtype == torch.bfloat16
    w2 = head.double().requires_grad_()
    wanted = plain(hidden.double(), w2, targets, 1.0, [0], hidden.double())[0]
    (exact,) = torch.autograd.grad(wanted[legal].sum(), w2)
    assert float((w.grad - exact).norm() / exact.norm()) < 0.02


@pytest.mark.parametrize(("rows", "chunk_bytes"), [(1, 1 << 20), (1024, 1)], ids=["of states", "of entries"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_many_tiles_are_summed_in_float32(
    dtype: torch.dtype, rows: int, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in one tile, up to a rounding, over 512 of one state or of one entry; of sums in bfloat16 little is left."""
    torch.manual_seed(3)
    given = torch.randn(512, 4).to(dtype), torch.randn(512, 4).to(dtype)
    found: list[list[torch.Tensor | None]] = []
    for most, chunk in ((1024, 1 << 24), (rows, chunk_bytes)):
        monkeypatch.setattr(logprobs, "ROWS", most)
        h, w = (x.clone().requires_grad_() for x in given)
        token_logprobs(h, w, torch.arange(512), chunk_bytes=chunk)[0].sum().backward()
        found.append([h.grad, w.grad])
    for want, got in zip(*found, strict=True):
        assert want is not None and got is not None
        off = float((got - want).norm() / want.norm())
        assert off < (1e-5 if dtype == torch.float32 else 5e-3)
