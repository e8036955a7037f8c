"""LoRA under vLLM: the engine gets merges of the kept base, rounded once, and answers as the adapted learner does.

And a model that is passed in: vLLM is built from `model.path` and samples from the weights that it is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.configs import small_config
from helpers.steps import make_groups
from transformers import AutoModelForImageTextToText

from mm_grpo import GRPOConfig
from mm_grpo.build import Parts, build_parts
from mm_grpo.errors import ConfigError
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.model import load_model
from mm_grpo.learner.quantization import four_bit_layers
from mm_grpo.types import Group

LORA = {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "v_proj"]}
IDS = tuple(range(20, 36))


def config_of(path: Any, folder: Path, dtype: str, lora: dict[str, Any] | None) -> GRPOConfig:
    return small_config(
        path,
        folder,
        model={"dtype": dtype, "lora": lora},
        rollout={
            "engine": "vllm",
            "vllm": {"max_model_len": 1024, "max_images": 2},
            "prompts_per_step": 4,
            "num_generations": 4,
        },
        optim={"learning_rate": 1e-2},
    )


def test_a_model_that_is_passed_in_is_what_vllm_samples_from(models: dict[str, Path], tmp_path: Path) -> None:
    path = models["qwen2_5_vl"]
    config = config_of(path, tmp_path / "run", "float32", None)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.model.language_model.layers.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    parts = build_parts(config, 10, [], model=model)
    prompt = parts.processor.prompt(tiny.sample("r", "what is it", (tiny.picture(1),)))
    on_disk = Learner(load_model(config.model, parts.processor.family), parts.processor, config, 10)
    assert gap(parts.learner, parts.engine, prompt) <= 1e-5
    assert gap(on_disk, parts.engine, prompt) > 0.1


def test_vllm_samples_from_the_base_in_four_bits(models: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    path, rounding = models["qwen2_5_vl"], 8e-3
    config = config_of(path, tmp_path / "run", "bfloat16", LORA).with_values({"model.quantization": "nf4"})
    parts = build_parts(config, 10, [])
    learner, engine = parts.learner, parts.engine
    groups = make_groups(parts.processor)
    prompt = groups[0].prompt
    on_disk = load_model(config.with_values({"model.quantization": None}).model, parts.processor.family)
    assert gap(learner, engine, prompt) <= rounding
    assert gap(Learner(on_disk, parts.processor, config, 10), engine, prompt) > 3 * rounding
    learn(parts, groups, rounding)
    assert learner.factored == set(learner.adapted_layers) and gap(learner, engine, prompt) <= rounding


def learn(parts: Parts, groups: Sequence[Group], rounding: float) -> list[float]:
    """Make two updates that move the log-probs of one completion, and return those after them."""
    (before,) = parts.learner.score(groups[0].prompt, [IDS])
    for version in (1, 2):
        parts.learner.update(groups)
        parts.sync.send(version)
    (after,) = parts.learner.score(groups[0].prompt, [IDS])
    assert distance(before, after) > 3 * rounding
    return after


def distance(before: Sequence[float], after: Sequence[float]) -> float:
    return fmean(abs(a - b) for a, b in zip(before, after, strict=True))


SHARED = {"model.quantization": "nf4", "rollout.vllm.engine_kwargs": {"quantization": "nf4"}}


@pytest.mark.parametrize(
    ("family", "dtype", "rounding"),
    [("qwen2_5_vl", "float32", 1e-6), ("qwen2_5_vl", "bfloat16", 4e-3), ("qwen3_vl", "float32", 1e-6)],
)
def test_vllm_runs_the_learners_own_weights_in_four_bits(
    family: str, dtype: str, rounding: float, models: dict[str, Path], tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    config = config_of(models[family], tmp_path / "run", dtype, LORA).with_values(SHARED)
    parts = build_parts(config, 10, [])
    learner, engine = parts.learner, parts.engine
    groups = make_groups(parts.processor)
    prompt = groups[0].prompt
    layers = four_bit_layers(learner.model)
    assert gap(learner, engine, prompt) <= rounding and len(layers) > 10
    after = learn(parts, groups, rounding)
    assert gap(learner, engine, prompt) <= rounding
    # no other copy: what is changed in the learner's codes is what vLLM samples from, and its own layers are empty
    next(iter(layers.values())).weight.data.zero_()
    assert distance(after, learner.score(prompt, [IDS])[0]) > 3 * rounding
    assert gap(learner, engine, prompt) <= rounding
    handle: Any = engine._handle
    own = handle.llm.apply_model(
        lambda model: [m.weight.numel() for m in model.modules() if hasattr(m, "width")]
    )
    assert own == [[0] * len(own[0])] and own[0]


def test_four_bits_need_lora_layers(models: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    changes = {**SHARED, "rollout.vllm.engine_kwargs": {"quantization": "nf4", "enable_lora": False}}
    config = config_of(models["qwen2_5_vl"], tmp_path / "run", "float32", LORA).with_values(changes)
    with pytest.raises(ConfigError, match=r"^rollout.vllm.engine_kwargs = .*no LoRA layer for .*q_proj"):
        build_parts(config, 10, [])


def gap(learner: Learner, engine: Any, prompt: Any) -> float:
    """Mean |difference| of unmasked log-probs of one fixed completion with its image, in nats."""
    (ours,) = learner.score(prompt, [IDS])
    return distance(ours, engine.score(prompt, IDS))
