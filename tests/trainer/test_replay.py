"""A logged step is taken again: nothing differs in runs of many kinds, and what was planted is found where it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import calling
from helpers.ahead import LITTLE, noting_seeds, use_server
from helpers.configs import merged
from helpers.small_runs import ROWS, config_for, rollouts_of, vowels
from safetensors import safe_open
from safetensors.torch import save_file

from mm_grpo import GRPOConfig, GRPOTrainer
from mm_grpo.errors import ConfigError
from mm_grpo.files import TEMPORARY
from mm_grpo.learner.state import mark_of
from mm_grpo.replay import ReplayReport, replay
from mm_grpo.run.manifest import manifest_text
from mm_grpo.run.metrics import read_rows

RUN: dict[str, Any] = {"run": {**LITTLE, "max_steps": 4, "save_every": 2, "keep_checkpoints": 9}}
TURNS: dict[str, Any] = {
    "model": {"processor": f"{calling.__file__}:Calling"},
    "rollout": {"max_completion_length": 80, "max_turns": 2, "environment": f"{calling.__file__}:Gallery",
                "environment_workers": 0},
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lora-bf16": {"model": {"dtype": "bfloat16", "lora": {"rank": 2}}, "algorithm": {"beta": 0.1}},
    "attempts": {"rollout": {"max_attempts": 2, "num_generations": 2}, "optim": {"updates_per_step": 2}},
    "ahead": {"rollout": {"max_staleness": 1}},
    "turns": merged(TURNS, {"run": {"sight_every": 1}}),
}


def train(path: Path, folder: Path, kind: str, *, killed_after: int | None = None) -> None:
    """Train, or end in the update after step `killed_after` as a killed process does: completions are logged."""
    trainer = GRPOTrainer(config_for(path, folder, **merged(RUN, KINDS[kind])), train=ROWS, rewards=[vowels])
    if killed_after is None:
        trainer.train()
        return
    update = trainer.learner.update
    trainer.learner.update = lambda g: update(g) if trainer.sync.version < killed_after else 1 / 0  # type: ignore
    with pytest.raises(ZeroDivisionError):
        trainer.train()


def again(folder: Path, step: int, **arguments: Any) -> ReplayReport:
    return replay(folder, step, **{"train": ROWS, "rewards": [vowels], **arguments})


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_taken_again_is_the_logged_one(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if "ahead" in kind:
        use_server(monkeypatch)
    path, folder = models["qwen2_5_vl"], tmp_path / "run"
    train(path, folder, kind)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    sampled = 4 * KINDS[kind].get("rollout", {}).get("num_generations", 3)
    for step, start in ((4, 2), (3, 0 if "ahead" in kind else 2), (1, 0)):
        report = again(folder, step)
        assert (report.start, report.difference, report.metric_gap) == (start, None, 0.0), report.lines()
        assert report.completions >= (step - start) * sampled
        assert (report.update_gap, report.tensor_gap) == ((0.0, 0.0) if step == 4 else (None, 0.0))
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


@pytest.mark.slow
def test_with_steps_ahead_the_step_itself_is_sampled_again(
    model: Path, tmp_path: Path, server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(model, tmp_path, "ahead")
    asked: list[list[int]] = []
    build = GRPOTrainer.__init__

    def noted(self: GRPOTrainer, *arguments: Any, **options: Any) -> None:
        build(self, *arguments, **options)
        asked.append(noting_seeds(monkeypatch, self.engine))

    monkeypatch.setattr(GRPOTrainer, "__init__", noted)
    assert again(tmp_path, 4).difference is None
    logged = [{row["seed"] for row in rollouts_of(tmp_path, step)} for step in (3, 4)]
    # the checkpoint of step 2 holds step 3, which was sampled under the weights of step 1
    assert logged[1] <= {*asked[0]} and not logged[0] & {*asked[0]}


@pytest.mark.slow
def test_a_killed_run_is_replayed_to_the_step_that_it_did_not_finish(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []
    monkeypatch.setattr("mm_grpo.replay.read_rows", lambda path: reads.append(path) or read_rows(path))
    train(model, tmp_path, "plain", killed_after=3)
    assert (again(tmp_path, 3).metric_gap, again(tmp_path, 3).start) == (0.0, 2)
    report = again(tmp_path, 4)
    assert (report.difference, report.update_gap, report.completions) == (None, None, 24)
    assert len(reads) == 3  # one of each replay


def edit(file: Path, number: int, change: Callable[[dict[str, Any]], Any]) -> None:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    change(rows[number])
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def louder(completion: str) -> float:
    return 2 * vowels(completion)


@pytest.fixture(scope="module")
def whole(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay") / "run"
    train(models["qwen2_5_vl"], folder, "plain")
    return folder


OTHER_ROWS = [{**row, "prompt": "What is there?"} if i == 2 else row for i, row in enumerate(ROWS)]
PLANTED: dict[str, tuple[Callable[[dict[str, Any]], Any] | None, dict[str, Any], str, str]] = {
    "image": (lambda r: r["images"].reverse() or r["images"].append("0" * 32), {}, "prompt", "images"),
    "row": (None, {"train": OTHER_ROWS}, "prompt", "messages"),
    "seed": (lambda r: r.update(seed=r["seed"] + 1), {}, "seed", "seed"),
    "text": (
        lambda r: r.update(completion=r["completion"][:2] + "?"),
        {},
        "token",
        "completion, character 2",
    ),
    "ids": (lambda r: r.update(token_digest="0" * 16), {}, "token", "token_digest"),
    "reward": (None, {"rewards": [louder]}, "reward", "parts"),
    "part": (lambda r: r["parts"].update(vowels=9.0), {}, "reward", "parts 'vowels'"),
    "advantage": (lambda r: r.update(advantage=r["advantage"] + 1e-3), {}, "advantage", "advantage"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_found_at_its_stage(whole: Path, tmp_path: Path, name: str) -> None:
    change, arguments, stage, place = PLANTED[name]
    shutil.copytree(whole, tmp_path / "run")
    if change is not None:
        edit(tmp_path / "run/rollouts/step-000003.jsonl", 4, change)
    report = again(tmp_path / "run", 4, **arguments)
    assert report.difference is not None
    assert (report.difference.step, report.difference.stage) == (3, stage)
    assert place in report.difference.place
    if change is not None:
        assert "slot 1, generation 1 " in report.difference.place


@pytest.mark.slow
def test_a_planted_update_is_found(whole: Path, tmp_path: Path) -> None:
    metrics, weights = tmp_path / "metrics", tmp_path / "weights"
    for folder in (metrics, weights):
        shutil.copytree(whole, folder)
    edit(metrics / "metrics.jsonl", 2, lambda row: row.update(grad_norm=row["grad_norm"] * 1.001))
    found = again(metrics, 4).difference
    assert found and (found.step, found.stage, found.place) == (3, "gradient", "grad_norm")
    checkpoint, name = (
        weights / "checkpoints/step-000004",
        "model.language_model.layers.1.mlp.down_proj.weight",
    )
    (state,), (older,) = (weights.glob(f"checkpoints/step-00000{step}/state-*") for step in (4, 2))
    with safe_open(state, framework="pt") as file, safe_open(older, framework="pt") as start:
        tensors, texts = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
        tensors[f"master/{name}"] += 1e-4
        update = tensors[f"master/{name}"] - start.get_tensor(f"master/{name}")
    save_file(tensors, state, texts)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"] = [mark_of(state)]
    (checkpoint / "manifest.json").write_text(manifest_text(manifest))
    report = again(weights, 4)
    assert report.difference and name in report.difference.place and report.metric_gap == 0.0
    share = 1e-4 * update.numel() ** 0.5 / float(update.norm())
    assert report.tensor_gap == pytest.approx(share, rel=1e-3)
    assert report.update_gap and 1e-5 < report.update_gap < report.tensor_gap


@pytest.mark.slow
def test_relative_paths_start_where_the_run_did(
    models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
        monkeypatch.chdir(folder)
        if folder is folders[0]:
            (folder / "base").symlink_to(models["qwen2_5_vl"])
            train(Path("base"), Path("runs/a"), "plain")
    assert again(Path("../first/runs/a"), 3).completions == 12 and Path.cwd() == folders[1]
    config = folders[0] / "runs/a/config.yaml"
    config.write_text(config.read_text().replace("path: base", f"path: /tmp/{TEMPORARY}smoke_x/model"))
    with pytest.raises(ConfigError, match="--smoke"):
        again(folders[0] / "runs/a", 3)


@pytest.mark.slow
def test_what_cannot_be_replayed_is_refused_by_name(whole: Path, tmp_path: Path) -> None:
    changed, gone = (
        GRPOConfig.from_yaml(whole / "config.yaml", [field])
        for field in ("optim.learning_rate=1", "rollout.server.urls=[unix:///gone.sock]")
    )
    refused = (
        (5, {}, "1 to 4"),
        (3, {"config": changed}, "optim.learning_rate"),
        (3, {"config": gone}, "gone.sock"),
    )
    for step, options, word in refused:
        with pytest.raises(ConfigError, match=word):
            again(whole, step, **options)
    with pytest.raises(ConfigError, match="run folder"):
        again(tmp_path, 1)
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run/environment.json").unlink()
    assert again(tmp_path / "run", 1).versions[0].startswith("not known")
    (tmp_path / "run/rollouts/step-000002.jsonl").write_text('{"slot": 0}\n')
    with pytest.raises(ConfigError, match="step-000002"):
        again(tmp_path / "run", 2)
