"""Adapters as factors in vLLM's own LoRA layers: the engine samples from the learner's policy, not from its merge."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engines.test_vllm_lost_updates import Run
from torch import Tensor

from mm_grpo.errors import GuardStop
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.lora import merged_tensors, sent_factors
from mm_grpo.rollout.served.plugin import Account
from mm_grpo.rollout.vllm import adapters
from mm_grpo.rollout.vllm.engine import VLLMEngine
from mm_grpo.rollout.weights import digest

UPDATES = 8
Factors = dict[str, Tensor]


def scores(run: Run) -> tuple[Tensor, Tensor]:
    """Log-probs [T] of one completion with its image, by the learner with its adapters and by vLLM."""
    prompt, ids = run.prompts[0], tuple(range(20, 44))
    return torch.tensor(run.learner.score(prompt, [ids])[0]), torch.tensor(run.engine.score(prompt, ids))


@pytest.mark.parametrize(
    ("family", "vision"),
    [
        ("qwen2_5_vl", True),
        pytest.param("qwen2_vl", True, marks=pytest.mark.slow),
        pytest.param("qwen3_vl", True, marks=pytest.mark.slow),
        pytest.param("internvl", False, marks=pytest.mark.slow),
    ],
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
    assert (ours - base).abs().max() > 0.1


def test_in_bfloat16_vllm_moves_as_far_as_the_adapters_say(models: dict[str, Path]) -> None:
    run, rng = Run(models["qwen2_5_vl"], 1e-4, lora=8), random.Random(3)
    completions = [tuple(rng.choices(range(20, 250), k=24)) for _ in range(8)]

    def moved() -> tuple[Tensor, Tensor]:
        """Log-probs of the policy in float32, and of vLLM."""
        model = copy.deepcopy(run.learner.model).float()
        exact = Learner(model, run.processor, run.learner.config, 1)
        plain = [exact.score(prompt, completions) for prompt in run.prompts]
        theirs = [[run.engine.score(prompt, ids) for ids in completions] for prompt in run.prompts]
        return torch.tensor(plain).flatten(), torch.tensor(theirs).flatten()

    before = moved()
    for version in range(1, 6):
        assert run.update(version).problem is None
    exact, theirs = (after - first for after, first in zip(moved(), before, strict=True))
    assert torch.corrcoef(torch.stack([exact, theirs]))[0, 1] > 0.95
    assert 0.85 < (exact * theirs).sum() / (exact * exact).sum() < 1.15


def test_who_takes_the_engine_over_without_adapters_samples_without(models: dict[str, Path]) -> None:
    run = Run(models["qwen2_5_vl"], 1e-3, "float32", lora=8)
    assert run.update(1).problem is None
    taken = VLLMEngine(run.engine.settings, run.processor)  # type: ignore[attr-defined]
    taken.update_weights(merged_tensors(run.learner.model), 0)
    prompt, ids = run.prompts[0], tuple(range(20, 44))
    ours, theirs = torch.tensor(run.learner.score(prompt, [ids])[0]), torch.tensor(taken.score(prompt, ids))
    assert (ours - theirs).abs().max() < 1e-5


@pytest.mark.parametrize(("dtype", "updates"), [("float32", 1), ("bfloat16", 8)])
def test_the_canary_alone_catches_factors_that_are_lost(
    dtype: str, updates: int, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(models["qwen2_5_vl"], 1e-3, dtype, lora=8)
    assert run.update(1).problem is None
    monkeypatch.setattr(adapters, "put", lambda model, factors: None)
    monkeypatch.setattr(
        adapters, "read_back", lambda model, factors: {n: digest(f) for n, f in factors.items()}
    )
    with pytest.raises(GuardStop, match="the same to the last bit"):
        for version in range(2, 2 + updates):
            run.update(version)


def lost(sent: Factors, first: Factors) -> Factors:
    return first


def partial(sent: Factors, first: Factors) -> Factors:
    return {**sent, **{name: factor for name, factor in first.items() if ".layers.1." in name}}


def stale(sent: Factors, first: Factors) -> Factors:
    return {**sent, **{name: factor for name, factor in first.items() if "o_proj.lora_A" in name}}


def swapped(sent: Factors, first: Factors) -> Factors:
    one, other = (
        f"base_model.model.model.language_model.layers.{i}.mlp.up_proj.lora_B.weight" for i in (0, 1)
    )
    return {**sent, one: sent[other], other: sent[one]}


@pytest.mark.parametrize("change", [lost, partial, stale, swapped])
def test_factors_that_are_not_put_in_whole_stop_the_run(
    change: Callable[[Factors, Factors], Factors],
    models: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(models["qwen2_5_vl"], 1e-4, lora=8)
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
        account.note(1, name, factor)
    model(account.end)
    model(account.put_factors)
    return account.digests
