"""`mm-grpo eval`: the same weights as the run's, from each place they lie in; what it prints and refuses."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.run_folders import write_config

from mm_grpo import GRPOConfig, GRPOTrainer
from mm_grpo.learner.model import load_model
from mm_grpo.processors.base import load_processor
from mm_grpo.trained.export import export_run
from mm_grpo.trained.model import put_in
from mm_grpo.trained.source import RunCheckpoint, model_to_evaluate

LORA = {"rank": 4, "target_modules": ["q_proj", "v_proj"]}
KINDS: dict[str, dict[str, Any]] = {"full": {"dtype": "float32"}, "lora": {"dtype": "float32", "lora": LORA}}


class Trained:
    """A run of two steps, its config, and its weights as the learner held them at the end.

    That with adapters has a base model that its config calls `model`, from the working folder: as a run calls its own.
    """

    def __init__(self, base: Path, folder: Path, kind: str) -> None:
        run = {"max_steps": 2, "eval_every": 1, "save_every": 1, "headline": "length >= 0.5"}
        self.folder = folder
        self.config = write_config(base, folder, model={"device": "cpu", **KINDS[kind]}, run=run)
        trainer = GRPOTrainer(GRPOConfig.from_yaml(self.config))
        self.summary = trainer.train()
        self.weights = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        trainer.close()


Runs = dict[str, Trained]


@pytest.fixture(scope="module")
def trained(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    root, work = tmp_path_factory.mktemp("eval"), tmp_path_factory.mktemp("work")
    shutil.copytree(models["qwen2_vl"], work / "model")
    with contextlib.chdir(work):
        base = {kind: Path("model") if kind == "lora" else models["qwen2_vl"] for kind in KINDS}
        yield {kind: Trained(base[kind], root / str(i), kind) for i, kind in enumerate(KINDS)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_s_weights_are_the_learner_s_to_the_bit(kind: str, trained: Runs) -> None:
    run = trained[kind]
    last = model_to_evaluate(GRPOConfig.from_yaml(run.config), str(run.folder), "last")
    assert isinstance(last, RunCheckpoint)
    assert last.checkpoint.path == run.folder / "checkpoints" / "step-000002"
    model = load_model(last.config.model, load_processor(last.config.model.path).family)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    put_in(model, last)
    found = dict(model.named_parameters())
    assert found.keys() == run.weights.keys()
    assert all(torch.equal(found[name], value) for name, value in run.weights.items())
    assert any(not torch.equal(start[name], value) for name, value in run.weights.items())


def test_a_run_and_its_model_score_as_the_run_did(trained: Runs, command: Any, tmp_path: Path) -> None:
    run = trained["full"]  # the adapters' is below
    named = [(run.config, "--model", run.folder, "--checkpoint", "last"), (run.folder,)]
    for number, model in enumerate([*named, (run.config, "--model", run.folder / "model")]):
        out = tmp_path / f"{number}.json"
        done = command("eval", *model, "--json", out)
        assert done.code == 0, done.err
        found = json.loads(out.read_text())["sets"]["eval"]
        expected = run.summary["first_set"]["after"]
        for key in ("score", "reward", "rows", "length", "clipped"):
            assert found[key] == pytest.approx(expected[key]), key
        assert found["interval"] == pytest.approx(expected["interval"])
        assert "accuracy (length >= 0.5)" in done.out and f"{expected['score']:.3f} [" in done.out
    assert sorted(p.name for p in run.folder.iterdir() if "eval" in p.name) == []  # nothing is written there


def test_an_evaluation_has_pass_at_k_groups_and_a_blind_control(
    trained: Runs, command: Any, tmp_path: Path
) -> None:
    run, out = trained["full"], tmp_path / "found.json"
    arguments = ["--samples", 4, "--by", "answer", "--blind", "shuffled", "--json", out]
    done = command("eval", run.config, "--model", run.folder, *arguments, "rollout.eval.top_k=50")
    assert done.code == 0, done.err
    found = json.loads(out.read_text())
    assert found["sampling"]["temperature"] == 1.0 and found["sampling"]["top_k"] == 50
    whole = found["sets"]["eval"]
    assert [*whole["pass_at"]] == ["1", "2", "4"]
    assert whole["pass_at"]["1"] == pytest.approx(whole["score"])
    assert whole["score"] <= whole["pass_at"]["2"] <= whole["pass_at"]["4"]
    groups = found["groups"]["eval"]
    assert sum(one["rows"] for one in groups.values()) == whole["rows"] == 5
    total = sum(one["rows"] * one["score"] for one in groups.values())
    assert total / 5 == pytest.approx(whole["score"])
    assert whole["blind"]["rows"] == 5
    assert whole["blind"]["gap"] == pytest.approx(whole["score"] - whole["blind"]["score"], abs=1e-12)
    for words in ("pass@4", "images shuffled", f"answer = {next(iter(groups))}"):
        assert words in done.out


def test_a_base_model_that_lies_elsewhere_now_is_the_config_s(trained: Runs) -> None:
    run = trained["lora"]
    config = GRPOConfig.from_yaml(run.config).with_values({"model.path": str(Path("model").absolute())})
    here = model_to_evaluate(config, str(run.folder))
    with contextlib.chdir("/"):
        there = model_to_evaluate(config, str(run.folder))
    assert isinstance(here, RunCheckpoint) and here.config.model.path == "model"
    assert isinstance(there, RunCheckpoint) and there.config.model.path == config.model.path


@pytest.mark.slow
def test_an_export_is_evaluated_as_the_run(trained: Runs, command: Any, tmp_path: Path) -> None:
    run = trained["lora"]
    export_run(run.folder, tmp_path / "out")
    found = []
    for model in (tmp_path / "out", run.folder):
        done = command("eval", run.config, "--model", model, "--json", tmp_path / "found.json")
        assert done.code == 0, done.err
        found.append(json.loads((tmp_path / "found.json").read_text()))
    assert found[0]["sets"] == found[1]["sets"]
    names = [f"{tmp_path}/out", f"{run.folder}, last checkpoint (step 2)"]
    assert [one["model"] for one in found] == names
    export_run(run.folder, tmp_path / "adapter", adapter=True)
    done = command("eval", run.config, "--model", tmp_path / "adapter")
    assert done.code == 2 and "holds adapters without their base model" in done.err


def test_a_run_s_own_config_is_read_as_the_run_read_it(trained: Runs, command: Any, tmp_path: Path) -> None:
    """Its paths start at the working folder, and not beside it, where the run saved a model under the same name."""
    run, copy = trained["lora"], tmp_path / "run"
    shutil.copytree(run.folder, copy)
    assert GRPOConfig.from_yaml(copy / "config.yaml").model.path == "model"
    changes = [f"run.dir={copy}", "run.max_steps=3", "run.eval_every=0"]
    fresh = command("train", copy / "config.yaml", *changes)
    assert fresh.code == 2 and "the config file" in fresh.err
    done = command("train", copy / "config.yaml", "--resume", *changes)
    assert done.code == 0, done.err
    assert (copy / "checkpoints" / "step-000003").is_dir()
