"""Exports: the trained model to the bit of its log-probs, and nothing kept of one that is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.families import TABLE, groups_of, plain_logprobs
from helpers.finished_runs import Finished, finished
from helpers.steps import config_for
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import ConfigError
from mm_grpo.learner.forward_pass import score
from mm_grpo.learner.lora import merged_tensors
from mm_grpo.learner.model import load_model
from mm_grpo.learner.optimizer import Fragment
from mm_grpo.learner.state import load_weights, state_file
from mm_grpo.processors.base import load_processor
from mm_grpo.run.manifest import manifest_text
from mm_grpo.run.paths import RunPaths
from mm_grpo.run.rollout_log import write_rollouts
from mm_grpo.trained import export, proof
from mm_grpo.trained.export import MARK, export_run, write_export
from mm_grpo.trained.model import Trained
from mm_grpo.trained.source import find_model

Runs = Callable[[str], Finished]


def plain(folder: Path, run: Finished, base: Path | None = None) -> list[float]:
    """Log-probs of the run's kept prompt by transformers alone, or with peft over `base`."""
    model: Any = AutoModelForImageTextToText.from_pretrained(base or folder)
    if base is not None:
        model = PeftModel.from_pretrained(model, str(folder))
    processor = run.trainer.processor
    kept, processor.media_token_ids = processor.media_token_ids, frozenset()
    try:
        with torch.no_grad():
            found = plain_logprobs(model, processor, run.prompt, run.answer)[0]
    finally:
        processor.media_token_ids = kept
    return [float(x) for x in found]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "which", "step"), [("lora", "best", 2), ("full", "last", 3), ("adapter", "best", 2)]
)
def test_an_export_answers_as_the_trainer_did(
    kind: str, which: str, step: int, runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mm_grpo.trained.export.MAX_SHARD", "100KB")
    adapter = kind == "adapter"
    run = runs("lora" if adapter else kind)
    made = export_run(run.root, tmp_path / "out", checkpoint=which, adapter=adapter)
    assert made.gap.max <= 1e-4 and made.gap.tokens > 8 and made.prompts == 4
    base = Path(run.trainer.config.model.path)
    found = plain(tmp_path / "out", run, base if adapter else None)
    assert found == pytest.approx(run.scores[step], abs=1e-4)
    assert max(abs(a - b) for a, b in zip(found, run.scores[5 - step], strict=True)) > 1e-3
    mark = json.loads((tmp_path / "out" / MARK).read_text())
    assert (mark["step"], mark["kind"]) == (step, "adapter" if adapter else "merged")
    assert mark["settings"]["data"]["system_prompt"] == "look well"
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == set(mark["files"])
    assert {"README.md", "chat_template.jinja", "generation_config.json"} <= names
    assert adapter == ("adapter_model.safetensors" in names)
    assert adapter or "model-00002-of-" in " ".join(names)


@pytest.mark.lowest
@pytest.mark.parametrize("family", list(TABLE))
def test_every_family_is_exported(family: str, models: dict[str, Path], tmp_path: Path) -> None:
    """Adapters with factors that act, without a run; tied in every other family; with videos where it takes them."""
    number = list(TABLE).index(family)
    path = models[family] if number % 2 else tiny.build(family, tmp_path / "base", tie=False)
    lora = {"rank": 2, "target_modules": ["q_proj", "v_proj"]}
    processor = load_processor(str(path))
    config = config_for(path, model={"lora": lora, "dtype": "float32", "device": "cpu"})
    paths = RunPaths(tmp_path)
    groups = [
        group for kind in ("mixed", "mixed videos")[: 1 + TABLE[family].videos]
        for group in groups_of(processor, kind)
    ]  # fmt: skip
    write_rollouts(paths, 1, [replace(group, rewards=(0.0,) * 4) for group in groups])
    trained = Trained(load_active_model(config, processor, 0.2), processor, config, paths, 1)
    found = write_export(trained, tmp_path / "out", adapter=number % 3 == 0)
    assert found.gap.max <= 1e-4 and found.prompts == 3 + TABLE[family].videos


def load_active_model(config: GRPOConfig, processor: Any, std: float) -> Any:
    """Load a model whose adapters change its outputs."""
    model = load_model(config.model, processor.family)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B" in name:
                parameter.normal_(std=std)
    return model.eval()


@pytest.mark.parametrize(
    ("fault", "dtype", "words"),
    [
        ("score", "float32", "is not the trained model"),
        ("score", "bfloat16", "is not the trained model"),
        ("file", "bfloat16", "q_proj.weight differs"),
        ("tower", "float32", "visual"),
        ("processor", "float32", "saved processor"),
    ],
)
@pytest.mark.field_bug("no-tower")
def test_an_export_that_is_not_the_trained_model_is_removed(
    fault: str, dtype: str, words: str, runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs("lora")
    trained = trained_in(run, dtype)
    honest = export.write_model

    def changed(trained: Any, folder: Path, **options: Any) -> None:
        honest(trained, folder, **options)
        if fault == "file":  # one bit of one number
            file = folder / "model.safetensors"
            tensors = load_file(file)
            name = next(n for n in tensors if n.endswith("layers.2.self_attn.q_proj.weight"))
            whole = tensors[name].view(torch.int16)
            whole[3, 3] ^= 1
            save_file(tensors, file, metadata={"format": "pt"})
        if fault == "tower":
            tensors = load_file(folder / "model.safetensors")
            rest = {name: tensor for name, tensor in tensors.items() if "visual" not in name}
            save_file(rest, folder / "model.safetensors", metadata={"format": "pt"})
        if fault == "processor":
            template = folder / "chat_template.jinja"
            template.write_text(template.read_text().replace("<|im_start|>", "<|im_start|> ", 1))

    def elsewhere(*arguments: Any) -> list[list[float]]:  # a little past the bound
        past = 1.5e-4 if dtype == "float32" else 0.13
        return [[x + past for x in row] for row in score(*arguments)]

    if fault == "score":
        monkeypatch.setattr(proof, "score", elsewhere)
    monkeypatch.setattr(export, "write_model", changed)
    with pytest.raises(ConfigError, match=words):
        write_export(trained, tmp_path / "out", adapter=False)
    assert list(tmp_path.iterdir()) == []


def trained_in(run: Finished, dtype: str) -> Trained:
    """The run's base in a number format, with adapters that act."""
    config = run.trainer.config.with_values({"model.dtype": dtype, "model.device": "cpu"})
    processor = run.trainer.processor
    return Trained(load_active_model(config, processor, 0.05), processor, config, RunPaths(run.root), 3)


@pytest.mark.slow
def test_a_bfloat16_checkpoint_is_the_model_to_the_bit(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its config names the base by a path from the working folder that a run has too."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(models["qwen3_vl"], tmp_path / "model")
    model = {"dtype": "bfloat16", "lora": {"rank": 4, "alpha": 8.0}}
    run = finished(Path("model"), tmp_path / "run", model=model, run={"max_steps": 1, "save_every": 1})
    proof = export_run(tmp_path / "run", tmp_path / "out")
    assert proof.dtype == "bfloat16" and proof.gap.mean < 0.05
    found = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype="auto")
    read = dict(found.named_parameters(remove_duplicate=False))
    held = dict(merged_tensors(run.trainer.model))
    assert read.keys() == held.keys()
    assert all(read[n].dtype == torch.bfloat16 and torch.equal(read[n], held[n]) for n in held)
    base = dict(AutoModelForImageTextToText.from_pretrained("model", dtype=torch.bfloat16).named_parameters())
    assert not all(torch.equal(read[n], base[n]) for n in base)


def test_an_existing_folder_is_not_touched(runs: Runs, tmp_path: Path) -> None:
    """One of the user's is refused by robustness/cases.py."""
    run, out = runs("full"), tmp_path / "out"
    export_run(run.root, out, checkpoint="step-2")
    before = (out / "README.md").stat().st_ino
    with pytest.raises(ConfigError, match="--overwrite"):
        export_run(run.root, out)
    (out / "notes.md").write_text("mine")
    with pytest.raises(ConfigError, match=r"notes\.md"):
        export_run(run.root, out, overwrite=True)
    assert (out / "README.md").stat().st_ino == before and (out / "notes.md").read_text() == "mine"
    (out / "notes.md").unlink()
    export_run(run.root, out, overwrite=True)
    assert json.loads((out / MARK).read_text())["step"] == 3
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_the_card_holds_what_the_run_measured(runs: Runs, tmp_path: Path) -> None:
    run = runs("full")
    export_run(run.root, tmp_path / "out", checkpoint="best")
    card = (tmp_path / "out/README.md").read_text()
    rows = [json.loads(line) for line in (run.root / "metrics.jsonl").read_text().splitlines()]
    before, after = rows[0]["eval/eval/reward"], rows[2]["eval/eval/reward"]
    assert rows[0]["step"] == 0 and rows[2]["step"] == 2
    assert f"| eval | reward | {before:.3f} | {after:.3f} | 2 |" in card
    assert "| rewards | `score` |" in card and "2 steps of 4 prompts with 3 completions each" in card
    assert str(tmp_path.parent) not in card and str(run.root) not in card
    assert "learning_rate: 0.01" in card


def test_an_export_of_changed_runs_is_refused(runs: Runs, tmp_path: Path) -> None:
    """What else cannot be exported is in tests/robustness/cases.py."""

    def refused(words: str, *arguments: Any, **options: Any) -> None:
        with pytest.raises(ConfigError, match=words):
            export_run(*arguments, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()

    full, lora = runs("full").root, runs("lora").root
    refused("run.seed", full, overrides=["run.seed=1"])
    other = tiny.build("qwen2_5_vl", tmp_path / "other", seed=7)
    refused("model.path = .* not trained", lora, overrides=[f"model.path={other}"])
    wider = tiny.build("qwen3_vl", tmp_path / "wider")
    refused("model.path = .* has shape", full, overrides=[f"model.path={wider}"])
    copy = tmp_path / "copy"
    shutil.copytree(full, copy)
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(config.replace("learning_rate: 0.01", "learning_rate: 0.02"))
    refused(r"optim\.learning_rate = 0\.02", copy)
    (copy / "config.yaml").write_text(config)
    shutil.rmtree(copy / "checkpoints")
    refused("has no checkpoints .*copy/model", copy)


def test_a_best_without_a_checkpoint_is_refused(runs: Runs, tmp_path: Path) -> None:
    shutil.copytree(runs("full").root, tmp_path / "run")
    file = tmp_path / "run/checkpoints/step-000003/manifest.json"
    for best in ({"score": 0.5, "step": 0}, {"score": 0.5, "step": 1}, None):
        manifest = json.loads(file.read_text())
        manifest["extra"]["best"] = best
        file.write_text(manifest_text(manifest))
        with pytest.raises(ConfigError, match=f"{tmp_path}/run.*{'step-000003' if best else 'last'}"):
            find_model(str(tmp_path / "run"), "best")


def test_the_number_format_is_that_of_the_run(runs: Runs, tmp_path: Path) -> None:
    shutil.copytree(runs("full").root, tmp_path / "run")
    file = tmp_path / "run/checkpoints/step-000003/manifest.json"
    manifest = json.loads(file.read_text())
    assert manifest["dtype"] == "float32"
    file.write_text(manifest_text({**manifest, "dtype": "bfloat16"}))
    (tmp_path / "run/environment.json").write_text("{}")  # tells how the run was started, and decides nothing
    for overrides, dtype in (([], "bfloat16"), (["device=cpu"], "bfloat16"), (["dtype=float32"], "float32")):
        found = find_model(str(tmp_path / "run"), None, [f"model.{each}" for each in overrides])
        assert found.config is not None and found.config.model.dtype == dtype


def test_weights_are_read_from_the_parts_of_several_processes(tmp_path: Path) -> None:
    whole = {"a": torch.arange(10.0), "b": torch.arange(6.0) + 100.25}
    cuts = [[("a", 0, 7)], [("a", 7, 10), ("b", 0, 6)]]
    files = []
    for number, parts in enumerate(cuts):
        fragments = [Fragment(n, low, {"master": whole[n][low:high]}) for n, low, high in parts]
        path = tmp_path / f"state-{number}"
        files.append(path)
        state_file(SimpleNamespace(fragments=lambda kept=fragments: iter(kept))).write(path)  # type: ignore[arg-type]
    into = {"a": torch.zeros(2, 5), "b": torch.zeros(3, 2, dtype=torch.bfloat16)}
    load_weights(into, files)
    assert torch.equal(into["a"].view(-1), whole["a"])
    assert torch.equal(into["b"].view(-1), whole["b"].bfloat16())
    with pytest.raises(KeyError, match="a: 7 of 10 elements"):
        load_weights(into, files[:1])
