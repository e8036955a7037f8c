"""A model is trained as the config says or refused in one line, loaded or passed in, in float32 and in bfloat16."""

from __future__ import annotations

import json
import logging
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.configs import small_config
from helpers.small_runs import ROWS, vowels
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, GenerationConfig

from mm_grpo import GRPOTrainer
from mm_grpo.build import Parts, build_parts
from mm_grpo.config import ModelConfig
from mm_grpo.errors import ConfigError
from mm_grpo.learner.model import check_saveable, load_model, resolve_device, resolve_dtype
from mm_grpo.learner.transformers_patches import PREFIX_ATTENTION
from mm_grpo.processors.base import load_processor

Q = "model.language_model.layers.0.self_attn.q_proj.weight"
Q_FILE = Q.replace("language_model.", "")  # as it is named on the disk
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(models: dict[str, Path], tmp_path: Path) -> Path:
    """A model folder that a test may break."""
    return Path(shutil.copytree(models["qwen2_5_vl"], tmp_path / "model"))


def weights(folder: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def load(folder: Path, **values: Any) -> Any:
    """As a run loads it, processor first."""
    config = ModelConfig(path=str(folder), device="cpu", **values)
    processor = load_processor(str(folder), trust_remote_code=config.trust_remote_code)
    model = load_model(config, processor.family)
    check_saveable(model, processor)
    return model


def plain(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, **options)


def parts_of(path: Path, policy: Any, /, **changes: Any) -> Parts:
    return build_parts(small_config(path, **changes), 3, [], model=policy)


@contextmanager
def refused(words: str) -> Iterator[None]:
    """A config error with these words, in one line."""
    with pytest.raises(ConfigError, match=words) as caught:
        yield
    assert "\n" not in str(caught.value)


# loaded --------------------------------------------------------------------------------------


FAULTY: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda f: weights(f, lambda t: t.pop(Q_FILE)), rf"{Q} is missing, and would be drawn at random"),
    "shape": (
        lambda f: weights(f, lambda t: t.update({Q_FILE: torch.zeros(3, 5)})),
        rf"{Q} has another shape there",
    ),
    "left over": (
        lambda f: weights(f, lambda t: t.update({"model.language_model.layers.9.x.weight": torch.zeros(1)})),
        r"model\.language_model\.layers\.9\.x\.weight is none of the model's",
    ),
    "NaN": (lambda f: weights(f, lambda t: t[Q_FILE][1].fill_(math.nan)), rf"{Q} holds NaN or infinite numbers"),
    "config of another shape": (
        lambda f: edit(f / "config.json", text_config={"hidden_size": "big"}),
        "no model config can be read there .*hidden_size",
    ),
    "quantised": (
        lambda f: edit(f / "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        r"its weights are quantised \(bitsandbytes\)",
    ),
    # transformers would put the adapter on, and only log what it lacks
    "adapter": (lambda f: adapted(f).save_pretrained(f), "has adapters of peft"),
}  # fmt: skip


MIXTURES: dict[str, tuple[dict[str, int], dict[str, Any], str]] = {
    "square in": (
        {"expert_width": 32},
        {},
        "hidden_size 64 and moe_intermediate_size 32 make square experts",
    ),
    "square out": (
        {"expert_width": 64},
        {},
        "hidden_size 64 and moe_intermediate_size 64 make square experts",
    ),
    "not normalised": ({}, {"norm_topk_prob": False}, "norm_topk_prob must be true"),
    "a shared expert": (
        {},
        {"shared_expert_intermediate_size": 32},
        "remove shared_expert_intermediate_size",
    ),
}


@pytest.mark.parametrize("fault", MIXTURES)
def test_a_mixture_that_engines_read_otherwise_is_refused(fault: str, tmp_path: Path) -> None:
    options, values, words = MIXTURES[fault]
    folder = tiny.build("qwen3_vl_moe", tmp_path / "model", **options)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    edit(folder / "config.json", text_config=text | values)
    with refused(rf"model\.path.*{words}"):
        load(folder)


@pytest.mark.parametrize("fault", FAULTY)
def test_a_faulty_folder_is_refused_in_one_line(fault: str, folder: Path) -> None:
    change, words = FAULTY[fault]
    change(folder)
    with refused(rf"model\.path.*{words}"):
        load(folder, dtype="bfloat16")


