"""Mixtures of experts: doctor with every engine, exports, and folders in both layouts of experts."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines.test_vllm_adapters import scores
from engines.test_vllm_lost_updates import Run
from helpers import tiny
from helpers.finished_runs import finished
from helpers.small_runs import config_for
from safetensors import safe_open
from transformers import AutoModelForImageTextToText

from mm_grpo.cli.serve import servers_for_run
from mm_grpo.preflight.doctor import examine
from mm_grpo.rollout.vllm import internals, launch
from mm_grpo.rollout.vllm.engine import VLLMEngine
from mm_grpo.rollout.vllm.launch import EngineSettings
from mm_grpo.trained.export import export_run

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

FAMILIES = {"qwen3_vl_moe": "float32", "qwen3_5_moe": "bfloat16"}
MEANS = {"float32": 1e-5, "bfloat16": 0.06}
"""Nats of a prompt's tokens on average: in bfloat16 some tokens get other experts in the engine."""
SHAPES = {"task": "shapes", "split": "train", "size": 6, "seed": 1, "image_size": 56}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of which a token gets two of four experts, with linear attention of the width that vLLM takes."""
    root = tmp_path_factory.mktemp("experts")
    options = {"linear_width": 128, "expert_width": 96}
    return {family: tiny.build(family, root / family, **options) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("engine", ["transformers", "vllm", "vllm_server"])
def test_the_doctor_finds_experts_sound(
    engine: str, family: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = config_for(
        folders[family],
        tmp_path / "run",
        model={"dtype": FAMILIES[family], "device": "cpu"},
        data={"train": SHAPES},
        rollout={"max_completion_length": 10, "vllm": {"max_model_len": 512}},
    )
    started: Any = nullcontext({"rollout.engine": engine})
    with servers_for_run(config, 1, 1, 1) if engine == "vllm_server" else started as fields:
        report = examine(config.with_values(fields), 2)
    assert report.ok and report.engine == engine, report.failures
    # the embedded engine runs the learner's own
    assert report.update is not None and (report.update.tensors >= 70) is (engine != "transformers")
    for gap in (gap for p in (*report.before, *report.after) for gap in (p.score, p.sampled)):
        assert 0 < gap.mean <= MEANS[FAMILIES[family]]


def test_experts_that_keep_their_first_weights_stop_the_run(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU vLLM packs them, so no digest tells; what the engine scores does."""
    run, reload = Run(folders["qwen3_vl_moe"], 1e-4, "float32"), internals.reload
    first = {name: tensor.clone() for name, tensor in run.learner.named_tensors() if ".experts." in name}
    assert run.update(1).problem is None

    def partly(handle: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        reload(handle, ((name, first.get(name, tensor)) for name, tensor in tensors))

    monkeypatch.setattr(internals, "reload", partly)
    assert run.update(2).problem is not None


def test_lora_layers_leave_experts_out(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but with a CPU's experts: beside LoRA layers vLLM takes Triton's. The tower's are merged."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method

    cuda, select = SimpleNamespace(is_available=lambda: True), method.select_unquantized_moe_backend

    def arguments(settings: EngineSettings) -> dict[str, Any]:
        with monkeypatch.context() as patch:
            patch.setattr(launch, "torch", SimpleNamespace(cuda=cuda))
            return lora_arguments(settings)

    def plain(moe_config: Any) -> Any:
        moe_config.is_lora_enabled = False
        return select(moe_config=moe_config)

    lora_arguments = launch.lora_arguments
    monkeypatch.setattr(launch, "lora_arguments", arguments)
    monkeypatch.setattr(method, "select_unquantized_moe_backend", plain)
    run = Run(folders["qwen3_vl_moe"], 1e-3, "float32", lora=8, vision=True)
    layers = run.learner.factored
    assert len(layers) == 12 and layers == {n for n in run.learner.adapted_layers if "visual" not in n}
    base, _ = scores(run)
    for version in range(1, 3):
        assert run.update(version).problem is None
        ours, theirs = scores(run)
        assert (ours - theirs).abs().max() < 1e-5
    assert (ours - base).abs().max() > 0.05


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8.0}], ids=["all weights", "lora"])
def test_vllm_reads_experts_in_either_layout(lora: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    """The export holds the published layout; transformers' own save_pretrained writes the other one."""
    run = finished(folders["qwen3_vl_moe"], tmp_path / "run", model={"lora": lora, "dtype": "float32"})
    export_run(run.root, tmp_path / "published", checkpoint="last")
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path / "published", dtype=torch.float32)
    run.trainer.processor.save(tmp_path / "in memory")
    plain.save_pretrained(tmp_path / "in memory")
    shapes = []
    for name in ("published", "in memory"):
        engine = VLLMEngine(EngineSettings(str(tmp_path / name), "float32", 512), run.trainer.processor)
        assert engine.score(run.prompt, run.answer) == pytest.approx(run.scores[3], abs=1e-5)
        with safe_open(tmp_path / name / "model.safetensors", "pt") as file:
            shapes.append(file.get_slice("model.language_model.layers.0.mlp.experts.down_proj").get_shape())
    assert shapes == [[4, 96, 64], [4, 64, 96]]
    assert max(abs(a - b) for a, b in zip(run.scores[3], run.scores[1], strict=True)) > 1e-2
