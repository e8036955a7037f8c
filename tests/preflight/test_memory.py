"""Estimates of memory by hand, and against what torch holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.steps import config_for, load

from mm_grpo.preflight.estimate import build_on_meta
from mm_grpo.preflight.memory import Largest, Lengths, ModelSizes, VisionSizes, inner_width, learner_memory
from mm_grpo.processors.base import load_processor

# Qwen2.5-VL-3B in bfloat16, in round numbers
LARGE = ModelSizes(3_750_000_000, 3_750_000_000, 2, 36, 2048, 2048, 11008, 151_936)


def test_one_gpu_by_hand() -> None:
    """A layer keeps 2 * 8 * 2048 + 10 * 2048 + 8 * 11008 = 141,312 bytes for a token, 83 GB over 36 layers."""
    found = learner_memory(LARGE, tokens=16384, checkpointing=False)
    assert found["weights"] == 7_500_000_000 and found["reference"] == 0
    assert found["gradients"] == 15_000_000_000
    assert found["optimizer"] == 45_000_000_000  # two means and masters, 12 bytes each
    assert found["activations"] == 36 * 16384 * 141_312 == 83_349_209_088
    assert found["log-probs"] == 16384 * 6 * 2048 + 151_936 * 2 * 2048 + (512 << 20) == 1_360_527_360
    kept = learner_memory(LARGE, tokens=16384, checkpointing=True)
    # 36 inputs of 4,096 bytes for a token, and one layer in full
    assert kept["activations"] == 16384 * (36 * 4096 + 141_312) == 4_731_174_912


def test_eight_gpus_by_stage_by_hand() -> None:
    def at(stage: int, **options: Any) -> dict[str, int]:
        return learner_memory(LARGE, tokens=1, checkpointing=True, zero_stage=stage, processes=8, **options)

    assert (at(0)["gradients"], at(0)["optimizer"]) == (15_000_000_000, 45_000_000_000)
    assert (at(1)["gradients"], at(1)["optimizer"]) == (22_500_000_000, 5_625_000_000)
    # an eighth of 15 GB, and two buckets of 200 million fp32 numbers
    assert (at(2)["gradients"], at(2)["optimizer"]) == (1_875_000_000 + 1_600_000_000, 5_625_000_000)
    assert (at(2, offload=True)["gradients"], at(2, offload=True)["optimizer"]) == (1_600_000_000, 0)


def test_stage_3_by_hand() -> None:
    """On eight GPUs: an eighth of all but the tower of 670 million, two layers of 77 million, the head."""
    sizes = replace(LARGE, layer=77_000_000, tower=670_000_000)
    options: dict[str, Any] = {"tokens": 1, "checkpointing": True, "zero_stage": 3, "processes": 8}
    frozen_tower = replace(sizes, trained=3_080_000_000, reference=3_750_000_000)
    found = learner_memory(frozen_tower, **options)
    assert found["weights"] == 2 * (670_000_000 + 385_000_000) == found["reference"]
    assert (found["gradients"], found["optimizer"]) == (4 * 385_000_000, 12 * 385_000_000)
    head = 151_936 * 2048
    assert found["gathered layers"] == 2 * (2 * 77_000_000 + head) + 6 * 77_000_000
    whole = learner_memory(replace(sizes, trained_tower=670_000_000), **options)
    assert whole["weights"] == found["weights"] and whole["optimizer"] == 12 * (670_000_000 + 385_000_000)
    adapters = replace(sizes, weights=3_758_000_000, trained=8_000_000, adapters=8_000_000, trained_numbers=4)
    found = learner_memory(adapters, **options)
    assert found["weights"] == 2 * (670_000_000 + 385_000_000) + 4_000_000
    assert (found["gradients"], found["optimizer"]) == (4_000_000, 8_000_000)  # fp32: their own masters
    assert found["gathered layers"] == 2 * (2 * 77_000_000 + head)


def test_fp32_adapters_and_a_reference_by_hand() -> None:
    """fp32 weights are their own masters, but DeepSpeed's copies."""
    single = replace(LARGE, numbers=4, reference=LARGE.weights)
    found = learner_memory(single, tokens=1, checkpointing=False)
    assert (found["weights"], found["reference"]) == (15_000_000_000, 15_000_000_000)
    assert (found["gradients"], found["optimizer"]) == (15_000_000_000, 30_000_000_000)
    assert found["activations"] == 36 * (24 * 2048 + 20 * 2048 + 16 * 11008)
    assert learner_memory(single, tokens=1, checkpointing=False, zero_stage=1)["optimizer"] == 45_000_000_000
    adapters = replace(LARGE, trained=10_000_000, head_is_trained=False)
    found = learner_memory(adapters, tokens=1, checkpointing=False)
    assert (found["gradients"], found["optimizer"]) == (40_000_000, 120_000_000)
    assert found["log-probs"] == 6 * 2048 + (512 << 20)


