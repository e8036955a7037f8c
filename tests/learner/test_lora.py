"""LoRA: the base model at the start, base weights untouched to the bit, merges rounded once, factors saved whole."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.configs import small_config
from helpers.families import groups_of
from helpers.small_runs import ROWS, rows_of, vowels
from helpers.steps import config_for, make_groups
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from mm_grpo import GRPOTrainer
from mm_grpo.build import _share_base
from mm_grpo.config import LoRAConfig, ModelConfig
from mm_grpo.errors import ConfigError
from mm_grpo.learner import lora as lora_module
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.lora import adapted_layers, has_adapters, merge_lost, merged_tensors
from mm_grpo.learner.model import load_model
from mm_grpo.processors.base import load_processor
from mm_grpo.processors.qwen_vl import QwenVLFamily
from mm_grpo.rollout.weights import WeightLedger, digest
from mm_grpo.run.same_run import deciding_fields

pytestmark = pytest.mark.lowest

FAMILY = QwenVLFamily()
SMALL = LoRAConfig(rank=4, alpha=8.0, target_modules=["q_proj", "v_proj"])


def policy(path: Path, lora: LoRAConfig = SMALL, dtype: str = "float32") -> Any:
    return load_model(ModelConfig(path=str(path), dtype=dtype, device="cpu", lora=lora), FAMILY)


def base_of(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if ".lora_" not in n}


def learner_for(path: Path, policy: Any, **changes: Any) -> Learner:
    return Learner(policy, load_processor(str(path)), config_for(path, **changes), 200)


def test_only_the_factors_train_and_the_start_is_the_base_model(models: dict[str, Path]) -> None:
    path = models["qwen2_5_vl"]
    model = policy(path, dtype="bfloat16")
    plain = load_model(ModelConfig(path=str(path), device="cpu", dtype="bfloat16"), FAMILY)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    trainable = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trainable and all(".lora_" in n and ".language_model." in n for n in trainable)
    assert len(trainable) == 3 * 2 * 2  # layers x (q, v) x (A, B)
    group = make_groups(load_processor(str(path)))[0]
    ids = [c.token_ids for c in group.completions]
    got, want = (learner_for(path, m).score(group.prompt, ids) for m in (model, plain))
    assert got == want


def test_scores_as_sent_are_those_of_the_merge(models: dict[str, Path]) -> None:
    path = models["qwen2_5_vl"]
    learner = learner_for(path, policy(path, dtype="bfloat16"), model={"dtype": "bfloat16"})
    groups = make_groups(learner.processor)
    learner.update(groups)
    merged = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.bfloat16)
    merged.load_state_dict(dict(learner.named_tensors()))
    prompt, ids = groups[0].prompt, [c.token_ids for c in groups[0].completions]
    sent = learner.score(prompt, ids, as_sent=True)
    assert sent == learner_for(path, merged, model={"dtype": "bfloat16"}).score(prompt, ids)
    assert sent != learner.score(prompt, ids)


@pytest.mark.parametrize(
    ("dtype", "change", "lost"),
    [
        ("bfloat16", 0.003, 1.0),  # a bf16 number at 1 has neighbours at 1 + 1/128 and 1 - 1/256
        ("bfloat16", 0.006, (1 / 128 - 0.006) / 0.006),
        ("bfloat16", 1 / 128, 0.0),
        ("float32", 0.003, 0.0),
    ],
)
def test_what_a_merge_loses_by_hand(dtype: str, change: float, lost: float, models: dict[str, Path]) -> None:
    model = policy(models["qwen2_vl"], dtype=dtype)
    assert merge_lost(model) is None  # the adapters have not moved
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "base_layer.weight" in name or ".lora_A" in name:
                parameter.fill_(1.0)
            elif ".lora_B" in name:
                parameter.fill_(change / (4 * 2.0))  # a rank of 4 and a scale of 8 / 4
    assert merge_lost(model) == pytest.approx(lost, abs=1e-4)


def test_a_run_saves_its_adapter_for_peft_and_reports_losses(
    models: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from peft import PeftModel

    path = models["qwen2_5_vl"]
    lora = {"rank": 4, "target_modules": ["q_proj", "v_proj"]}
    model = {"dtype": "bfloat16", "device": "cpu", "lora": lora}
    config = small_config(path, tmp_path / "run", model=model, optim={"learning_rate": None})
    trainer = GRPOTrainer(config, train=ROWS, rewards=[vowels])
    with caplog.at_level(logging.WARNING, "mm_grpo"):
        trainer.train()
    rows = rows_of(tmp_path / "run")
    assert [row["learning_rate"] for row in rows] == [1e-4] * 3
    lost = [row["lora/merge_lost"] for row in rows]
    assert lost[-1] == merge_lost(trainer.model)
    assert min(lost) > 0.1 and max(lost) < 1
    said = [r.message for r in caplog.records if "loses" in r.message]
    assert len(said) == 1 and "of what its adapters learned" in said[0]

    base = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.bfloat16)
    ids = torch.arange(20, 60)[None]
    with torch.no_grad():
        start = base(input_ids=ids).logits
        loaded = PeftModel.from_pretrained(base, tmp_path / "run" / "adapter")
        got, want = loaded(input_ids=ids).logits, trainer.model(input_ids=ids).logits
    assert torch.equal(got, want) and not torch.equal(got, start)
    stored = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.float32} and len(stored) == 3 * 2 * 2
    described = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert (described["base_model_name_or_path"], described["r"]) == (str(path), 4)
    assert len({file.stat().st_mode for file in (tmp_path / "run" / "adapter").iterdir()}) == 1


def test_a_run_without_adapters_has_none_to_save(models: dict[str, Path], tmp_path: Path) -> None:
    config = small_config(models["qwen2_vl"], tmp_path / "run", run={"max_steps": 1})
    trainer = GRPOTrainer(config, train=ROWS, rewards=[vowels])
    trainer.train()
    assert "lora/merge_lost" not in rows_of(tmp_path / "run")[0]
    assert not (tmp_path / "run" / "adapter").exists()
    with pytest.raises(ConfigError, match=r"model\.lora = null: the run has no adapters to save"):
        trainer.save_adapter(tmp_path / "adapter")


def test_a_save_leaves_the_users_files(models: dict[str, Path], tmp_path: Path) -> None:
    base = shutil.copytree(models["qwen2_vl"], tmp_path / "base")
    (tmp_path / "site").mkdir()
    (tmp_path / "site/config.json").write_text("mine")
    config = small_config(base, tmp_path / "run", run={"max_steps": 1}, model={"lora": {"rank": 2}})
    trainer = GRPOTrainer(config, train=ROWS, rewards=[vowels])
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    for save in (trainer.save, trainer.save_adapter):
        for folder in (base, tmp_path / "base/../base", tmp_path / "site"):
            with pytest.raises(ConfigError):
                save(folder)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    for _ in range(2):  # again to the same folder, as with save_pretrained
        trainer.save(tmp_path / "saved")
    assert (tmp_path / "saved/model.safetensors").stat().st_size == (
        base / "model.safetensors"
    ).stat().st_size


@pytest.mark.parametrize(
    ("lora", "given", "rate"),
    [
        (None, None, 1e-6),
        ({"rank": 2}, None, 1e-4),
        ({"rank": 2}, 3e-6, 3e-6),
        (None, 2e-6, 2e-6),
        ({}, 0, 0.0),
    ],
)
def test_adapters_have_a_default_learning_rate_of_their_own(lora: Any, given: Any, rate: float) -> None:
    config = small_config("m", model={"lora": lora}, optim={"learning_rate": given})
    assert config.learning_rate == rate
    said = "learning rate 0.0001 (the default for adapters)" in config.batch_sentence()
    assert said == (lora is not None and given is None)
    assert deciding_fields(config)["optim.learning_rate"] == rate


def test_the_reference_is_the_model_without_its_adapters(models: dict[str, Path]) -> None:
    path = models["qwen2_vl"]
    model = policy(path)
    learner = learner_for(path, model, algorithm={"beta": 0.1})
    groups = make_groups(learner.processor)
    assert learner.update(groups).metrics["kl"] == pytest.approx(0.0, abs=1e-9)
    moved = learner.update(groups).metrics["kl"]
    assert moved > 1e-6
    ids = [c.token_ids for c in groups[0].completions]
    plain = learner_for(path, load_model(ModelConfig(path=str(path), device="cpu"), FAMILY))
    with lora_module.as_frozen_base(model):
        assert learner.score(groups[0].prompt, ids) == plain.score(groups[0].prompt, ids)
    assert learner.score(groups[0].prompt, ids) != plain.score(groups[0].prompt, ids)


@pytest.mark.field_bug("lora-targets")
def test_a_target_that_is_not_there_names_those_that_are(models: dict[str, Path]) -> None:
    model = load_model(ModelConfig(path=str(models["qwen2_vl"]), device="cpu"), FAMILY)
    for names in (["query"], ["q_proj", "query"]):
        words = r"target_modules: no linear layer .* is named query; .* q_proj"
        with pytest.raises(ConfigError, match=words):
            lora_module.add_adapters(model, LoRAConfig(target_modules=names), FAMILY)
    assert not has_adapters(model)


ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
SHARED = {"gate_proj", "up_proj", "down_proj"}
LINEAR = {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "shared_expert_gate"}


@pytest.mark.parametrize(
    ("family", "names", "adapted"),
    [
        ("qwen3_vl_moe", LoRAConfig().target_modules, ATTENTION),
        ("qwen3_vl_moe", "all-linear", ATTENTION),
        ("qwen3_5_moe", LoRAConfig().target_modules, ATTENTION | SHARED),
        ("qwen3_5_moe", "all-linear", ATTENTION | SHARED | LINEAR),
        *(("qwen3_vl_moe", [name], None) for name in ("experts", "gate_up_proj", "down_proj", "gate")),
        *(("qwen3_5_moe", [name, "q_proj"], None) for name in ("experts", "gate_up_proj", "gate")),
    ],
)
def test_experts_and_routers_get_no_adapters(
    family: str, names: Any, adapted: set[str] | None, models: dict[str, Path]
) -> None:
    lora = LoRAConfig(rank=2, target_modules=names)
    if adapted is None:
        with pytest.raises(ConfigError, match=rf"named {names[0]}; .* experts are no linear layers"):
            policy(models[family], lora)
        return
    model = policy(models[family], lora)
    layers = adapted_layers(model)
    assert {layer.rpartition(".")[2] for layer in layers} == adapted
    assert not any(".experts" in layer or layer.endswith("mlp.gate") for layer in layers)
    factors = {f"{layer}.lora_{part}.default.weight" for layer in layers for part in "AB"}
    assert {n for n, p in model.named_parameters() if p.requires_grad} == factors


@pytest.mark.parametrize(
    ("family", "names", "vision"),
    [
        ("qwen3_vl", ["q_proj", "v_proj"], False),
        ("qwen2_5_vl", ["q_proj"], True),
        ("smolvlm", ["q_proj"], True),
        ("qwen3_5_moe", ["up_proj", "down_proj"], False),
    ],
)
@pytest.mark.field_bug("merge-drift", "lora-in-the-tower")
def test_adapters_alone_train_and_merges_are_the_adapted_model(
    family: str, names: list[str], vision: bool, models: dict[str, Path], tmp_path: Path
) -> None:
    path, lora = models[family], LoRAConfig(rank=2, target_modules=names, vision=vision)
    processor = load_processor(str(path))
    config = ModelConfig(path=str(path), device="cpu", dtype="float32", lora=lora)
    model = load_model(config, processor.family)
    factors = {id(p) for n, p in model.named_parameters() if ".lora_" in n}
    assert {id(p) for p in model.parameters() if p.requires_grad} == factors
    adapted = {n for n, part in model.named_modules() if hasattr(part, "lora_A")}
    plain: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    parts_of = processor.family.language_model, processor.family.tower
    text, tower = ({id(part) for part in of(plain).modules()} for of in parts_of)
    wanted = {
        n
        for n, part in plain.named_modules()
        if type(part) is torch.nn.Linear
        and ((id(part) in text and n.endswith(tuple(names))) or (vision and id(part) in tower))
    }
    assert adapted == wanted and len(wanted) >= 6
    assert processor.family.tower_is_frozen(model) is not vision
    base, learner = base_of(model), learner_for(path, model)
    groups = groups_of(processor, "mixed" if vision else "mixed videos")
    ids = [c.token_ids for c in groups[0].completions]
    start = learner.score(groups[0].prompt, ids)
    assert start == learner_for(path, plain).score(groups[0].prompt, ids)
    for _ in range(3):
        assert learner.update(groups).metrics["learner/update_norm"] > 0
    assert all(torch.equal(base[n], p) for n, p in base_of(model).items())
    trained = learner.score(groups[0].prompt, ids)
    gaps = (abs(a - b) for row in zip(trained, start, strict=True) for a, b in zip(*row, strict=True))
    assert max(gaps) > 1e-3

    merged = dict(learner.named_tensors())  # what an engine is sent
    weights = dict(plain.named_parameters(remove_duplicate=False))
    assert merged.keys() == weights.keys()
    assert {n for n, p in weights.items() if not torch.equal(p, merged[n])} == {f"{n}.weight" for n in wanted}
    learner.save(tmp_path / "saved")  # what is saved needs no adapter to be loaded
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert not has_adapters(loaded)
    assert all(torch.equal(merged[n], p) for n, p in loaded.named_parameters())
    for ours, theirs in zip(trained, learner_for(path, loaded).score(groups[0].prompt, ids), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


def moved_policy(path: Path, dtype: str) -> Any:
    """A policy whose adapters change every layer that has some, and whose layers have biases."""
    model = policy(path, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name or name.endswith("base_layer.bias"):
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engines_take_factors_or_merges_by_layer(dtype: str, models: dict[str, Path], tmp_path: Path) -> None:
    path, changes = models["qwen2_5_vl"], {"model": {"dtype": dtype}}
    model, other = (moved_policy(path, dtype) for _ in "ab")
    learner = learner_for(path, model, **changes)
    layers: dict[str, Any] = {name: model.get_submodule(name) for name in learner.adapted_layers}
    learner.use_factors(list(layers)[::2])
    assert 0 < len(learner.factored) < len(layers)
    sent = {frozen: dict(learner.named_tensors(frozen=frozen)) for frozen in (True, False)}
    for name, layer in layers.items():
        base, (a, b) = layer.base_layer.weight, (getattr(layer, f"lora_{x}")["default"].weight for x in "AB")
        merge = (base.float() + 2.0 * (b @ a)).to(base.dtype)  # 8 / 4
        twin: Any = other.get_submodule(name)
        for found in sent.values():
            own, factors = found[f"{name}.weight"], f"base_model.model.{name}.lora_"
            if name in learner.factored:
                assert torch.equal(own, base) and not torch.equal(merge, base)
                for x, tensor in (("A", a), ("B", 2.0 * b)):
                    factor = found[f"{factors}{x}.weight"]
                    assert factor.dtype == base.dtype and torch.equal(factor, tensor.to(base.dtype))
            else:
                assert torch.equal(own, merge) and not any(n.startswith(factors) for n in found)
                with torch.no_grad():
                    twin.base_layer.weight.copy_(own)
                    twin.lora_B["default"].weight.zero_()
    groups = make_groups(learner.processor)
    given = groups[0].prompt, [c.token_ids for c in groups[0].completions]
    as_sent = learner.score(*given, as_sent=True)
    assert as_sent == learner_for(path, other, **changes).score(*given) != learner.score(*given)
    learner.save(tmp_path / "saved")
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved", dtype=base.dtype)
    whole = dict(merged_tensors(model))  # whatever the engine takes
    assert all(torch.equal(whole[name], p) for name, p in loaded.named_parameters())


def test_factors_of_a_layer_at_rest_are_not_sent_again(models: dict[str, Path]) -> None:
    model = moved_policy(models["qwen2_5_vl"], "bfloat16")
    learner = learner_for(models["qwen2_5_vl"], model, model={"dtype": "bfloat16"})
    engine, ledger = FactorEngine(learner.adapted_layers), WeightLedger()
    learner.use_factors(engine.adapter_layers(learner.adapted_layers))
    ledger.send(engine, learner.named_tensors(), 0)  # type: ignore[arg-type]
    whole = {n for n, _ in merged_tensors(model)} | {n for n, _ in learner.named_tensors(frozen=False)}
    assert engine.sent.keys() == whole and any(n.endswith("lora_B.weight") for n in whole)
    moved = learner.adapted_layers[1:]
    with torch.no_grad():
        for name in moved:
            layer: Any = model.get_submodule(name)
            layer.lora_A["default"].weight.mul_(1.5)
    engine.sent.clear()
    ledger.send(engine, learner.named_tensors(frozen=False), 1)  # type: ignore[arg-type]
    assert list(engine.sent) == [f"base_model.model.{n}.lora_{x}.weight" for n in moved for x in "AB"]


class FactorEngine:
    """An engine that takes the adapters of some layers as factors, and notes what it is sent and asked to lend."""

    holds_weights = True

    def __init__(self, takes: Iterable[str]) -> None:
        self.takes = frozenset(takes)
        self.sent: dict[str, torch.Tensor] = {}
        self.asked: Mapping[str, torch.nn.Parameter] = {}

    def adapter_layers(self, layers: Iterable[str]) -> frozenset[str]:
        return self.takes & frozenset(layers)

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> dict[str, str]:
        self.sent |= {name: tensor.clone() for name, tensor in tensors}
        return {name: digest(tensor) for name, tensor in self.sent.items()}

    def share(self, parameters: Mapping[str, torch.nn.Parameter]) -> int:
        self.asked = parameters
        return 7


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_base_is_shared_where_no_layer_is_merged_into_it(dtype: str, models: dict[str, Path]) -> None:
    model = moved_policy(models["qwen2_5_vl"], dtype)
    layers = adapted_layers(model)
    for takes, lent in ((layers[1:], 0), ((), 0), (layers, 7)):
        engine, ledger = FactorEngine(takes), WeightLedger()
        assert _share_base(engine, model, ledger) == lent  # type: ignore[arg-type]
        assert bool(engine.sent) == bool(engine.asked) == bool(lent) != ledger.empty
    base = {n.replace(".base_layer.", "."): p for n, p in model.named_parameters() if ".lora_" not in n}
    assert engine.asked.keys() == base.keys()
    for name, parameter in engine.asked.items():
        assert parameter is base[name] and torch.equal(engine.sent[name], parameter)
    assert sum(".lora_" in name for name in engine.sent) == 2 * len(layers)
