"""Estimates of memory, by hand and against what torch holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.steps import config_for, load

from mm_grpo.learner.learner import Learner, _with_checkpointing
from mm_grpo.learner.memory import (
    MemoryEstimate,
    ModelSizes,
    device_memory,
    kept_tokens,
    largest_pack,
    memory_estimate,
    memory_of_run,
    memory_sentence,
)
from mm_grpo.learner.optimizer import adamw
from mm_grpo.processors.base import load_processor

GB = 10**9
# Qwen2.5-VL-3B in bfloat16, in round numbers
LARGE = ModelSizes(
    weights=3_750_000_000,
    trained=3_750_000_000,
    numbers=2,
    layers=36,
    hidden=2048,
    heads=2048,
    inner=11008,
    vocabulary=151_936,
)


def test_one_gpu_by_hand() -> None:
    """A layer keeps 2 * 8 * 2048 + 10 * 2048 + 8 * 11008 = 141,312 bytes for a token, 83 GB over 36 layers."""
    found = memory_estimate(LARGE, tokens=16384, checkpointing=False)
    assert found.weights == 7_500_000_000 and found.reference == 0
    assert found.gradients == 15_000_000_000
    assert found.optimizer == 45_000_000_000  # two means and masters, 12 bytes each
    assert found.activations == 36 * 16384 * 141_312 == 83_349_209_088
    assert found.log_probs == 16384 * 6 * 2048 + 151_936 * 2 * 2048 + (64 << 20) == 890_765_312
    assert found.total == sum((7_500_000_000, 15_000_000_000, 45_000_000_000, 83_349_209_088, 890_765_312))
    kept = memory_estimate(LARGE, tokens=16384, checkpointing=True)
    # 36 inputs of 4,096 bytes for a token, and one layer in full
    assert kept.activations == 16384 * (36 * 4096 + 141_312) == 4_731_174_912


def test_eight_gpus_by_stage_by_hand() -> None:
    def at(stage: int, **options: Any) -> MemoryEstimate:
        return memory_estimate(LARGE, tokens=1, checkpointing=True, zero_stage=stage, processes=8, **options)

    assert (at(0).gradients, at(0).optimizer) == (15_000_000_000, 45_000_000_000)
    assert (at(1).gradients, at(1).optimizer) == (22_500_000_000, 5_625_000_000)
    # an eighth of 15 GB, and two buckets of 200 million fp32 numbers
    assert (at(2).gradients, at(2).optimizer) == (1_875_000_000 + 1_600_000_000, 5_625_000_000)
    assert (at(2, offload=True).gradients, at(2, offload=True).optimizer) == (1_600_000_000, 0)
    assert at(2, vllm=24 * GB).total - at(2).total == 24 * GB


def test_fp32_adapters_and_a_reference_by_hand() -> None:
    """fp32 weights are their own masters, but DeepSpeed's copies."""
    single = replace(LARGE, numbers=4, reference=LARGE.weights)
    found = memory_estimate(single, tokens=1, checkpointing=False)
    assert (found.weights, found.reference) == (15_000_000_000, 15_000_000_000)
    assert (found.gradients, found.optimizer) == (15_000_000_000, 30_000_000_000)
    assert found.activations == 36 * (24 * 2048 + 20 * 2048 + 16 * 11008)
    assert memory_estimate(single, tokens=1, checkpointing=False, zero_stage=1).optimizer == 45_000_000_000
    adapters = replace(LARGE, trained=10_000_000, head_is_trained=False)
    found = memory_estimate(adapters, tokens=1, checkpointing=False)
    assert (found.gradients, found.optimizer) == (40_000_000, 120_000_000)
    assert found.log_probs == 6 * 2048 + (64 << 20)


def test_the_sentence_names_parts_sum_and_remedies() -> None:
    found = memory_estimate(LARGE, tokens=16384, checkpointing=False)
    assert memory_sentence(found, 80 * GB, tokens=16384, checkpointing=False) == (
        "memory of one process, estimated: weights 7.5 GB + gradients 15.0 GB + optimizer 45.0 GB + activations of a "
        "pack of 16384 tokens without gradient checkpointing 83.3 GB + log-probs 0.9 GB = 151.7 GB of 80.0 GB: more "
        "than there is. What helps: optim.gradient_checkpointing=true, a smaller optim.max_tokens_per_pack, "
        "optim.offload_optimizer=true, more processes, model.lora"
    )
    small = memory_estimate(LARGE, tokens=16384, checkpointing=True)
    line = memory_sentence(small, 80 * GB, tokens=16384, checkpointing=True)
    assert line.endswith("with gradient checkpointing 4.7 GB + log-probs 0.9 GB = 73.1 GB of 80.0 GB")


@pytest.mark.parametrize(
    ("processes", "optim", "tokens"),
    [
        (1, {}, 4 * (1024 + 3 * 8)),  # all four prompts, with three completions of at most eight tokens
        (3, {}, 2 * (1024 + 3 * 8)),
        (1, {"updates_per_step": 4}, 1024 + 3 * 8),
        (1, {"max_tokens_per_pack": 500}, 500),
    ],
)
def test_a_pack_holds_no_more_than_an_update(processes: int, optim: dict[str, int], tokens: int) -> None:
    assert largest_pack(config_for("x", optim=optim), processes) == tokens