@pytest.mark.parametrize(
    ("processes", "optim", "tokens"),
    [
        (3, {}, 2 * (1024 + 3 * 8)),  # of four prompts, with three completions of at most eight tokens
        (1, {"updates_per_step": 4}, 1024 + 3 * 8),
        (1, {"max_tokens_per_pack": 500}, 500),
    ],
)
def test_a_pack_holds_no_more_than_an_update(processes: int, optim: dict[str, int], tokens: int) -> None:
    assert Lengths.of(config_for("x", optim=optim), Largest(0, 0), processes).pack == tokens


def test_layers_of_linear_attention_keep_what_their_rule_does(models: dict[str, Path]) -> None:
    """Two of three layers: one head of keys and two of values, 16 wide, so 64 channels; 64 hidden, 96 inner."""
    found = ModelSizes.of(load(models[tiny.HYBRID]))
    assert (found.layers, found.linear_layers) == (3, 2)
    assert found.linear_token == 4 * 4 * 64 + 4 * 2 * (8 * 16 + 5 * 16 + 5 * 64)
    around = 2 * (4 + 2 * 4) * 64 + 4 * 4 * 96
    whole = learner_memory(found, tokens=10, checkpointing=False)["activations"]
    assert whole == 10 * (3 * around + 5 * 4 * 64 + 2 * found.linear_token)
    kept = learner_memory(found, tokens=10, checkpointing=True)["activations"]
    assert kept == 10 * (3 * 4 * 64 + around + found.linear_token)


def kept_by_autograd(model: Any, run: Any) -> int:
    """Bytes of the storages that autograd keeps for backward, without weights."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that its address is not given to another
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = run()
    assert out.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 80, "shared_expert_intermediate_size": 48
}  # fmt: skip


@pytest.mark.parametrize("experts", [{}, EXPERTS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_those_that_torch_saves(dtype: torch.dtype, experts: dict[str, int]) -> None:
    """What autograd keeps of transformers' layers: tensors of one storage count once, weights not at all."""
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.for_model(
        "qwen2_moe" if experts else "qwen2", vocab_size=64, hidden_size=64, intermediate_size=160, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, attn_implementation="sdpa", **experts,
    )  # fmt: skip
    model, tokens = AutoModel.from_config(config).to(dtype), 512
    measured = kept_by_autograd(
        model, lambda: model(torch.arange(tokens)[None] % 64, use_cache=False).last_hidden_state
    )
    sizes = ModelSizes(1, 1, dtype.itemsize, 2, 64, 64, inner_width(config), 64)
    want = learner_memory(sizes, tokens=tokens, checkpointing=False)["activations"]
    assert want == pytest.approx(measured, rel=0.1), (want, measured)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen2_5_vl", torch.float32), ("qwen3_vl", torch.bfloat16), ("gemma3", torch.bfloat16)],
)
def test_a_towers_activations_are_within_half_of_what_autograd_keeps(
    family: str, dtype: torch.dtype, models: dict[str, Path]
) -> None:
    processor = load_processor(str(models[family]))
    model, _ = build_on_meta(config_for(models[family], model={"dtype": "float32"}))
    real = type(model)(model.config).to(dtype)
    tower = real.model.vision_tower if family == "gemma3" else real.model.visual
    prompt = processor.prompt(tiny.sample("r", "what", (tiny.picture(1, 224, 224),)))
    vision = {k: t.to(dtype) if t.is_floating_point() else t for k, t in prompt.vision.items()}
    inputs = {"pixel_values": vision.pop("pixel_values")} if family == "gemma3" else None

    def run() -> torch.Tensor:
        if inputs is not None:
            return tower(**inputs).last_hidden_state
        made = tower(vision["pixel_values"], vision["image_grid_thw"])
        return made.last_hidden_state if hasattr(made, "last_hidden_state") else made[0]

    # the patches themselves weigh in a tower as narrow as this one alone
    measured = kept_by_autograd(real, run) - (0 if inputs else vision["pixel_values"].nbytes)
    sizes = VisionSizes.of(real)
    assert sizes is not None and sizes.trained
    (image,) = prompt.engine_prompt.images
    whole = ModelSizes(1, 1, dtype.itemsize, 1, 1, 1, 1, 1, vision=sizes)
    found = learner_memory(whole, tokens=0, checkpointing=False, pixels=image.width * image.height)
    want = found["vision tower"]
    assert want / 1.5 <= measured <= 1.5 * want, (want, measured)
