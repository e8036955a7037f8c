"""Adapters as factors in vLLM's own LoRA layers: the engine samples from the learner's policy, not from its merge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines.test_vllm_lost_updates import Run, blind
from torch import Tensor

from mm_grpo.errors import GuardStop
from mm_grpo.learner.lora import merged_tensors, sent_factors
from mm_grpo.rollout.served.plugin import Account
from mm_grpo.rollout.vllm import adapters
from mm_grpo.rollout.vllm.engine import VLLMEngine
from mm_grpo.rollout.weights import digest

UPDATES = 4
Factors = dict[str, Tensor]


def scores(run: Run) -> tuple[Tensor, Tensor]:
    """Log-probs [T] of one completion with its image, by the learner with its adapters and by vLLM."""
    prompt, ids = run.prompts[0], tuple(range(20, 44))
    return torch.tensor(run.learner.score(prompt, [ids])[0]), torch.tensor(run.engine.score(prompt, ids))


@pytest.mark.parametrize(
    ("family", "vision"), [("qwen2_5_vl", True), pytest.param("internvl", False, marks=pytest.mark.slow)]
)
def test_engine_and_learner_agree_after_updates(family: str, vision: bool, models: dict[str, Path]) -> None:
    run = Run(models[family], 1e-3, "float32", lora=8, vision=vision)
    base, _ = scores(run)
    assert run.learner.factored == set(run.learner.adapted_layers)
    whole = sum(p.numel() * 4 for p in run.learner.model.parameters())
    for version in range(1, UPDATES + 1):
        report = run.update(version)
        ours, theirs = scores(run)
        assert report.problem is None
        assert report.bytes < whole / 3  # the factors alone
        assert (ours - theirs).abs().max() < 1e-5
    assert (ours - base).abs().max() > 0.05


def test_who_takes_the_engine_over_without_adapters_samples_without(models: dict[str, Path]) -> None:
    run = Run(models["qwen2_5_vl"], 1e-3, "float32", lora=8)
    assert run.update(1).problem is None
    taken = VLLMEngine(run.engine.settings, run.processor)  # type: ignore[attr-defined]
    taken.update_weights(merged_tensors(run.learner.model), 0)
    prompt, ids = run.prompts[0], tuple(range(20, 44))
    ours, theirs = torch.tensor(run.learner.score(prompt, [ids])[0]), torch.tensor(taken.score(prompt, ids))
    assert (ours - theirs).abs().max() < 1e-5


@pytest.mark.field_bug("adapter-not-sent")
def test_the_canary_catches_lost_factors(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(models["qwen2_5_vl"], 1e-3, "float32", lora=8)
    assert run.update(1).problem is None
    monkeypatch.setattr(adapters, "put", lambda model, factors: None)
    monkeypatch.setattr(adapters, "read_back", lambda model, sent: {n: digest(f) for n, f in sent.items()})
    with pytest.raises(GuardStop, match="the same to the last bit"):
        run.update(2)


def turned(sent: Factors) -> Factors:
    return {name: -factor if "lora_B" in name else factor for name, factor in sent.items()}


@pytest.mark.parametrize(
    "change", [turned, lambda sent: {n: f * (".mlp." not in n) for n, f in sent.items()}]
)
def test_the_canary_alone_catches_factors_that_are_wrong_from_the_first_update(
    change: Callable[[Factors], Factors], models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, where the gap stays far below its limit."""
    run = Run(models["qwen2_5_vl"], 3e-4, "bfloat16", lora=8)
    blind(run, monkeypatch)
    put = adapters.put
    monkeypatch.setattr(adapters, "put", lambda model, factors: put(model, change(dict(factors))))
    problems = (run.update(version).problem for version in range(1, 11))
    assert "times as far in that direction" in next(filter(None, problems))


def lost(sent: Factors, first: Factors) -> Factors:
    return first


def swapped(sent: Factors, first: Factors) -> Factors:
    layers = "base_model.model.model.language_model.layers"
    one, other = (f"{layers}.{i}.mlp.up_proj.lora_B.weight" for i in (0, 1))
    return {**sent, one: sent[other], other: sent[one]}