@pytest.mark.parametrize(
    ("most", "perception", "kept"),
    [(1048, 0.0, 0), (1047, 0.0, 1024), (2096, 0.1, 0), (2095, 0.1, 2048)],
)
def test_the_prompt_of_a_group_that_is_larger_than_a_pack_is_counted(
    most: int, perception: float, kept: int
) -> None:
    """1,024 tokens of prompt and three completions of 8; with the perception term all of it twice."""
    config = config_for("x", algorithm={"perception_coef": perception}, optim={"max_tokens_per_pack": most})
    assert kept_tokens(config) == kept
    found = memory_estimate(replace(LARGE, keys=256), tokens=1, checkpointing=True, kept=kept)
    # keys and values of 256 numbers in 36 layers: 2 bytes each, and 4 for the sums of their gradients
    assert found.kept_prompt == 2 * 6 * 256 * 36 * kept == 110_592 * kept
    assert found.total - memory_estimate(LARGE, tokens=1, checkpointing=True).total == found.kept_prompt


def test_layers_of_linear_attention_keep_what_their_rule_does(models: dict[str, Path]) -> None:
    """Two of three layers: one head of keys and two of values, 16 wide, so 64 channels; 64 hidden, 96 inner."""
    found = ModelSizes.of(load(models[tiny.HYBRID]))
    assert (found.layers, found.linear_layers) == (3, 2)
    assert found.linear_token == 4 * 4 * 64 + 4 * 2 * (8 * 16 + 5 * 16 + 5 * 64)
    around = 2 * (4 + 2 * 4) * 64 + 4 * 4 * 96
    whole = memory_estimate(found, tokens=10, checkpointing=False).activations
    assert whole == 10 * (3 * around + 5 * 4 * 64 + 2 * found.linear_token)
    kept = memory_estimate(found, tokens=10, checkpointing=True).activations
    assert kept == 10 * (3 * 4 * 64 + around + found.linear_token)


def test_sizes_are_read_from_a_model(models: dict[str, Path]) -> None:
    model = load(models["qwen2_vl"])
    text = model.config.get_text_config()
    found = ModelSizes.of(model)
    assert found.weights == found.trained == sum(p.numel() for p in model.parameters())
    assert (found.numbers, found.layers, found.hidden) == (4, text.num_hidden_layers, text.hidden_size)
    assert (found.inner, found.vocabulary) == (text.intermediate_size, text.vocab_size)
    model.requires_grad_(False)
    assert ModelSizes.of(model).trained == 0 and not ModelSizes.of(model).head_is_trained
    config = config_for(models["qwen2_vl"], algorithm={"beta": 0.1})
    tokens = largest_pack(config, 1)
    run = memory_of_run(model, config, processes=1, checkpointing=False, reference=model)
    assert run is not None and run.reference == run.weights == 4 * found.weights and run.vllm == 0
    assert run.log_probs == tokens * 8 * text.hidden_size + (64 << 20)
    nameless = SimpleNamespace(config=SimpleNamespace(get_text_config=SimpleNamespace), device=model.device)
    assert memory_of_run(nameless, config, processes=1, checkpointing=False) is None
    assert device_memory(torch.device("cpu")) > GB


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_those_that_torch_saves(dtype: torch.dtype) -> None:
    """What autograd keeps of transformers' Qwen2 layers: tensors of one storage count once, weights not at all."""
    from transformers import Qwen2Config, Qwen2Model

    config = Qwen2Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        attn_implementation="sdpa",
    )
    model = Qwen2Model(config).to(dtype)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = 512
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        states = model(torch.arange(tokens)[None] % 64, use_cache=False).last_hidden_state
    sizes = ModelSizes(1, 1, dtype.itemsize, 2, 64, 64, 160, 64)
    want = memory_estimate(sizes, tokens=tokens, checkpointing=False).activations
    measured = sum(kept.values())
    assert states.requires_grad
    assert want == pytest.approx(measured, rel=0.1), (want, measured)


@pytest.mark.parametrize(
    ("asked", "device", "able", "done"),
    [
        (None, "cuda", True, True),
        (None, "cpu", True, False),
        (None, "cuda", False, False),  # null asks for nothing that the model does not have
        (False, "cuda", True, False),
        (True, "cpu", True, True),
    ],
)
def test_gradient_checkpointing_is_on_where_a_gpu_is(
    asked: bool | None, device: str, able: bool, done: bool
) -> None:
    model = SimpleNamespace(device=torch.device(device), supports_gradient_checkpointing=able)
    config = config_for("x", optim={"gradient_checkpointing": asked})
    assert _with_checkpointing(model, config) is done


@pytest.mark.parametrize(("device", "fused"), [("cuda", True), ("cpu", None)])
def test_adamw_is_fused_on_a_gpu(device: str, fused: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unfused it makes temporary copies as large as the masters, which the estimate does not have."""
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.optim, "AdamW", lambda groups, **options: made.append(options))
    params: list[Any] = [SimpleNamespace(device=torch.device(device), ndim=2)]
    adamw(params, config_for("x").optim)
    assert made[0].get("fused") is fused


def test_the_learner_says_what_it_will_hold(models: dict[str, Path]) -> None:
    path = models["qwen2_vl"]
    learner = Learner(load(path), load_processor(str(path)), config_for(path), 10)
    tokens = 4 * (1024 + 3 * 8)
    assert (
        f"activations of a pack of {tokens} tokens without gradient checkpointing"
        in learner.memory_sentence()
    )
