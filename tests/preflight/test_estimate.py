"""Estimates from a config.json alone, against the bytes of real tensors and what autograd keeps."""

from __future__ import annotations

import json
import runpy
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.steps import config_for, make_groups
from rich.console import Console

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import ConfigError
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.model import load_model
from mm_grpo.learner.quantization import NF4_BYTES
from mm_grpo.preflight.estimate import find_remedy, phases, show, sizes_of
from mm_grpo.preflight.memory import (
    GB,
    Largest,
    Lengths,
    ModelSizes,
    Servers,
    learner_memory,
    memory_of_run,
    moved_bytes,
)
from mm_grpo.processors.base import load_processor
from mm_grpo.rollout.transformers_engine import MAX_ROWS

DOCS = Path(__file__).resolve().parents[2] / "docs"
MEMORY = runpy.run_path(str(DOCS / "make_memory.py"))
LORA = {"rank": 4, "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture
def bare(models: dict[str, Path], tmp_path: Path) -> Path:
    """A folder with a config.json and nothing else."""
    (tmp_path / "bare").mkdir()
    shutil.copy(models["qwen2_5_vl"] / "config.json", tmp_path / "bare")
    return tmp_path / "bare"


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("full", "float32"), ("full", "bfloat16"), ("lora", "bfloat16"), ("qlora", "bfloat16")],
)
def test_weights_gradients_and_states_are_those_of_a_learner_to_the_byte(
    kind: str, dtype: str, models: dict[str, Path], bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {"dtype": dtype, "device": "cpu"}
    changes |= {"lora": LORA} if "lora" in kind else {}
    if kind == "qlora":
        pytest.importorskip("bitsandbytes")
        changes["quantization"] = "nf4"
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
    found = learner_memory(sizes, tokens=1, checkpointing=False)
    held = sum(bytes_of(p) + scales_of(p) for p in learner.model.parameters())
    # blocks are rounded up
    assert found["weights"] == pytest.approx(held, rel=1e-3 if kind == "qlora" else 0)
    assert bool(sizes.quantised) == (kind == "qlora")
    assert (found["gradients"], found["optimizer"]) == (gradients[0], states)
    assert ModelSizes.of(learner.model) == sizes


def bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def scales_of(parameter: Any) -> int:
    state = getattr(parameter, "quant_state", None)
    return 0 if state is None else bytes_of(state.absmax) + bytes_of(state.state2.absmax)


def test_the_phases_of_a_run_by_hand(bare: Path) -> None:
    """One GPU of 1 GB, half of it vLLM's; a token of its cache has 2 x 2 x 1 x 32 x 3 bytes."""
    vllm = {"gpu_memory_utilization": 0.5, "sleep_level": 0}
    config = config_for(bare, rollout={"engine": "vllm", "vllm": vllm})
    sizes, image = sizes_of(config)
    assert (image.pixels, image.tokens) == (1280 * 28 * 28, 1280)
    card = 10 * GB
    found = phases(config, card, processes=1)
    assert found.learner["vLLM"] == found.rollout["vLLM"] == 5 * GB
    # CUDA graphs, and the canary's logits with their softmax: fp32, of a vocabulary of 256
    assert found.learner["vLLM's CUDA graphs"] == found.rollout["vLLM's CUDA graphs"] == 2 * GB
    assert found.rollout["vLLM's scores of a prompt"] == 2 * 4 * 1024 * sizes.vocabulary
    assert found.learner["CUDA's context"] == found.rollout["CUDA's context"] == GB // 2
    assert found.cache == (5 * GB - 2 * sizes.weights - GB) // (2 * 2 * 1 * 32 * 3)
    assert found.rollout["weights"] == 2 * sizes.weights and found.rollout["optimizer"] == 12 * sizes.trained
    for level in (1, 2):
        slept = config.with_values({"rollout.vllm.sleep_level": level})
        assert phases(slept, card, processes=1).learner["vLLM"] == 0
    tight = config.with_values({"rollout.vllm.gpu_memory_utilization": 0.1})
    assert "no room for weights and one sequence" in phases(tight, card, processes=1).fault
    embedded = phases(config_for(bare), card, processes=1)
    # four prompts, each of an image and 256 tokens of text, with three completions of 8
    assert embedded.rollout["cache of the embedded engine"] == (4 * (1280 + 256) + 12 * 8) * 384
    # the tower runs the images of all four at once: bytes of a layer for each of their patches, in bfloat16
    tower = sizes.vision
    assert tower is not None
    token = 2 * (4 + 4) * tower.hidden + 5 * 2 * tower.hidden + 4 * 2 * tower.inner
    assert embedded.rollout["forwards of the embedded engine"] == 4 * 1280 * 4 * token
    told = phases(config_for(bare, data={"max_prompt_length": 100}), card, processes=1)
    assert told.rollout["cache of the embedded engine"] == (4 * 100 + 12 * 8) * 384


def test_videos_of_a_prompt_by_hand(bare: Path, models: dict[str, Path]) -> None:
    """An image of 1,280 tokens and two videos of five pairs of frames, each of 50 tokens of 28 x 28 pixels."""
    data = {"video_max_frames": 9, "video_max_pixels": 50 * 784}
    config = config_for(bare, data=data, rollout={"vllm": {"max_videos": 2}})
    _, largest = sizes_of(config)
    assert (largest.tokens, largest.video_tokens, largest.video_pixels) == (1280, 250, 250 * 784)
    lengths = Lengths.of(config, largest, 1)
    assert (lengths.prompt, lengths.pixels) == (1280 + 500 + 256, 1780 * 784)
    limited = config_for(models["qwen2_5_vl"], data=data)  # at most 224 x 224 pixels
    assert sizes_of(limited)[1] == Largest(64 * 784, 64, 250)
    console = Console(width=200, record=True)
    show(config, [24.0], processes=1, servers=Servers(), console=console)
    assert "a video 250 tokens; 1 image(s) and 2 video(s) to a prompt" in console.export_text()


@pytest.mark.parametrize(("prompts", "beside"), [(4, 48 * 4 * 3 * 152064), (400, 256 << 20)])
def test_a_draw_is_counted_up_to_its_bound(bare: Path, prompts: int, beside: int) -> None:
    """Logits of each row in bfloat16, and what a draw takes beside them; most rows are decoded together."""
    sizes, _ = sizes_of(config_for(bare))
    wide = replace(sizes, vocabulary=152064, vision=None, inner=1, heads=1)
    config = config_for(bare, rollout={"prompts_per_step": prompts})
    rows = min(3 * prompts, MAX_ROWS)
    found = memory_of_run(wide, Largest(0, 0), config, 10 * GB, processes=1)
    assert found.rollout["forwards of the embedded engine"] == 2 * rows * 152064 + beside


def test_twin_states_are_counted_where_the_device_is_the_host(bare: Path) -> None:
    config = config_for(bare, algorithm={"twin_view": {"view": "crop"}})
    sizes, image = sizes_of(config)
    on = {gpu: memory_of_run(sizes, image, config, GB, processes=1, gpu=gpu).learner for gpu in (False, True)}
    views = "twin views' states"
    assert on[False][views] == 4 * 3 * 8 * 2 * sizes.hidden and views not in on[True]


def test_four_bits_that_vllm_shares_are_counted_once(bare: Path) -> None:
    """With a vLLM of its own QLoRA needs more than LoRA: the engine's base is dequantised, and so lies there twice."""
    model = {"lora": LORA, "quantization": "nf4"}
    config = config_for(bare, model=model, rollout={"engine": "vllm"})
    sizes, _ = sizes_of(config)
    shared = config.with_values({"rollout.vllm.engine_kwargs": {"quantization": "nf4"}})
    apart, together = (phases(c, 10 * GB, processes=1) for c in (config, shared))
    four_bits = round(NF4_BYTES * sizes.quantised)
    own, rest = 4 * sizes.trained, 2 * (sizes.weights - sizes.adapters - sizes.quantised)
    assert apart.learner["weights"] == own + rest + four_bits and apart.learner["vLLM"] == 0  # asleep
    assert together.learner["weights"] == own + four_bits and together.learner["vLLM"] == rest
    assert sizes.sent(config) == rest + 2 * sizes.quantised and sizes.sent(shared) == rest
    assert together.learner["vLLM's CUDA graphs"] == 0 and apart.learner["vLLM's CUDA graphs"] == 2 * GB
    assert together.cache - apart.cache == pytest.approx(2 * sizes.quantised / sizes.cache_token, abs=1)


def test_the_remedy_may_be_vllm_on_the_learners_four_bits(bare: Path) -> None:
    config = config_for(bare, model={"lora": LORA, "quantization": "nf4"}, rollout={"engine": "vllm"})
    card = round(2.1 * GB)  # less than CUDA graphs and the rest
    found = find_remedy(config, card, processes=1)
    assert found is not None and "rollout.vllm.engine_kwargs={quantization: nf4}" in found.settings
    assert found.peak <= card


def test_a_base_beside_adapters_is_counted_once(bare: Path) -> None:
    config = config_for(bare, model={"lora": LORA}, rollout={"engine": "vllm"})
    sizes, _ = sizes_of(config)
    own = sizes.trained_numbers * sizes.trained

    def held(**vllm: object) -> tuple[int, int, int]:
        changed = config.with_values({f"rollout.vllm.{name}": value for name, value in vllm.items()})
        found = phases(changed, 10 * GB, processes=1)
        return found.learner["weights"], found.rollout["weights"], found.learner["vLLM"]

    sent = sizes.sent(config)
    assert held() == (own, own, sent)  # what vLLM keeps while its cache is given back
    assert held(sleep_level=0, gpu_memory_utilization=0.5) == (own, own, 5 * GB)
    both = own + sent
    assert held(engine_kwargs={"enable_lora": False}) == (both, both, 0)


def test_the_remedy_is_the_cheapest_settings(bare: Path) -> None:
    config = config_for(bare, rollout={"engine": "vllm", "vllm": {"gpu_memory_utilization": 0.8}})
    card = 25 * GB
    assert phases(config, card, processes=1).peak > card * 0.8
    fits = find_remedy(config, card, processes=1)
    assert fits is not None and fits.settings == ()
    full = config.with_values({"rollout.vllm.gpu_memory_utilization": 0.9})
    found = find_remedy(full, card, processes=1)
    assert found is not None and found.settings == ("rollout.vllm.gpu_memory_utilization=0.05",)
    assert found.peak <= card
    assert find_remedy(config, GB, processes=1) is None  # vLLM needs more than that alone


PUBLISHED = {  # weights in their safetensors files; what a token runs of them, by their names
    "3B": (3_754_622_976, 3.1e9), "7B": (8_292_166_656, 7.1e9), "32B": (33_452_718_336, 32e9),
    "30B-A3B": (31_070_754_032, 3e9), "35B-A3B": (35_107_181_936, 3e9),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_models_of_the_docs_have_the_published_counts(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MEMORY["MODELS"][name]))
    sizes, _ = sizes_of(GRPOConfig.from_dict({"model": {"path": str(tmp_path)}}))
    weights, active = PUBLISHED[name]
    assert sizes.weights == weights and sizes.active == pytest.approx(active, rel=0.02)
    if name == "30B-A3B":
        layer = 3 * 128 * 2048 * 768 + 128 * 2048 + 2 * 2048 * (4096 + 512) + 2 * 2048 + 2 * 128
        assert (sizes.layer, sizes.experts) == (layer, 48 * 3 * 128 * 2048 * 768)
        assert sizes.active == 48 * (layer - 3 * 120 * 2048 * 768) + 151_936 * 2048 + 2048
        full = sizes_of(GRPOConfig.from_dict({"model": {"path": str(tmp_path), "lora": MEMORY["LORA"]}}))[0]
        # q, k, v and o alone are linear layers
        assert full.trained == full.adapters == 48 * 16 * 2 * (2048 + 4096 + 2048 + 512)


def test_servers_beside_and_on_the_learners_gpus_by_hand(bare: Path) -> None:
    vllm = {"gpu_memory_utilization": 0.5}
    config = config_for(bare, rollout={"engine": "vllm_server", "vllm": vllm}, optim={"zero_stage": 3})
    sizes, _ = sizes_of(config)
    alone = phases(config, 10 * GB, processes=2)
    beside = phases(config, 10 * GB, processes=2, servers=Servers(tensor_parallel=2))
    shared = phases(config, 10 * GB, processes=2, servers=Servers(tensor_parallel=2, share_gpus=True))
    assert alone.server == {} and (beside.learner, beside.rollout) == (alone.learner, alone.rollout)
    peak = 5 * GB + 2 * GB + GB // 2 + 8 * 1024 * sizes.vocabulary
    assert sum(beside.server.values()) == beside.peak == peak
    assert shared.server == {} and shared.learner == {
        **alone.learner, "vLLM": 0, "vLLM's CUDA graphs": 2 * GB, "vLLM's CUDA context": GB // 2
    }  # fmt: skip
    assert shared.rollout == {**alone.rollout, **beside.server, "CUDA's context": GB // 2}
    assert beside.cache == shared.cache == (5 * GB - sizes.weights - GB) // (384 // 2)
    inside = config.with_values({"rollout.engine": "vllm", "optim.zero_stage": 2})
    assert phases(inside, 10 * GB, processes=2, servers=Servers()) == phases(inside, 10 * GB, processes=2)
    assert "gathered layers" in shared.learner and "gathered layers" not in shared.rollout


@pytest.mark.parametrize(
    ("model", "changes", "expected"),
    [  # of the trained weights n, all w, those of the tower t; each process has two packs, of a prompt each
        ({}, {"zero_stage": 0}, lambda n, w, t: (0, 8 * n, 2 * n)),
        ({}, {"zero_stage": 1}, lambda n, w, t: (2 * n, 4 * n, 2 * n)),
        ({}, {"zero_stage": 2}, lambda n, w, t: (2 * n, 8 * n, 2 * n)),
        ({}, {"zero_stage": 3}, lambda n, w, t: (8 * (w - t), 8 * (n - t) + 8 * t, 2 * n)),
        ({"freeze_vision": True}, {"zero_stage": 3}, lambda n, w, t: (8 * (w - t), 8 * n, 2 * n)),
        ({"lora": LORA}, {"zero_stage": 2, "updates_per_step": 2}, lambda n, w, t: (8 * n, 8 * n, 2 * n)),
        (
            {"lora": LORA},
            {"zero_stage": 3, "updates_per_step": 2},
            lambda n, w, t: (12 * (w - t), 8 * n, 2 * n),
        ),
    ],
)
def test_what_a_step_moves_by_hand(model: Any, changes: Any, expected: Any, bare: Path) -> None:
    optim = {"max_tokens_per_pack": 1600, **changes}
    config = config_for(bare, model=model, rollout={"engine": "vllm_server"}, optim=optim)
    sizes, largest = sizes_of(config)
    lengths = Lengths.of(config, largest, 2)
    assert lengths.packs == 2
    moved = moved_bytes(sizes, config, lengths, 2, Servers())
    gathered, gradients, sync = expected(sizes.trained, sizes.weights, sizes.tower)
    assert tuple(moved.values()) == (gathered // 2, gradients // 2, sync)
    # weights that a sleeping server drops are sent again, also those that are frozen
    shared = moved_bytes(sizes, config, lengths, 2, Servers(share_gpus=True))
    assert shared["sync"] == sizes.sent(config) == 2 * (sizes.weights - sizes.adapters)


def test_stage_3_is_a_remedy_where_servers_sample(bare: Path) -> None:
    config = config_for(bare, model={"freeze_vision": True}, rollout={"engine": "vllm_server"})
    needs = {
        stage: phases(config.with_values({"optim.zero_stage": stage}), GB, processes=64) for stage in (2, 3)
    }
    assert needs[3].peak < needs[2].peak
    remedy = find_remedy(config, needs[3].peak, processes=64)
    assert remedy is not None and "optim.zero_stage=3" in remedy.settings
    assert "offload" not in str(remedy.settings)
    inside = config.with_values({"rollout.engine": "transformers"})
    settings = getattr(find_remedy(inside, needs[3].peak, processes=64), "settings", ())
    assert "zero_stage" not in str(settings)


def test_the_command_needs_no_weights(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(width=200)
    show(config_for(bare, model={"lora": LORA}), [80], processes=2, servers=Servers(), console=console)
    out = capsys.readouterr().out
    assert "of them trained" in out and "2 process(es)" in out and "fits on 24 GB (" in out
    assert [p.name for p in bare.iterdir()] == ["config.json"]


def test_a_model_without_image_limits_is_one_message(models: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(models["internvl"] / "config.json", tmp_path)
    with pytest.raises(ConfigError, match=r"model.path = .*preprocessor_config.json"):
        sizes_of(config_for(tmp_path))


@pytest.mark.long
def test_the_page_on_memory_holds_the_figures_of_today() -> None:
    text = (DOCS / "several-gpus.md").read_text("utf-8")
    assert MEMORY["page"](text) == text
