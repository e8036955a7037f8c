"""Weights in four bits: the layers against NF4 by hand, and what is trained, sent and saved of such a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.run_folders import metrics_of
from helpers.small_runs import ROWS, vowels
from helpers.small_runs import config_for as run_config
from helpers.steps import config_for, make_groups
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from mm_grpo import GRPOTrainer
from mm_grpo.config import LoRAConfig, ModelConfig
from mm_grpo.errors import ConfigError, GuardStop
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.lora import merged_tensors
from mm_grpo.learner.model import adopt_model, load_model
from mm_grpo.parity.gaps import check_start, compare
from mm_grpo.processors.base import load_processor
from mm_grpo.rollout.transformers_engine import TransformersEngine
from mm_grpo.rollout.weights import WeightLedger
from mm_grpo.trained.export import export_run
from mm_grpo.trained.source import model_to_evaluate

pytestmark = pytest.mark.lowest

pytest.importorskip("bitsandbytes")
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The numbers of the paper's appendix E."""
ADAPTERS = {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def policy(path: Path, dtype: str = "float32", quantization: str | None = "nf4") -> Any:
    section = {"lora": LoRAConfig(**ADAPTERS), "quantization": quantization, "dtype": dtype, "device": "cpu"}
    return load_model(ModelConfig(path=str(path), **section), load_processor(str(path)).family)


def learner_for(path: Path, model: Any, **changes: Any) -> Learner:
    dtype = str(model.dtype).removeprefix("torch.")
    section = {"dtype": dtype, "lora": ADAPTERS, "quantization": "nf4"}
    return Learner(model, load_processor(str(path)), config_for(path, model=section, **changes), 200)


def by_hand(weight: Any) -> Tensor:
    """The numbers of a quantised weight from its codes, two in a byte, with a scale in eight bits for each 64."""
    state = weight.quant_state
    nibbles = torch.stack([weight.data.view(-1) >> 4, weight.data.view(-1) & 15], 1)
    codes = nibbles.view(-1)[: state.shape.numel()]
    nested = state.state2.absmax.repeat_interleave(256)[: len(state.absmax)]
    scales = state.state2.code[state.absmax.long()] * nested + state.offset
    numbers = torch.tensor(NF4)[codes.long()] * scales.repeat_interleave(64)[: len(codes)]
    return numbers.view(state.shape).to(state.dtype)


def dense_twin(path: Path, model: Any) -> Any:
    """A model without quantisation that holds the same numbers, worked out by hand."""
    twin = policy(path, str(model.dtype).removeprefix("torch."), None)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            numbers = by_hand(parameter) if hasattr(parameter, "quant_state") else parameter
            twin.get_parameter(name).copy_(numbers)
    return twin


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_the_language_models_linear_layers_are_quantised(family: str, models: dict[str, Path]) -> None:
    path = models[family]
    model = policy(path)
    text = load_processor(str(path)).family.language_model
    plain: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    inside = {id(part) for part in text(plain).modules()}
    linear = {
        f"{n}.weight"
        for n, m in plain.named_modules()
        if isinstance(m, nn.Linear) and id(m) in inside and m.in_features % 64 == 0
    }
    quantised = [(n, p) for n, p in model.named_parameters() if hasattr(p, "quant_state")]
    found = {n.replace(".base_layer", ""): p for n, p in quantised}
    assert set(found) == linear and len(linear) >= 12
    merged = dict(merged_tensors(model))
    assert set(merged) == {n for n, _ in plain.named_parameters(remove_duplicate=False)}
    for name, weight in plain.named_parameters(remove_duplicate=False):
        wanted = by_hand(found[name]) if name in found else weight
        assert torch.equal(merged[name], wanted)
        # half of the widest distance between two numbers, of the block's largest
        assert name not in found or (wanted - weight).abs().max() < 0.16 * weight.abs().max()


def test_updates_are_those_of_the_dequantised_model_and_move_adapters_alone(models: dict[str, Path]) -> None:
    path = models["qwen2_5_vl"]
    model = policy(path, "bfloat16")
    twin = dense_twin(path, model)
    options: dict[str, Any] = {"algorithm": {"beta": 0.1}, "optim": {"gradient_checkpointing": True}}
    ours, theirs = learner_for(path, model, **options), learner_for(path, twin, **options)
    groups = make_groups(ours.processor)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for number in range(3):
        found, wanted = (learner.update(groups).metrics for learner in (ours, theirs))
        assert found["learner/update_norm"] > 0
        assert found["kl"] == pytest.approx(wanted["kl"], abs=1e-5)
        assert number or found["kl"] == pytest.approx(0.0, abs=1e-9)  # the reference is the quantised base
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (".lora_" in name) == (not torch.equal(parameter, before[name]))
        if parameter.requires_grad:
            assert torch.allclose(parameter, twin.get_parameter(name), atol=1e-3)
    ids = [c.token_ids for c in groups[0].completions]
    for sent in (False, True):
        scores = [learner.score(groups[0].prompt, ids, as_sent=sent) for learner in (ours, theirs)]
        for one, other in zip(*scores, strict=True):
            assert one == pytest.approx(other, abs=2e-2)


def test_an_engine_agrees_once_it_is_sent_the_base(models: dict[str, Path]) -> None:
    path = models["qwen2_5_vl"]
    learner = learner_for(path, policy(path))
    own: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    engine = TransformersEngine(own, learner.processor)
    prompt = make_groups(learner.processor)[0].prompt

    def gap() -> float:
        return compare(engine, learner, prompt, [], scored=[range(20, 52)]).score.mean

    far = gap()
    with pytest.raises(GuardStop):
        check_start(engine, learner, learner.config, prompt, range(4), 0)
    for version in range(2):
        WeightLedger().send(engine, learner.named_tensors(), version)
        check_start(engine, learner, learner.config, prompt, range(4), version)
        assert gap() <= 1e-5 < far / 3
        learner.update(make_groups(learner.processor))


@pytest.mark.slow
def test_a_killed_run_goes_on_and_saves_a_whole_model(models: dict[str, Path], tmp_path: Path) -> None:
    def trainer(name: str, steps: int, resume: bool = False) -> GRPOTrainer:
        section = {"dtype": "bfloat16", "device": "cpu", "lora": ADAPTERS, "quantization": "nf4"}
        run = {"max_steps": steps, "save_every": 1, "report": False}
        config = run_config(models["qwen2_5_vl"], tmp_path / name, model=section, run=run)
        return GRPOTrainer(config, train=ROWS, rewards=[vowels], resume=resume)

    straight = trainer("straight", 3)
    straight.train()
    trainer("cut", 1).train()
    cut = trainer("cut", 3, resume=True)
    cut.train()
    rows = metrics_of(tmp_path / "cut")
    assert rows == metrics_of(tmp_path / "straight") and len(rows) == 3
    for (name, one), other in zip(straight.model.named_parameters(), cut.model.parameters(), strict=True):
        assert torch.equal(one, other), name
    limit = 0.1
    assert all(row["sampling/sampling_logp_difference/mean"] <= limit for row in rows)

    saved: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "cut" / "model", dtype=torch.bfloat16)
    assert not hasattr(saved.config, "quantization_config")
    wanted = dict(merged_tensors(cut.model))
    assert all(torch.equal(wanted[n], p) for n, p in saved.named_parameters())
    for adapter in (False, True):  # proved with plain transformers, the adapter with peft over four bits
        made = export_run(tmp_path / "cut", tmp_path / f"export-{adapter}", adapter=adapter)
        assert made.gap.mean <= limit / 5 and made.gap.tokens > 8


