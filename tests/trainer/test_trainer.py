"""The loop on tiny models: what it does, what it leaves behind, and that it repeats itself exactly."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.run_folders import metrics_of
from helpers.small_runs import HELDOUT, ROWS, config_for, rollouts_of, rows_of, vowels
from transformers import AutoModelForImageTextToText, AutoProcessor

from mm_grpo import GRPOConfig, GRPOTrainer
from mm_grpo.errors import ConfigError, DataError, GuardStop, RewardError
from mm_grpo.learner.loss import pack_loss
from mm_grpo.rollout.seeds import SeedPlan
from mm_grpo.run.metrics import read_rows

pytestmark = pytest.mark.lowest


@pytest.fixture(scope="module")
def finished(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "one"
    config = config_for(models["qwen2_5_vl"], folder)
    GRPOTrainer(config, train=ROWS, eval=HELDOUT, rewards=[vowels]).train()
    return folder


def test_a_run_leaves_everything_that_is_promised(finished: Path) -> None:
    names = {p.name for p in finished.iterdir()}
    expected = {"config.yaml", "environment.json", "metrics.jsonl", "rollouts", "model"}
    assert names == expected | {"summary.json", "report.html", "mm_grpo_run.json"}
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["steps"] == 3 and summary["seconds"] > 0
    assert summary["headline"] == "mean reward" and summary["accuracy_before"] is None
    evaluated = summary["eval"]["eval"]
    assert summary["score_before"] == evaluated["before"] and evaluated["rows"] == 3
    assert GRPOConfig.from_yaml(finished / "config.yaml").run.seed == 5
    described = json.loads((finished / "environment.json").read_text())["rewards"]
    assert described[0]["name"] == "vowels" and len(described[0]["sha256"]) == 64


def test_metrics_have_trls_names_and_honest_values(finished: Path) -> None:
    rows = rows_of(finished)
    assert [r["step"] for r in rows] == [0, 1, 2, 3]
    rows = rows[1:]
    for row in rows:
        names = "rewards/vowels/std completions/clipped_ratio clip_ratio/region_mean step_time time/data"
        assert {*names.split(), "reward_std", "entropy", "grad_norm", "learning_rate", "loss"} <= row.keys()
        assert row["sampling/sampling_logp_difference/max"] < 1e-5
        assert row["learner/update_norm"] > 0
        logged = rollouts_of(finished, row["step"])
        assert len(logged) == 12
        assert row["reward"] == pytest.approx(sum(x["reward"] for x in logged) / 12)
        assert row["completions/mean_length"] == pytest.approx(sum(x["tokens"] for x in logged) / 12)
    assert rows[0]["num_tokens"] < rows[1]["num_tokens"] < rows[2]["num_tokens"]


@pytest.mark.field_bug("unread-seed")
def test_seeds_in_the_log_are_those_of_the_law(finished: Path) -> None:
    plan = SeedPlan(5, 4, 3, 1, 3)
    seen = set()
    for step in (1, 2, 3):
        for row in rollouts_of(finished, step):
            assert row["seed"] == plan.group(step, row["slot"])[row["generation"]]
            assert row["weight_versions"] == [[0, step - 1]]
            seen.add(row["seed"])
    assert len(seen) == 36


def test_rewards_and_advantages_in_the_log_belong_together(finished: Path) -> None:
    for row in rollouts_of(finished, 2):
        assert row["reward"] == pytest.approx(vowels(row["completion"]))
    for slot in range(4):
        group = [r for r in rollouts_of(finished, 2) if r["slot"] == slot]
        assert sum(r["advantage"] for r in group) == pytest.approx(0, abs=1e-9)
        assert len({r["uid"] for r in group}) == 1


def test_the_saved_model_loads_without_us_and_has_moved(finished: Path, models: dict[str, Path]) -> None:
    saved = AutoModelForImageTextToText.from_pretrained(finished / "model")
    base = AutoModelForImageTextToText.from_pretrained(models["qwen2_5_vl"])
    assert any(not torch.equal(a, b) for a, b in zip(saved.parameters(), base.parameters(), strict=True))
    assert AutoProcessor.from_pretrained(finished / "model").chat_template


def test_the_same_run_again_is_the_same(finished: Path, models: dict[str, Path], tmp_path: Path) -> None:
    config = config_for(models["qwen2_5_vl"], tmp_path / "two")
    GRPOTrainer(config, train=ROWS, eval=HELDOUT, rewards=[vowels]).train()
    assert metrics_of(finished) == metrics_of(tmp_path / "two")
    assert rollouts_of(finished, 3) == rollouts_of(tmp_path / "two", 3)


@pytest.mark.field_bug("one-text-two-images")
def test_identical_rows_are_two_groups(model: Path, tmp_path: Path) -> None:
    twice = [ROWS[0], ROWS[0], {**ROWS[0], "images": ROWS[1]["images"]}]
    changes = {"rollout": {"prompts_per_step": 3}, "run": {"max_steps": 1}}
    config = config_for(model, tmp_path / "r", **changes)
    GRPOTrainer(config, train=twice, rewards=[vowels]).train()
    logged = rollouts_of(tmp_path / "r", 1)
    assert {r["uid"] for r in logged} == {"train:0", "train:1", "train:2"}
    assert len({r["seed"] for r in logged}) == 9
    assert len({tuple(r["images"]) for r in logged}) == 2


def test_long_prompts_are_never_cut(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": text} for text in ("short", "a much longer question " * 9, "tiny", "s")]
    limits = {"max_prompt_length": 120, "text_only": True}
    config = config_for(model, tmp_path / "a", data=limits)
    with pytest.raises(DataError, match=r"train:1: the prompt has 2\d\d tokens, and"):
        GRPOTrainer(config, train=rows, rewards=[vowels]).train()
    of_packs = {"max_tokens_per_pack": 126}  # of which a completion takes up to 6
    for name, tokens, optim in (("b", 120, {}), ("c", None, of_packs)):
        data = {**limits, "max_prompt_length": tokens, "on_overlong": "drop"}
        dropping = config_for(model, tmp_path / name, data=data, optim=optim, run={"max_steps": 1})
        GRPOTrainer(dropping, train=rows, rewards=[vowels]).train()
        assert rows_of(tmp_path / name)[0]["prompts/dropped"] == 1
        logged = rollouts_of(tmp_path / name, 1)
        plan = SeedPlan(5, 4, 3, 1, 1)
        assert len(logged) == 9 and "train:1" not in {r["uid"] for r in logged}
        assert all(r["seed"] == plan.group(1, r["slot"])[r["generation"]] for r in logged)
    # a step that no prompt is left of makes no update, and the run goes on
    data, rollout = {**limits, "on_overlong": "drop", "shuffle": False}, {"prompts_per_step": 1}
    emptied = config_for(model, tmp_path / "d", data=data, rollout=rollout)
    with caplog.at_level("WARNING"):
        GRPOTrainer(emptied, train=rows, rewards=[vowels]).train()
    metrics = rows_of(tmp_path / "d")
    assert [(r["learner/updates"], r["prompts/dropped"]) for r in metrics] == [(1, 0), (0, 1), (1, 0)]
    assert "step 2: all 1 prompts were dropped" in caplog.text and not rollouts_of(tmp_path / "d", 2)


@pytest.mark.field_bug("exception-is-zero")
def test_a_reward_that_raises_stops_with_its_line_and_leaves_whole_files(model: Path, tmp_path: Path) -> None:
    def fragile(completion: str) -> float:
        if (tmp_path / "r/rollouts/step-000001.jsonl").exists():
            raise KeyError("answer")
        return vowels(completion)

    with pytest.raises(RewardError, match=r"fragile.*KeyError.*test_trainer\.py:\d+"):
        GRPOTrainer(config_for(model, tmp_path / "r"), train=ROWS, rewards=[fragile]).train()
    assert [r["step"] for r in rows_of(tmp_path / "r")] == [1]
    assert [p.name for p in (tmp_path / "r" / "rollouts").glob("*.jsonl")] == ["step-000001.jsonl"]


@pytest.mark.field_bug("never-steps")
def test_an_optimizer_that_holds_other_tensors_is_stopped(model: Path, tmp_path: Path) -> None:
    trainer = GRPOTrainer(config_for(model, tmp_path / "r"), train=ROWS, rewards=[vowels])
    trainer.learner.optimizer.adamw.step = lambda: None  # type: ignore[method-assign,assignment]
    with pytest.raises(GuardStop, match="guard update_happens: the weights did not change"):
        trainer.train()


@pytest.mark.parametrize(("heldout", "every"), [(HELDOUT, 3), (None, 0)])
def test_a_short_trial_is_evaluated_ten_times(heldout: Any, every: int, model: Path, tmp_path: Path) -> None:
    run = {"dir": str(tmp_path / "{time}"), "max_steps": 30, "eval_every": None, "eval_blind": "shuffled"}
    config = config_for(model, run=run, optim={"warmup_steps": 31})
    trainer = GRPOTrainer(config, train=ROWS, eval=heldout, rewards=[vowels])
    assert trainer.config.run.eval_every == every
    assert any("optim.warmup_steps = 31" in each for each in trainer.plan.sentences)
    assert re.fullmatch(r"\d{8}-\d{6}", trainer.folder.paths.root.name)
    with pytest.raises(ConfigError, match=r"^run.dir"):
        GRPOTrainer(config, train=ROWS, eval=heldout, rewards=[vowels], resume=True)


def test_a_path_is_no_loaded_model(models: dict[str, Path], tmp_path: Path) -> None:
    config = config_for(models["qwen2_5_vl"], tmp_path / "run")
    with pytest.raises(ConfigError, match=r"^model = 'some/model': must be a loaded one"):
        GRPOTrainer(config, train=ROWS, rewards=[vowels], model="some/model")


def test_a_loss_that_is_no_number_is_a_row_where_guards_warn(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def spoilt(config: Any, inputs: Any, tokens: Any, statistics: Any) -> Any:
        statistics.add(loss=torch.tensor(math.nan), entropy=torch.tensor(math.nan))
        return pack_loss(config, inputs, tokens, statistics)

    monkeypatch.setattr("mm_grpo.learner.learner.pack_loss", spoilt)
    run = {"max_steps": 2, "save_every": 1, "guards": {"update_happens": "warn"}}
    warned = config_for(model, tmp_path / "w", run=run)
    GRPOTrainer(warned, train=ROWS, rewards=[vowels]).train()
    assert "loss" in caplog.text and "cannot be written" not in caplog.text
    assert [row["loss"] for row in rows_of(tmp_path / "w")] == ["nan"] * 2  # JSON has no number for it
    (first, _) = read_rows(tmp_path / "w/metrics.jsonl")
    assert math.isnan(first["loss"])
    assert (tmp_path / "w/report.html").is_file()
