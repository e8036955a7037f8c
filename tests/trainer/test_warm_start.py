"""`mm-grpo warm` as a run: what it writes, how it goes on after a kill, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import processes
from helpers.patience import until
from helpers.run_folders import metrics_of
from helpers.small_runs import ROWS, config_for, rollouts_of, vowels
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from mm_grpo import GRPOConfig, GRPOTrainer, warm
from mm_grpo.errors import ConfigError, DataError, GuardStop
from mm_grpo.run.manifest import read_checkpoint
from mm_grpo.trained.export import export_run

STEPS = 4


def config_of(path: Path, folder: Path, **changes: Any) -> GRPOConfig:
    run = {"dir": str(folder), "save_every": 1, **changes.pop("run", {})}
    rollout = {"prompts_per_step": 2, "max_completion_length": 16, **changes.pop("rollout", {})}
    options = {"optim": {"learning_rate": 1e-3}, "rollout": rollout, **changes}
    return config_for(path, None, run=run, **options)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.slow
def test_a_warm_start_makes_answers_likely_and_trains_and_exports(model: Path, tmp_path: Path) -> None:
    config = config_of(model, tmp_path / "run", run={"save_every": None}, optim={"learning_rate": 5e-3})
    result = warm(config, answer="answer", steps=13, train=ROWS)
    folder = Path(str(tmp_path / "run") + "-warm")
    assert result["steps"] == 13 and result["model"] == str(folder / "model")
    rows = metrics_of(folder)
    assert [row["step"] for row in rows] == [*range(1, 14)]
    first, last = result["nll"]
    assert first == pytest.approx(sum(row["loss"] for row in rows[:7]) / 7)
    assert first > last + 1
    assert not any(name.startswith(("sampling/", "clip_ratio/")) for name in rows[0])
    taught = rollouts_of(folder, 1)
    assert {row["completion"] for row in taught} <= {row["answer"] for row in ROWS}
    mark = json.loads((folder / "model/mm_grpo_warm.json").read_text())
    assert (mark["base"], mark["answer"], mark["steps"]) == (str(model), "answer", 13)
    export_run(folder, tmp_path / "export")
    exported, saved = weights_of(tmp_path / "export"), weights_of(folder / "model")
    assert all(torch.equal(exported[name], saved[name]) for name in saved)
    run = {"max_steps": 1, "save_every": 0, "report": False, "save_model": False}
    config = config_of(Path(result["model"]), tmp_path / "grpo", run=run)
    trained = GRPOTrainer(config, train=ROWS, rewards=[vowels])
    assert trained.train()["steps"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, {"model": {"dtype": "bfloat16", "lora": {}}}], ids=["fp32", "bf16-lora"]
)
def test_a_resumed_warm_start_is_the_whole_one(model: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    whole = config_of(model, tmp_path / "whole", **changes)
    warm(whole, answer="answer", steps=STEPS, train=ROWS)
    part = config_of(model, tmp_path / "part", **changes)
    warm(part, answer="answer", steps=2, train=ROWS)
    with pytest.raises(ConfigError, match="--resume"):
        warm(part, answer="answer", steps=STEPS, train=ROWS)
    with pytest.raises(ConfigError, match="rows"):
        warm(part, answer="answer", steps=STEPS, train=ROWS[::-1], resume=True)
    with pytest.raises(ConfigError, match="answer"):
        warm(part, answer="kind", steps=STEPS, train=ROWS, resume=True)
    warm(part, answer="answer", steps=STEPS, train=ROWS, resume=True)
    folders = [Path(f"{tmp_path / name}-warm") for name in ("whole", "part")]
    assert metrics_of(folders[0]) == metrics_of(folders[1])
    last = f"checkpoints/step-{STEPS:06d}"
    whole_files, part_files = (read_checkpoint(folder / last).manifest["files"] for folder in folders)
    assert whole_files == part_files
    first, second = (weights_of(folder / "model") for folder in folders)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_a_killed_warm_start_leaves_no_model_and_goes_on(model: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    train = {"task": "shapes", "split": "train", "size": 64}
    values = config_of(model, tmp_path / "run", data={"train": train})
    config.write_text(values.to_yaml())
    folder = Path(str(tmp_path / "run") + "-warm")
    command = ["-m", "mm_grpo.cli", "warm", config, "--answer", "answer", "--steps"]
    process = processes.start([*command, 200], tmp_path / "killed.txt", processes.alone())
    try:
        until((folder / "checkpoints/step-000002").exists, "the second checkpoint")
    finally:
        process.end()
    assert not (folder / "model").exists()
    step = max(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))
    program = (*command, step + 2, "--resume")  # on two processes now
    assert processes.launch(program, 2, [], tmp_path / "resumed") == [0, 0]
    output = [(tmp_path / f"resumed/rank-{rank}.txt").read_text() for rank in (0, 1)]
    assert [text.count(f"done: {step + 2} steps") for text in output] == [1, 0], output
    assert [row["step"] for row in metrics_of(folder)] == [*range(1, step + 3)]
    assert (folder / "model/model.safetensors").exists()


def test_a_model_that_is_passed_in_is_trained_in_place(model: Path, tmp_path: Path) -> None:
    passed = AutoModelForImageTextToText.from_pretrained(model)
    before = {name: p.detach().clone() for name, p in passed.named_parameters()}
    warm(config_of(model, tmp_path / "run"), answer="answer", steps=1, train=ROWS, model=passed)
    saved = weights_of(Path(str(tmp_path / "run") + "-warm/model"))
    after = dict(passed.named_parameters())
    assert any(not torch.equal(after[name], before[name]) for name in before)
    assert all(torch.equal(after[name].detach(), saved[name]) for name in saved if name in after)


def test_a_model_that_no_run_wrote_stays(model: Path, tmp_path: Path) -> None:
    """Also if the run to come saves no model: the warm start does."""
    foreign = Path(str(tmp_path / "run") + "-warm/model/model.safetensors")
    foreign.parent.mkdir(parents=True)
    foreign.write_text("mine")
    config = config_of(model, tmp_path / "run", run={"save_model": False})
    with pytest.raises(ConfigError, match="model/"):
        warm(config, answer="answer", steps=1, train=ROWS)
    assert foreign.read_text() == "mine"


def test_what_cannot_be_taught_is_refused_before_the_folder_is_made(model: Path, tmp_path: Path) -> None:
    config = config_of(model, tmp_path / "run")
    for error, changes, options in (
        (ConfigError, {"rollout": {"environment": "zoom"}}, {}),
        (ConfigError, {}, {"steps": 0}),
        (ConfigError, {}, {"lists": "all"}),
        (DataError, {}, {"answer": "prompt"}),
        (DataError, {}, {"answer": "nothing"}),
        (DataError, {}, {"train": [*ROWS[:2], {**ROWS[2], "answer": ""}]}),
        (DataError, {}, {"train": [{**ROWS[0], "answer": ["red", "crimson"]}]}),
    ):
        with pytest.raises(error):
            given = {"answer": "answer", "train": ROWS, **options}
            warm(config_of(model, tmp_path / "run", **changes), **given)
    with pytest.raises(DataError, match="max_completion_length"):
        warm(config, answer="answer", train=[{**ROWS[0], "answer": "red " * 99}])
    dropping = config_of(model, tmp_path / "other", data={"on_overlong": "drop"})
    with pytest.raises(GuardStop):
        warm(dropping, answer="answer", steps=1, train=[{**ROWS[0], "answer": "red " * 99}] * 2)
    assert not Path(str(tmp_path / "other") + "-warm/model").exists()