def test_whole_weights_load_to_the_bit_and_a_tied_head_is_not_missing(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in stored
    model = load(folder, dtype="bfloat16")
    parameters = model.named_parameters()
    on_disk = {n.replace("model.visual", "visual").replace("language_model.", ""): p for n, p in parameters}
    assert model.training and on_disk.keys() == stored.keys()
    assert all(torch.equal(p, stored[n].bfloat16()) for n, p in on_disk.items())
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_a_models_code_runs_if_trusted(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda words="": asked.append(words) or "n")
    for module in ("transformers.dynamic_module_utils", "transformers.utils.hub", "transformers.utils"):
        monkeypatch.setattr(f"{module}.HF_MODULES_CACHE", str(tmp_path / "modules"), raising=False)
    monkeypatch.setattr("sys.path", [*sys.path])  # transformers adds that folder
    (folder / "own.py").write_text(
        "from transformers import Qwen2_5_VLConfig\nprint('it ran')\n\n\n"
        "class Own(Qwen2_5_VLConfig):\n    model_type = 'own'\n"
    )
    edit(folder / "config.json", model_type="own", auto_map={"AutoConfig": "own.Own"})
    with refused(r"brings code of its own \(auto_map\), .*set model\.trust_remote_code=true"):
        load(folder)
    with pytest.raises(ConfigError, match="no processor for model type 'own'"):  # past it: the code ran
        load(folder, trust_remote_code=True)
    assert asked == []


# saving --------------------------------------------------------------------------------------


def test_sampling_flags_cost_no_run(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit(folder / "generation_config.json", temperature=0.1, top_p=0.001)
    config = small_config(folder, tmp_path / "run", run={"max_steps": 1})
    with caplog.at_level(logging.WARNING, "mm_grpo"):
        GRPOTrainer(config, train=ROWS, rewards=[vowels]).train()
    assert [r.message for r in caplog.records if "do_sample=True is written into the saved one" in r.message]
    saved = GenerationConfig.from_pretrained(tmp_path / "run" / "model")
    assert (saved.do_sample, saved.temperature, saved.top_p) == (True, 0.1, 0.001)


# passed in -----------------------------------------------------------------------------------


def test_adapters_are_trained_in_a_model_that_is_passed_in(models: dict[str, Path], tmp_path: Path) -> None:
    path = models["qwen2_5_vl"]
    model = plain(path, torch.bfloat16)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    config = small_config(path, tmp_path / "run", model={"lora": {"rank": 2}}, run={"max_steps": 2})
    trainer = GRPOTrainer(config, train=ROWS, rewards=[vowels], model=model)
    trainer.train()
    assert trainer.model is model
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert trained and all(".lora_" in n and p.dtype == torch.float32 for n, p in trained.items())
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            assert torch.equal(parameter, before[name.replace(".base_layer", "")]), name
    assert any(bool(p.any()) for n, p in trained.items() if ".lora_B" in n)


def test_a_frozen_tower_attention_and_checkpointing_are_applied(models: dict[str, Path]) -> None:
    path = models["qwen2_5_vl"]
    model = plain(path, torch.bfloat16, attn_implementation="eager").eval()
    parts = parts_of(path, model, model={"freeze_vision": True}, optim={"gradient_checkpointing": True})
    assert model.training and model.is_gradient_checkpointing and parts.model is model
    assert not any(p.requires_grad for p in model.model.visual.parameters())
    assert all(p.requires_grad for p in model.model.language_model.parameters())
    assert model.config.get_text_config()._attn_implementation == PREFIX_ATTENTION
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    parts_of(path, model)  # again, by another config
    assert not model.is_gradient_checkpointing


def test_routers_are_frozen_if_the_config_says_so(models: dict[str, Path]) -> None:
    model = load(models["qwen3_5_moe"], freeze_router=True)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {f"model.language_model.layers.{i}.mlp.gate.weight" for i in range(3)}
    assert all(p.requires_grad for p in load(models["qwen3_5_moe"]).parameters())
    with refused(r"model\.freeze_router = true: .* has no router"):
        load(models["qwen3_5"], freeze_router=True)


@pytest.mark.parametrize(("mode", "said"), [("auto", "token_truncate"), ("none", "none")])
def test_the_start_says_how_a_mixture_is_corrected(mode: str, said: str, models: dict[str, Path]) -> None:
    path, algorithm = models["qwen3_vl_moe"], {"importance_sampling_mode": mode}
    lora = {"lora": {"rank": 2}} if mode == "none" else {}
    parts = parts_of(path, None, algorithm=algorithm, model=lora)
    assert parts.learner.config.algorithm.importance_sampling_mode == said
    (sentence,) = (s for s in parts.sentences if "mixture of experts" in s)
    assert f"importance_sampling_mode is {said}" in sentence and ("adapters" in sentence) is bool(lora)
    assert not any("mixture" in s for s in parts_of(models["qwen3_vl"], None).sentences)


def test_parameters_that_the_caller_froze_stay_frozen(models: dict[str, Path]) -> None:
    model = plain(models["qwen3_vl"])
    frozen = model.model.language_model.layers[0].requires_grad_(False)
    parts = parts_of(models["qwen3_vl"], model)
    assert not any(p.requires_grad for p in frozen.parameters())
    assert len(parts.learner.optimizer.named) == sum(p.requires_grad for p in model.parameters())


def adapted(path: Path) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(plain(path), LoraConfig(target_modules=["q_proj"]))


def changed(change: Callable[[Any], Any], dtype: torch.dtype = torch.float32) -> Callable[[Path], Any]:
    def make(path: Path) -> Any:
        model = plain(path, dtype)
        change(model)
        return model

    return make


REFUSED: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "peft": (adapted, {}, r"has adapters of peft: give the base model, and set model\.lora"),
    "a module": (lambda p: torch.nn.Linear(1, 1), {}, "is a Linear: must be a model of transformers"),
    "quantised": (
        changed(lambda m: setattr(m.config, "quantization_config", {"quant_method": "fp8"})), {},
        r"is quantised \(fp8\)",
    ),
    "float16": (lambda p: plain(p, torch.float16), {}, "has weights in float16 on cpu: must be in float32, or"),
    "two dtypes": (
        changed(lambda m: m.model.visual.float(), torch.bfloat16), {},
        "has weights in bfloat16, float32 on cpu: must be",
    ),
    "another dtype": (plain, {"dtype": "bfloat16"}, r"model\.dtype = 'bfloat16': .* is in float32"),
    "bfloat16 for float32": (
        lambda p: plain(p, torch.bfloat16), {"dtype": "float32"}, r"model\.dtype = 'float32': .* is in bfloat16",
    ),
    "no device": (lambda p: plain(p).to("meta"), {"device": "cpu"}, r"on meta: must be .* on one device"),
    "dropout": (
        changed(lambda m: setattr(m.config.text_config, "attention_dropout", 0.1)), {},
        r"its attention_dropout is 0\.1",
    ),
    "another family": (
        lambda p: plain(p.with_name("qwen3_vl")), {},
        r"is a qwen2_5_vl, .* a qwen3_vl; the processor is made from model\.path",
    ),
    "a set, which JSON does not have": (
        changed(lambda m: setattr(m.config, "own", {1, 2})), {}, "could not be saved after training: .*TypeError",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_a_model_that_does_not_fit_is_refused_in_one_line(fault: str, models: dict[str, Path]) -> None:
    make, values, words = REFUSED[fault]
    path = models["qwen2_5_vl"]
    with refused(words):
        parts_of(path, make(path), model=values)


def test_a_gpu_that_is_not_the_process_s_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM, NCCL and other threads would take the first one."""
    monkeypatch.setattr(torch, "empty", lambda *args, **options: None)  # both GPUs are there
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(ConfigError, match=r"model.device = 'cuda:1'.*CUDA_VISIBLE_DEVICES=1"):
        resolve_device("cuda:1")
    assert resolve_device("cuda:0") == torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert resolve_device("cuda:1") == torch.device("cuda:1")


def test_a_gpu_that_emulates_bfloat16_computes_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no kernel for attention in it, and torch calls emulation support."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for native, dtype in ((1, torch.bfloat16), (0, torch.float32)):
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation=1, n=native: including_emulation or n
        )
        assert resolve_dtype("auto", torch.device("cuda")) == dtype


def test_servers_are_sent_the_base_of_a_model_that_is_passed_in(models: dict[str, Path]) -> None:
    """They have read the one at `model.path`, and this one may differ."""
    path = models["qwen2_5_vl"]
    for policy in (None, plain(path)):
        assert parts_of(path, policy).learner.base_replaced is (policy is not None)
