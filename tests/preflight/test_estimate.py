"""Estimates from a config.json alone, against the bytes of real tensors and what autograd keeps."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.steps import config_for, make_groups
from rich.console import Console

from mm_grpo.errors import ConfigError
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.memory import ModelSizes, VisionSizes, memory_estimate, memory_of_run
from mm_grpo.learner.model import load_model
from mm_grpo.preflight.estimate import GB, build_on_meta, phases, show, sizes_of, what_fits
from mm_grpo.processors.base import load_processor

DOCS = Path(__file__).resolve().parents[2] / "docs"
LORA = {"rank": 4, "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture
def bare(models: dict[str, Path], tmp_path: Path) -> Path:
    """A folder with a config.json and nothing else."""
    (tmp_path / "bare").mkdir()
    shutil.copy(models["qwen2_5_vl"] / "config.json", tmp_path / "bare")
    return tmp_path / "bare"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["full", "frozen", "lora"])
def test_weights_gradients_and_states_are_those_of_a_learner_to_the_byte(
    kind: str, dtype: str, models: dict[str, Path], bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {"dtype": dtype, "device": "cpu"}
    changes |= {"lora": LORA} if kind == "lora" else {"freeze_vision": kind == "frozen"}
    config = config_for(models["qwen2_5_vl"], model=changes)
    processor = load_processor(str(models["qwen2_5_vl"]))
    learner = Learner(load_model(config.model, processor.family), processor, config, 10)
    optimizer: Any = learner.optimizer
    gradients: list[int] = []
    honest = optimizer._clip_and_update

    def counted() -> float:
        gradients.append(sum(bytes_of(m.grad) for m in optimizer.masters if m.grad is not None))
        return float(honest())

    monkeypatch.setattr(optimizer, "_clip_and_update", counted)
    learner.update(make_groups(processor))
    states = sum(bytes_of(s[k]) for s in optimizer.adamw.state.values() for k in ("exp_avg", "exp_avg_sq"))
    states += sum(bytes_of(m) for m, p in zip(optimizer.masters, optimizer.params, strict=True) if m is not p)
    sizes, _ = sizes_of(config.with_values({"model.path": str(bare)}))
    found = memory_estimate(sizes, tokens=1, checkpointing=False)
    assert found.weights == sum(bytes_of(p) for p in learner.model.parameters())
    assert (found.gradients, found.optimizer) == (gradients[0], states)
    assert ModelSizes.of(learner.model) == sizes


def bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
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

    measured = kept_by_autograd(real, run)
    sizes = VisionSizes.of(real)
    assert sizes is not None and sizes.trained
    (image,) = prompt.engine_prompt.images
    whole = ModelSizes(1, 1, dtype.itemsize, 1, 1, 1, 1, 1, vision=sizes)
    want = memory_estimate(whole, tokens=0, checkpointing=False, pixels=image.width * image.height).vision
    assert want / 1.5 <= measured <= 1.5 * want, (want, measured)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_masks_of_sliding_windows_are_counted(dtype: torch.dtype, models: dict[str, Path]) -> None:
    """Three layers of two kinds; of masks alone, for T^2 grows past all else."""
    model, _ = build_on_meta(config_for(models["gemma3"], model={"dtype": "float32"}))
    real = type(model)(model.config).to(dtype)
    real.set_attn_implementation("sdpa")
    text, tokens = real.model.language_model, 1536
    masks = {
        kind: torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril()
        for kind in ("full_attention", "sliding_attention")
    }
    ids = torch.arange(tokens)[None] % 200
    measured = kept_by_autograd(
        real, lambda: text(input_ids=ids, attention_mask=masks, use_cache=False).last_hidden_state
    )
    measured += sum(bytes_of(m) for m in masks.values())
    sizes = ModelSizes.of(real)
    assert sizes.mask_kinds == 2
    found = memory_estimate(sizes, tokens=tokens, checkpointing=False)
    assert found.masks == tokens**2 * (2 + 3 * dtype.itemsize)
    want = found.masks + found.activations
    assert want / 1.5 <= measured <= 1.5 * want, (want, measured)
    kept = memory_estimate(sizes, tokens=tokens, checkpointing=True)
    assert kept.masks == tokens**2 * (2 + dtype.itemsize)
    assert ModelSizes.of(build_on_meta(config_for(models["qwen2_5_vl"]))[0]).mask_kinds == 0


def test_the_run_says_what_the_estimate_says(models: dict[str, Path]) -> None:
    """Masks and the tower are in the line of a run too."""
    config = config_for(models["gemma3"], model={"dtype": "float32"})
    processor = load_processor(str(models["gemma3"]))
    learner = Learner(load_model(config.model, processor.family), processor, config, 10)
    said = learner.memory_sentence()
    assert "attention masks " in said and "vision tower " in said
    sizes, image = sizes_of(config)
    whole = memory_of_run(learner.model, config, 1, False, image_pixels=processor.max_pixels)
    assert whole is not None and image.pixels == processor.max_pixels
    off = config.with_values({"optim.gradient_checkpointing": False})
    assert whole == phases(sizes, image, off, 80 * GB, processes=1).learner


def test_the_phases_of_a_run_by_hand(bare: Path) -> None:
    """One GPU of 1 GB, half of it vLLM's; a token of its cache has 2 x 2 x 1 x 32 x 3 bytes."""
    config = config_for(
        bare,
        rollout={"engine": "vllm", "vllm": {"gpu_memory_utilization": 0.5, "sleep_level": 0}},
    )
    sizes, image = sizes_of(config)
    assert (image.pixels, image.tokens) == (1280 * 28 * 28, 1280)
    card = 10 * GB
    found = phases(sizes, image, config, card, processes=1)
    assert found.learner.vllm == found.rollout["vLLM"] == 5 * GB
    assert found.cache == (5 * GB - 2 * sizes.weights - GB) // (2 * 2 * 1 * 32 * 3)
    assert found.rollout["weights"] == 2 * sizes.weights and found.rollout["optimizer"] == 12 * sizes.trained
    for level in (1, 2):
        slept = config.with_values({"rollout.vllm.sleep_level": level})
        assert phases(sizes, image, slept, card, processes=1).learner.vllm == 0
    tight = config.with_values({"rollout.vllm.gpu_memory_utilization": 0.1})
    assert "no room for its weights and one sequence" in phases(sizes, image, tight, card, processes=1).fault
    embedded = phases(sizes, image, config_for(bare), card, processes=1)
    # four prompts of three completions, each of 1,024 + 8 tokens
    assert embedded.rollout["cache of the embedded engine"] == 12 * (1024 + 8) * 384


