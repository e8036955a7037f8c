"""LoRA: exact at the start, base weights untouched to the bit, merged weights that are the adapted model's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from steps import config_for, make_groups
from transformers import AutoModelForImageTextToText

from mm_grpo.config import LoRAConfig, ModelConfig
from mm_grpo.errors import ConfigError
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.lora import add_adapters, has_adapters, merged_tensors, without_adapters
from mm_grpo.learner.policy import load_policy
from mm_grpo.processors.base import load_processor

SMALL = LoRAConfig(rank=4, alpha=8.0, target_modules=["q_proj", "v_proj"])


def policy(path: Path, lora: LoRAConfig = SMALL, dtype: str = "float32") -> Any:
    return load_policy(ModelConfig(path=str(path), dtype=dtype, device="cpu", lora=lora))


def base_of(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if ".lora_" not in n}


def learner_for(path: Path, policy: Any, **changes: Any) -> Learner:
    return Learner(policy, load_processor(str(path)), config_for(path, **changes), 200)


def test_only_the_factors_train_and_the_start_is_the_base_model(models: dict[str, Path]) -> None:
    path = models["qwen2_5_vl"]
    model, plain = policy(path), load_policy(ModelConfig(path=str(path), device="cpu"))
    trainable = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trainable and all(".lora_" in n and ".language_model." in n for n in trainable)
    assert len(trainable) == 3 * 2 * 2  # layers x (q, v) x (A, B)
    group = make_groups(load_processor(str(path)))[0]
    ids = [c.token_ids for c in group.completions]
    got, want = (learner_for(path, m).score(group.prompt, ids) for m in (model, plain))
    assert got == want


def test_updates_move_the_factors_alone_and_merging_is_exact(models: dict[str, Path], tmp_path: Path) -> None:
    path = models["qwen3_vl"]
    model = policy(path)
    before, learner = base_of(model), learner_for(path, model)
    groups = make_groups(learner.processor)
    for _ in range(3):
        assert learner.step(groups).metrics["learner/update_norm"] > 0
    assert all(torch.equal(before[n], p) for n, p in base_of(model).items())

    merged = dict(merged_tensors(model))
    plain = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    assert set(merged) == {n for n, _ in plain.named_parameters(remove_duplicate=False)}
    moved = [n for n, p in plain.named_parameters() if not torch.equal(p, merged[n])]
    assert moved and all(n.endswith(("q_proj.weight", "v_proj.weight")) for n in moved)
    plain.load_state_dict(merged, strict=False)
    ids = [c.token_ids for c in groups[0].completions]
    adapted = learner.score(groups[0].prompt, ids)
    for one, other in zip(adapted, learner_for(path, plain).score(groups[0].prompt, ids), strict=True):
        assert one == pytest.approx(other, abs=1e-5)

    learner.save(tmp_path / "saved")  # what is saved needs no adapter to be loaded
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert not has_adapters(loaded)
    for one, other in zip(adapted, learner_for(path, loaded).score(groups[0].prompt, ids), strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_a_hundred_syncs_in_bfloat16_leave_the_base_to_the_bit(models: dict[str, Path]) -> None:
    path = models["qwen2_5_vl"]
    model = policy(path, dtype="bfloat16")
    before, learner = base_of(model), learner_for(path, model, model={"dtype": "bfloat16"})
    groups = make_groups(learner.processor)
    for _ in range(100):
        learner.step(groups)
        merged = dict(learner.named_tensors())
    assert all(torch.equal(before[n], p) for n, p in base_of(model).items())
    layer = model.model.language_model.layers[0].self_attn.q_proj
    delta = layer.lora_B["default"].weight.float() @ layer.lora_A["default"].weight.float() * 2.0  # 8 / 4
    base = before["model.language_model.layers.0.self_attn.q_proj.base_layer.weight"]
    assert delta.abs().max() > 1e-3
    want = (base.float() + delta).to(torch.bfloat16)
    assert torch.equal(merged["model.language_model.layers.0.self_attn.q_proj.weight"], want)


def test_the_reference_is_the_model_without_its_adapters(models: dict[str, Path]) -> None:
    path = models["qwen2_vl"]
    model = policy(path)
    learner = learner_for(path, model, algorithm={"beta": 0.1})
    groups = make_groups(learner.processor)
    assert learner.step(groups).metrics["kl"] == pytest.approx(0.0, abs=1e-9)
    moved = learner.step(groups).metrics["kl"]
    assert moved > 1e-6
    ids = [c.token_ids for c in groups[0].completions]
    plain = learner_for(path, load_policy(ModelConfig(path=str(path), device="cpu")))
    with without_adapters(model):
        assert learner.score(groups[0].prompt, ids) == plain.score(groups[0].prompt, ids)
    assert learner.score(groups[0].prompt, ids) != plain.score(groups[0].prompt, ids)


def test_a_target_that_is_not_there_names_those_that_are(models: dict[str, Path]) -> None:
    model = load_policy(ModelConfig(path=str(models["qwen2_vl"]), device="cpu"))
    for names in (["query"], ["q_proj", "query"]):
        with pytest.raises(
            ConfigError, match=r"target_modules: no linear layer .* is named query; .* q_proj"
        ):
            add_adapters(model, LoRAConfig(target_modules=names))
    assert not has_adapters(model)


def test_weights_that_were_cut_off_are_told(models: dict[str, Path], tmp_path: Path) -> None:
    cut = tmp_path / "model"
    shutil.copytree(models["qwen2_vl"], cut)
    file = cut / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match="the weights cannot be loaded"):
        load_policy(ModelConfig(path=str(cut), device="cpu"))
