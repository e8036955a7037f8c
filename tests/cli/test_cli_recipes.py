"""`recipes`, `init`, and layers on the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mm_grpo import GRPOConfig
from mm_grpo.cli import recipes
from mm_grpo.cli.configs import load_config
from mm_grpo.config.shipped import find_layers, find_recipes
from mm_grpo.preflight.memory import ModelSizes, learner_memory

WEIGHTS, TOWER, ADAPTERS = 3_754_622_976, 668_684_288, 29_933_568  # of Qwen2.5-VL-3B, and those of lora.yaml
FULL = ModelSizes(WEIGHTS, WEIGHTS - TOWER, 2, 36, 2048, 2048, 11008, 151936)
LORA = ModelSizes(WEIGHTS + ADAPTERS, ADAPTERS, 2, 36, 2048, 2048, 11008, 151936, head_is_trained=False)


@pytest.mark.parametrize("recipe", ["digits", "geometry3k", "mixture", "zoom"])
def test_every_layer_goes_over_any_recipe(recipe: str) -> None:
    alone = load_config(recipe, [])
    for layer in find_layers():
        merged = load_config(recipe, [layer])
        assert merged.data == alone.data and merged.rewards == alone.rewards, layer
        assert merged != alone or layer in ("embedded", "full", "gpu24", "gpu48", "gpu80"), layer


def test_the_memory_of_four_bits_is_that_of_the_estimate() -> None:
    quantised = 36 * (2048 * (2048 + 2 * 256 + 2048) + 3 * 2048 * 11008)
    held = learner_memory(replace(LORA, quantised=quantised), tokens=8192, checkpointing=True)
    text = find_layers()["qlora"].read_text()
    for stated in (held["weights"], sum(held.values())):
        assert f"{stated / 1e9:.1f} GB" in text
    config = load_config("geometry3k", ["qlora"])
    assert config.model.quantization == "nf4"
    assert config.model.lora == load_config("geometry3k", ["lora"]).model.lora


@pytest.mark.parametrize(("layer", "size"), [("gpu24", 24), ("gpu48", 48), ("gpu80", 80)])
@pytest.mark.parametrize("gpus", [1, 8])
def test_the_memory_that_a_layer_states_is_that_of_the_estimate(layer: str, size: int, gpus: int) -> None:
    name = layer if gpus == 1 else f"{layer}x8"
    text = " ".join(line.lstrip("# ") for line in find_layers()[name].read_text().splitlines())
    config = load_config("geometry3k", [name])
    tokens, share = config.optim.max_tokens_per_pack, config.rollout.vllm.gpu_memory_utilization
    offload = gpus == 1 and size < 80
    common: dict[str, Any] = {"tokens": tokens, "checkpointing": True, "processes": gpus}
    full = learner_memory(FULL, zero_stage=2 if gpus > 1 or offload else 0, offload=offload, **common)
    lora = learner_memory(LORA, zero_stage=2 if gpus > 1 else 0, **common)
    for estimate in (full, lora):
        assert f"{sum(estimate.values()) / 1e9:.1f} GB" in text
        assert sum(estimate.values()) < 0.9 * size * 1e9
    assert f"({share:g} x {size} = {share * size:g} GB)" in text
    states = [one["weights"] + one["gradients"] + one["optimizer"] for one in (full, lora)]
    fits = [held / 1e9 + share * size < size for held in states]
    assert fits == ([False, True] if name == "gpu24x8" else [True, True])  # which it says
    assert ("offload.yaml" in text) == (size == 24 or (size, gpus) == (48, 1))


LORA_32B = ModelSizes(
    33_586_936_064, 134_217_728, 2, 64, 5120, 5120, 27648, 152064, head_is_trained=False, trained_numbers=4,
    adapters=134_217_728, layer=489_702_400, tower=688_841_984,
)  # fmt: skip


@pytest.mark.parametrize(("layer", "gpus"), [("gpu80x8_32b_lora", 4), ("gpu80x8_32b_zero3", 8)])
def test_the_memory_that_a_layer_of_a_32b_states(layer: str, gpus: int) -> None:
    text = " ".join(line.lstrip("# ") for line in find_layers()[layer].read_text().splitlines())
    config = load_config("geometry3k", [layer])
    quantised = (
        64 * (2 * 5120 * 5120 + 2 * 5120 * 1024 + 3 * 5120 * 27648) if config.model.quantization else 0
    )
    held = learner_memory(
        replace(LORA_32B, quantised=quantised), tokens=config.optim.max_tokens_per_pack, checkpointing=True,
        processes=gpus, zero_stage=config.optim.zero_stage,
    )  # fmt: skip
    for name in ("weights", "optimizer", "gradients"):
        assert f"{held[name] / 1e9:.{1 if held[name] > 2e8 else 2}f} {name}" in text
    assert f" = {sum(held.values()) / 1e9:.1f} GB" in text and "66.9 GB of weights" in text
    share = config.rollout.vllm.gpu_memory_utilization * 80
    assert f" = {share:g} GB" in text and share > 66.9 / 2 + 1
    assert config.model.lora == load_config("geometry3k", ["lora"]).model.lora


def test_a_layer_in_the_run_folder_is_refused(config_path: Path, tmp_path: Path, command: Any) -> None:
    layer = tmp_path / "run" / "mine.yaml"
    layer.parent.mkdir()
    layer.write_text("run: {seed: 3}\n")
    ended = command("train", config_path, layer, f"run.dir={tmp_path}/run")
    assert ended.code == 2 and "mine.yaml' lies in run.dir" in ended.err


@pytest.mark.parametrize("recipe", ["clevr_count", "refcoco_grounding", "mixture"])
def test_missing_data_is_said_with_the_command(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("check", "train", "doctor"):
        ended = command(name, recipe)
        assert ended.code == 2 and f"{recipe}/prepare.py" in ended.err
        assert "train.jsonl does not exist; the recipe's rows are made" in ended.err


def test_recipes_lists_and_shows(command: Any) -> None:
    listed = command("recipes").out
    for name in (*find_recipes(), *find_layers()):
        assert f"\n  {name} " in listed
    shown = command("recipes", "chartqa").out
    assert "# Questions about charts" in shown and "chart_relaxed, exact_years: true" in shown
    assert "29.9 million numbers" in command("recipes", "lora.yaml").out
    wrong = command("recipes", "chartq")
    assert wrong.code == 2 and "did you mean 'chartqa'?" in wrong.err
    assert command("recipes", "lora", "--copy", "x").code == 2


def test_a_copy_is_whole_and_writes_nothing_over(tmp_path: Path, command: Any) -> None:
    ended = command("recipes", "clicking", "--copy", tmp_path / "mine")
    assert ended.code == 0 and f"mm-grpo train {tmp_path}/mine/config.yaml" in ended.out
    source = find_recipes()["clicking"].parent
    rows = (source / "fixture/train.jsonl").read_bytes()
    assert (tmp_path / "mine" / "fixture" / "train.jsonl").read_bytes() == rows
    config = GRPOConfig.from_yaml(tmp_path / "mine" / "config.yaml")
    assert config == load_config("clicking", [])
    (tmp_path / "mine" / "README.md").write_text("mine")
    again = command("recipes", "clicking", "--copy", tmp_path / "mine")
    assert again.code == 2 and "would be overwritten" in again.err
    assert (tmp_path / "mine" / "README.md").read_text() == "mine"
    assert command("recipes", "--copy", tmp_path / "x").code == 2 and not (tmp_path / "x").exists()


def test_init_writes_what_check_accepts(tmp_path: Path, command: Any) -> None:
    folder = tmp_path / "first"
    assert command("init", folder).code == 0
    config = folder / "config.yaml"
    assert len(config.read_text().splitlines()) <= 40
    ended = command("check", config, "--smoke")
    assert ended.code == 0 and ended.out.rstrip().endswith("ok") and "1 / 1 / 1" in ended.out
    assert json.loads((folder / "rows.jsonl").read_text())["answer"] == "3"
    again = command("init", folder)
    assert again.code == 2 and "config.yaml and 3 more would be" in again.err


@pytest.mark.parametrize(("gpu", "engine"), [(True, "vllm"), (False, "transformers")])
def test_init_takes_vllm_where_it_is_installed_and_can_run(
    gpu: bool, engine: str, tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipes, "find_spec", lambda name: object() if name == "vllm" else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert command("init", tmp_path / "first").code == 0
    assert GRPOConfig.from_yaml(tmp_path / "first" / "config.yaml").rollout.engine == engine
