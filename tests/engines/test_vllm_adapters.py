"""Adapters as factors in vLLM's own LoRA layers: the engine samples from the learner's policy, not from its merge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engines.test_vllm_lost_updates import Run
from torch import Tensor

from mm_grpo.errors import GuardStop
from mm_grpo.rollout.vllm import adapters

UPDATES = 20
Change = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


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
    run = Run(models[family], 1e-3, "float32", lora=True, vision=vision)
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


def test_in_bfloat16_vllm_moves_as_the_learner_does(models: dict[str, Path]) -> None:
    moves: dict[bool, list[tuple[Tensor, Tensor]]] = {True: [], False: []}
    for factors in (True, False):
        run = Run(models["qwen2_5_vl"], 1e-5, lora=True, factors=factors)
        assert bool(run.learner.factored) is factors
        before = scores(run)
        for version in range(1, UPDATES + 1):
            run.update(version)
            after = scores(run)
            moves[factors].append((after[0] - before[0], after[1] - before[1]))
    print(
        {
            k: [
                (
                    round(float(a.abs().mean()), 5),
                    round(float(b.abs().mean()), 5),
                    round(float(torch.corrcoef(torch.stack([a, b]))[0, 1]), 3),
                )
                for a, b in v
            ]
            for k, v in moves.items()
        }
    )


def lost(sent: dict[str, Tensor]) -> Mapping[str, Tensor]:
    return {}


def partial(sent: dict[str, Tensor]) -> Mapping[str, Tensor]:
    return {name: factor for name, factor in sent.items() if ".layers.1." not in name}


def swapped(sent: dict[str, Tensor]) -> Mapping[str, Tensor]:
    one, other = (
        f"base_model.model.model.language_model.layers.{i}.mlp.up_proj.lora_B.weight" for i in (0, 1)
    )
    return {**sent, one: sent[other], other: sent[one]}


def stale() -> Change:
    @cache
    def first(name: str) -> Any:
        return {}

    def change(sent: dict[str, Tensor]) -> Mapping[str, Tensor]:
        for name, factor in sent.items():
            first(name).setdefault("", factor.clone())
        return {name: first(name)[""] if "o_proj" in name else factor for name, factor in sent.items()}

    return change


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "change", [lost, partial, swapped, stale()], ids=["lost", "partial", "swapped", "stale"]
)
def test_factors_that_are_not_put_in_whole_stop_the_run(
    change: Change, dtype: str, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(models["qwen2_5_vl"], 1e-4, dtype, lora=True)
    put, last = adapters.put, dict[str, Tensor]()

    def changed(model: Any, factors: Mapping[str, Tensor]) -> None:
        last.update(change(dict(factors)))
        if last:
            put(model, last)

    monkeypatch.setattr(adapters, "put", changed)
    with pytest.raises(GuardStop, match=r"lora_[AB]"):
        for version in range(1, 4):
            run.update(version)