@pytest.mark.parametrize("change", [lost, swapped])
def test_factors_that_are_not_put_in_whole_stop_the_run(
    change: Callable[[Factors, Factors], Factors], models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(models["qwen2_5_vl"], 1e-4, "float32", lora=8)
    assert run.update(1).problem is None
    first, put = dict(run.engine._factors), adapters.put  # type: ignore[attr-defined]
    first = {name: factor.clone() for name, factor in first.items()}
    assert account_of(run, first) == {name: digest(factor) for name, factor in first.items()}
    monkeypatch.setattr(adapters, "put", lambda model, factors: put(model, change(dict(factors), first)))
    with pytest.raises(GuardStop, match=r"arrived changed.*lora_[AB]"):
        run.update(2)
    sent = dict(sent_factors(run.learner.model, run.learner.factored))
    assert account_of(run, sent) != {name: digest(factor) for name, factor in sent.items()}


def account_of(run: Run, factors: Factors) -> dict[str, str]:
    """What a server's worker with this vLLM says that it holds, once it was sent `factors`."""
    account, model = Account(), run.engine._handle.llm.apply_model  # type: ignore[attr-defined]
    account.begin()
    for name, factor in factors.items():
        account.note(name, factor)
    model(account.end)
    model(account.put_factors)
    return account.digests


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_of_a_group_compares_its_own_part(rank: int, dtype: torch.dtype) -> None:
    """vLLM's own layers cut the factors: a worker of two has half of the queries, keys, values, and of the inputs."""
    from vllm.lora.layers.column_parallel_linear import MergedQKVParallelLinearWithLoRA as Fused
    from vllm.lora.layers.row_parallel_linear import RowParallelLinearWithLoRA as Rows

    def layer(kind: type, outputs: tuple[int, ...], inputs: int, **values: object) -> Any:
        made: Any = kind.__new__(kind)
        torch.nn.Module.__init__(made)
        made.__dict__.update(tp_rank=rank, tp_size=2, n_slices=len(outputs), **values)
        made.lora_a_stacked = tuple(torch.zeros(1, 1, 4, inputs, dtype=dtype) for _ in outputs)
        made.lora_b_stacked = tuple(torch.zeros(1, 1, rows, 4, dtype=dtype) for rows in outputs)
        return made

    qkv = layer(Fused, (8, 4, 4), 12, output_ids=(rank,) * 3, output_slices=(8, 4, 4))
    o = layer(Rows, (12,), 8, input_size=8)
    sizes = {"q_proj": (12, 16), "k_proj": (12, 8), "v_proj": (12, 8), "o_proj": (16, 12)}
    factors = {}
    for name, (inputs, outputs) in sizes.items():
        factors[f"{adapters.PREFIX}x.{name}.lora_A.weight"] = torch.randn(4, inputs).to(dtype)
        factors[f"{adapters.PREFIX}x.{name}.lora_B.weight"] = torch.randn(outputs, 4).to(dtype)
    pairs = list(zip(*[iter(factors.values())] * 2, strict=True))
    qkv.set_lora(0, *(list(part) for part in zip(*pairs[:3], strict=True)))
    o.set_lora(0, *pairs[3])
    manager = SimpleNamespace(
        lora_index_to_id=[adapters.NUMBER],
        modules={"x.qkv_proj": qkv, "x.o_proj": o},
        packed_modules={"x.qkv_proj": ["x.q_proj", "x.k_proj", "x.v_proj"]},
    )
    model = SimpleNamespace(lora_manager=manager)
    whole = {name: digest(factor) for name, factor in factors.items()}
    assert adapters.read_back(model, factors) == whole
    for buffers, number, name in (
        (qkv.lora_b_stacked, 1, "k_proj.lora_B"),
        (qkv.lora_a_stacked, 2, "v_proj.lora_A"),
        (o.lora_a_stacked, 0, "o_proj.lora_A"),
    ):
        buffers[number][0, 0, 3, 1] *= -1
        held = adapters.read_back(model, factors)
        assert [n for n in whole if held[n] != whole[n]] == [f"{adapters.PREFIX}x.{name}.weight"]
        buffers[number][0, 0, 3, 1] *= -1
