"""One copy of a frozen base: the learner's parameters are views of vLLM's tensors, and learn as they did."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.configs import small_config
from safetensors.torch import load_file
from torch import Tensor

from mm_grpo.build import Parts, build_parts
from mm_grpo.learner.lora import frozen_base
from mm_grpo.rollout.vllm import internals
from mm_grpo.rollout.vllm.engine import VLLMEngine
from mm_grpo.rollout.vllm.launch import can_free_cache_alone
from mm_grpo.types import Completion, Group

IDS = tuple(range(20, 44))


@pytest.fixture
def built(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Parts]:
    """Parts of a run with adapters, whose vLLM leaves weights as they are on a GPU; no other test has these lengths."""
    monkeypatch.setattr("vllm._custom_ops._supports_onednn", False)
    monkeypatch.setattr("vllm.model_executor.layers.utils.check_cpu_sgl_kernel", lambda *_: False)

    def build(length: int) -> Parts:
        config = small_config(
            models["qwen2_5_vl"],
            model={"dtype": "bfloat16", "device": "cpu", "lora": {"rank": 8}},
            rollout={
                "engine": "vllm",
                "vllm": {"max_model_len": length},
                "prompts_per_step": 1,
                "num_generations": 4,
                "max_completion_length": 24,
            },
            optim={"learning_rate": 1e-3},
        )
        torch.manual_seed(0)
        return build_parts(config, 10, [])

    return build


def update(parts: Parts, version: int) -> None:
    prompt = parts.processor.prompt(tiny.sample("r", "what", (tiny.picture(1),)))
    rng = random.Random(version)
    completions = tuple(
        Completion(tuple(rng.choices(range(20, 250), k=24)), (-5.0,) * 24, "", "stop", seed)
        for seed in range(4)
    )
    group = Group(0, prompt, completions, (0.0,) * 4, (1.0, -1.0, 0.5, -0.5))
    if version == 1:
        parts.sync.calibrate(prompt)
    canary = parts.sync.canary([group])
    parts.learner.update([group])
    assert parts.sync.update(version, canary).problem is None


def gap(parts: Parts) -> float:
    """Largest difference of engine and learner on one completion with its image, in nats."""
    prompt = parts.processor.prompt(tiny.sample("r", "what", (tiny.picture(1),)))
    ours, theirs = parts.learner.score(prompt, [IDS])[0], parts.engine.score(prompt, IDS)
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def weights(parts: Parts) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in parts.model.named_parameters()}


def test_a_shared_base_learns_to_the_bit_what_a_base_of_its_own_does(
    built: Callable[[int], Parts], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(VLLMEngine, "share", lambda self, parameters: 0)
        apart = built(290)
        first = weights(apart)
        for version in range(1, 4):
            update(apart, version)
        expected = weights(apart)
    loads: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(internals, "reload", lambda *a, load=internals.reload: (loads.append(a), load(*a)))
        shared = built(294)
    assert len(loads) == 1  # the base is sent once
    lent = shared.engine._handle.lent  # type: ignore[attr-defined]
    base = frozen_base(shared.model)
    assert sum(p.nbytes for p in lent) > 0.9 * sum(p.nbytes for p in base.values())
    assert all(torch.equal(first[name], p) for name, p in weights(shared).items())
    places = {p.data_ptr() for p in lent}
    for version in range(1, 4):
        update(shared, version)
    assert gap(shared) < 0.05
    found = weights(shared)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert any(not torch.equal(first[name], found[name]) for name in first)

    # an update with all tensors, as after a failure, leaves them the same, and where they are
    shared.sync._ledger.forget()
    update(shared, 4)
    assert {p.data_ptr() for p in lent} == places
    frozen = {name: p for name, p in shared.model.named_parameters() if not p.requires_grad}
    assert all(torch.equal(p, first[name]) for name, p in frozen.items())
    shared.learner.save(tmp_path / "model")
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert torch.equal(saved["model.embed_tokens.weight"], first["model.language_model.embed_tokens.weight"])

    # who takes the engine over leaves the first its own weights
    other = built(294)
    with torch.no_grad():
        for parameter in other.engine._handle.lent:  # type: ignore[attr-defined]
            parameter.zero_()
    assert all(
        torch.equal(p, first[name]) for name, p in shared.model.named_parameters() if not p.requires_grad
    )


def test_a_lent_base_stays_while_keys_and_values_sleep() -> None:
    import vllm  # seconds, in the processes that run this file alone

    called: list[Any] = []
    parameter = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    engine = SimpleNamespace(release_kv_cache_memory=lambda: called.append("cache"), step=lambda: None)
    llm = SimpleNamespace(llm_engine=engine, sleep=lambda level: called.append(level), wake_up=called.append)
    handle: Any = SimpleNamespace(llm=llm, lent=[parameter], asleep=set(), fault=None)
    internals.sleep(handle, 2)
    assert (called, handle.asleep) == ([0, "cache"], {"kv_cache"})
    internals.wake(handle)
    assert (called[2:], handle.asleep) == ([["kv_cache"]], set())
    assert can_free_cache_alone() == hasattr(vllm.LLMEngine, "release_kv_cache_memory")
