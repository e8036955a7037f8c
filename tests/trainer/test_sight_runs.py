"""Sight in whole runs: what a step logs, and the perception term."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import tiny
from helpers.run_folders import metrics_of
from helpers.small_runs import ROWS, config_for, rollouts_of, rows_of, vowels

from mm_grpo import GRPOTrainer
from mm_grpo.errors import ConfigError
from mm_grpo.run.paths import EVALUATION, RunPaths
from mm_grpo.run.rollout_log import read_rollouts


def test_measured_steps_have_the_metrics_and_their_rollouts_the_tokens(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    run = {"max_steps": 4, "sight_every": 3, "report": False}
    config = config_for(model, tmp_path / "r", run=run)
    GRPOTrainer(config, train=ROWS, rewards=[vowels]).train()
    rows = rows_of(tmp_path / "r")
    assert [row["step"] for row in rows if "sight/nats" in row] == [1, 3]
    assert [row["step"] for row in rows if "time/sight" in row] == [1, 3]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [" sight " in line for line in lines] == [True, False, True, False]
    logged = rollouts_of(tmp_path / "r", 1)
    assert len(logged) == 12 and not any("sight" in row for row in rollouts_of(tmp_path / "r", 4))
    for row in logged:
        sight = row["sight"]
        assert len(sight["tokens"]) == len(sight["pieces"]) == row["tokens"]
        assert sight["nats"] == pytest.approx(sum(sight["tokens"]), abs=1e-3)
        assert sight["other"] != row["uid"] and sight["other"].startswith("train:")
    nats = [row["sight"]["nats"] for row in logged]
    assert rows[0]["sight/nats"] == pytest.approx(sum(nats) / 12, abs=1e-4) and any(nats)
    tokens = sum(row["tokens"] for row in logged)
    assert rows[0]["sight/nats_per_token"] == pytest.approx(sum(nats) / tokens, abs=1e-4)
    assert rows[0]["sight/reward"] == pytest.approx(rows[0]["reward"])  # every row has an image


def test_a_run_on_videos_measures_their_order_and_answers_without_it(model: Path, tmp_path: Path) -> None:
    films = [[tiny.picture(10 * i + f, 56, 56) for f in range(4)] for i in range(6)]
    rows = [{"prompt": f"say {i}", "video": film, "answer": "a"} for i, film in enumerate(films)]
    run = {"max_steps": 1, "sight_every": 1, "report": False, "eval_blind": "frames"}
    config = config_for(model, tmp_path / "r", run=run)
    GRPOTrainer(config, train=rows, eval=rows[:3], rewards=[vowels]).train()
    metrics = [*metrics_of(tmp_path / "r")]
    (step,) = (row for row in metrics if "sight/nats" in row)
    logged = rollouts_of(tmp_path / "r", 1)
    nats = [row["order"]["nats"] for row in logged]
    assert step["sight/order_nats"] == pytest.approx(sum(nats) / len(logged), abs=1e-4) and any(nats)
    assert all(len(row["order"]["tokens"]) == row["tokens"] and "other" in row["sight"] for row in logged)
    answered = read_rollouts(RunPaths(tmp_path / "r"), 1, EVALUATION)
    assert [row["blind"] for row in answered] == [None] * 3 + ["frames"] * 3
    for whole, moved in zip(answered[:3], answered[3:], strict=True):
        frames, others = whole["videos"][0]["frames"], moved["videos"][0]["frames"]
        assert sorted(frames) == sorted(others) and frames != others
        assert whole["videos"][0]["times"] == moved["videos"][0]["times"]
    assert "eval/blind/gap" in metrics[-1]


def test_it_changes_no_update_and_0_leaves_it_out(model: Path, tmp_path: Path) -> None:
    for name, every in (("with", 1), ("without", 0)):
        config = config_for(model, tmp_path / name, run={"max_steps": 2, "sight_every": every})
        GRPOTrainer(config, train=ROWS, rewards=[vowels]).train()
    measured, plain = metrics_of(tmp_path / "with"), metrics_of(tmp_path / "without")
    assert all("sight/nats" in row for row in measured) and not any("sight/nats" in row for row in plain)
    without = [
        {k: v for k, v in row.items() if not k.startswith(("sight/", "rollouts/"))} for row in measured
    ]
    assert without == [{k: v for k, v in row.items() if k != "rollouts/step"} for row in plain]


def test_the_perception_term_of_a_run_and_a_run_with_nothing_to_mask(model: Path, tmp_path: Path) -> None:
    term = {"perception_coef": 0.5, "perception_entropy_coef": 0.1}
    config = config_for(model, tmp_path / "r", algorithm=term, run={"max_steps": 2})
    GRPOTrainer(config, train=ROWS, rewards=[vowels]).train()
    rows = rows_of(tmp_path / "r")
    assert all(row["perception/kl"] > 0 for row in rows) and all(row["learner/updates"] == 1 for row in rows)
    assert [row["learner/images_encoded"] for row in rows] == [2 * row["prompts/images"] for row in rows]
    text = [{"prompt": f"say {i}", "answer": "a"} for i in range(4)]
    text_only = config.with_values({"run.overwrite": True, "data.text_only": True})
    with pytest.raises(ConfigError, match="none of 4 rows of the training set has an image"):
        GRPOTrainer(text_only, train=text, rewards=[vowels])