def test_what_fits_takes_the_cheapest_settings(bare: Path) -> None:
    config = config_for(bare, rollout={"engine": "vllm", "vllm": {"gpu_memory_utilization": 0.8}})
    sizes, image = sizes_of(config)
    card = 5 * GB
    assert phases(sizes, image, config, card, processes=1).peak > card * 0.8
    fits = what_fits(config, card, processes=1)
    assert fits is not None and fits.settings == ()
    full = config.with_values({"rollout.vllm.gpu_memory_utilization": 0.9})
    found = what_fits(full, card, processes=1)
    assert found is not None and found.settings == ("rollout.vllm.gpu_memory_utilization=0.21",)
    assert found.peak <= card
    assert what_fits(config, GB, processes=1) is None  # vLLM needs more than that alone


def test_the_command_needs_no_weights(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(width=200)
    show(config_for(bare, model={"lora": LORA}), [80], processes=2, console=console)
    out = capsys.readouterr().out
    assert "of them trained" in out and "2 process(es)" in out and "fits on 24 GB (" in out
    assert [p.name for p in bare.iterdir()] == ["config.json"]


def test_what_is_unknown_is_one_message(models: dict[str, Path], tmp_path: Path) -> None:
    shapes = json.loads((models["internvl"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(shapes))
    with pytest.raises(ConfigError, match=r"how large an image may be stands in its"):
        sizes_of(config_for(tmp_path))


@pytest.mark.long
def test_the_page_on_memory_holds_the_figures_of_today() -> None:
    made, text = (
        runpy.run_path(str(DOCS / "make_memory.py")),
        (DOCS / "choosing.md").read_text(encoding="utf-8"),
    )
    assert made["page"](text) == text
