"""The learner on a GPU: large tiles, products in float32, no waits in a pack, the kernel of linear attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.steps import config_for, make_groups

from mm_grpo.learner.learner import Learner
from mm_grpo.learner.linear_attention import prepare_linear_layers
from mm_grpo.learner.logprobs import chunk_bytes_of, token_logprobs
from mm_grpo.learner.model import load_model, resolve_device
from mm_grpo.learner.transformers_patches import torch_rule
from mm_grpo.processors.base import load_processor
from mm_grpo.rollout.weights import digest, digests


@contextmanager
def no_waits() -> Iterator[None]:
    """Whatever makes the host wait for the GPU is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_log_probs_are_those_of_products_in_float32_within_the_memory_that_is_counted() -> None:
    torch.manual_seed(0)
    tokens, width, vocabulary = 6000, 512, 50_000
    h = (2 * torch.randn(tokens, width, device="cuda")).bfloat16().requires_grad_()
    w = torch.randn(vocabulary, width, device="cuda").bfloat16().requires_grad_()
    targets, banned = torch.randint(100, vocabulary, (tokens,), device="cuda"), [0, 9, 49_999]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logp, entropy, _ = token_logprobs(h, w, targets, banned=banned)
    with no_waits():
        (logp.sum() + 0.1 * entropy.sum()).backward()
    states = 4 * tokens * (2 * width + 20) + 2 * vocabulary * width
    assert torch.cuda.max_memory_allocated() - before <= chunk_bytes_of(gpu=True) + states + 2**24
    logits = h[:64].detach().double() @ w.detach().double().T
    logits[:, banned] = -1e30
    want = logits.log_softmax(-1).gather(1, targets[:64, None])[:, 0]
    # products in bfloat16 are 0.25 off, at logits of 60
    assert float((logp[:64].detach() - want).abs().max()) < 1e-3
    assert h.grad is not None and w.grad is not None and not w.grad[banned].any()


def test_digests_are_a_cpus_and_come_at_once() -> None:
    tensors = [torch.randn(2048, 300), torch.randn(7).bfloat16(), torch.randn(512, 8).bfloat16()]
    assert digests([tensor.cuda() for tensor in tensors]) == [digest(tensor) for tensor in tensors]


def test_a_model_is_read_onto_its_gpu(models: dict[str, Path]) -> None:
    config = config_for(models["qwen3_vl"], model={"path": str(models["qwen3_vl"]), "device": "cuda:0"}).model
    model = load_model(config, load_processor(config.path).family)
    tensors = [*model.parameters(), *model.buffers()]
    assert {tensor.device for tensor in tensors} == {torch.device("cuda:0")}
    assert resolve_device("cuda:0").index == torch.cuda.current_device()


def test_updates_by_fla_kernels_are_torchs(models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fla", reason="flash-linear-attention is not installed")
    path = models[tiny.HYBRID]
    processor, norms = load_processor(str(path)), []
    for kernel in (True, False):
        if not kernel:
            monkeypatch.setattr("mm_grpo.learner.linear_attention.fla_rule", lambda: None)
        config = config_for(
            path,
            model={"path": str(path), "device": "cuda", "dtype": "bfloat16"},
            optim={"gradient_checkpointing": True, "max_grad_norm": 0.0},
        )
        model = load_model(config.model, processor.family)
        plain = torch_rule(model.model.language_model.layers[0].linear_attn)
        assert (prepare_linear_layers(model) is plain) != kernel
        report = Learner(model, processor, config, 10).update(make_groups(processor))
        norms.append(report.updates[0].grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=0.02)