def test_packed_kernels_leave_the_codes(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    path = models["qwen2_5_vl"]
    model = policy(path).eval()
    codes = {n: p.data for n, p in model.named_parameters() if hasattr(p, "quant_state")}
    learner = learner_for(path, model)
    group = make_groups(learner.processor)[0]
    learner.score(group.prompt, [c.token_ids for c in group.completions])
    for name, kept in codes.items():
        weight: Any = model.get_parameter(name)
        assert torch.equal(weight.data, kept)
        assert not getattr(weight.quant_state, "packing_format_for_cpu", False)


def test_a_folder_that_is_named_is_evaluated_as_it_is(models: dict[str, Path]) -> None:
    config = config_for(models["qwen2_vl"], model={"lora": ADAPTERS, "quantization": "nf4"})
    for given, wanted in ((None, "nf4"), (str(models["qwen2_vl"]), None)):
        found = model_to_evaluate(config, given).config
        assert found is not None and (found.model.quantization, found.model.lora) == (wanted, None)


def test_what_is_refused(models: dict[str, Path]) -> None:
    path = models["qwen2_vl"]
    with pytest.raises(ConfigError, match=r"^model\.quantization"):
        config_for(path, model={"quantization": "nf4"})
    section = ModelConfig(path=str(path), quantization="nf4", lora=LoRAConfig())
    model = AutoModelForImageTextToText.from_pretrained(path)
    with pytest.raises(ConfigError, match=r"^model\.quantization"):
        adopt_model(model, section, load_processor(str(path)).family)
