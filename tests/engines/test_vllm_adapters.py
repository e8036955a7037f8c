"""Adapters as factors in vLLM's own LoRA layers: the engine samples from the learner's policy, not from its merge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engines.test_vllm_lost_updates import Run
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
    ("family", "vision"),
    [("qwen2_5_vl", True), pytest.param("internvl", False, marks=pytest.mark.slow)],
)
def test_engine_and_learner_agree_after_every_update(
    family: str, vision: bool, models: dict[str, Path]
) -> None:
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


def test_the_canary_alone_catches_factors_that_are_lost(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(models["qwen2_5_vl"], 1e-3, "float32", lora=8)
    assert run.update(1).problem is None
    monkeypatch.setattr(adapters, "put", lambda model, factors: None)
    monkeypatch.setattr(
        adapters, "read_back", lambda model, factors: {n: digest(f) for n, f in factors.items()}
    )
    with pytest.raises(GuardStop, match="the same to the last bit"):
        run.update(2)


def lost(sent: Factors, first: Factors) -> Factors:
    return first


def swapped(sent: Factors, first: Factors) -> Factors:
    one, other = (
        f"base_model.model.model.language_model.layers.{i}.mlp.up_proj.lora_B.weight" for i in (0, 1)
    )
    return {**sent, one: sent[other], other: sent[one]}


@pytest.mark.parametrize("change", [lost, swapped])
def test_factors_that_are_not_put_in_whole_stop_the_run(
    change: Callable[[Factors, Factors], Factors],
    models: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
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
