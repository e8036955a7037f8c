"""Evaluations of a run: what is kept of them on disk, the blind control, and what a resumed run is judged by."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from helpers.configs import merged, small_config
from helpers.small_runs import HELDOUT, ROWS, rows_of, vowels

from mm_grpo import GRPOTrainer
from mm_grpo.data.sources import load_eval
from mm_grpo.errors import ConfigError, DataError
from mm_grpo.rollout.eval_metric import EvalMetric
from mm_grpo.rollout.evaluate import Best, Evaluation
from mm_grpo.run.evaluations import Evaluations, default_control
from mm_grpo.run.paths import EVALUATION, RunPaths
from mm_grpo.run.rollout_log import logged_steps, read_rollouts

STEPS = 3


def trainer(path: Path, folder: Path, heldout: Any = HELDOUT, **changes: Any) -> GRPOTrainer:
    run = {"max_steps": STEPS, "eval_every": 1, "report": False, "save_model": False}
    run |= {"eval_blind": "shuffled", "headline": "vowels mean"}
    values: dict[str, Any] = {
        "rollout": {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 4},
        "run": run,
    }
    config = small_config(path, folder, **merged(values, changes))
    return GRPOTrainer(config, train=ROWS, eval=heldout, rewards=[vowels])


@pytest.fixture(scope="module")
def finished(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("evaluations") / "run"
    sets = {"held": HELDOUT, "other": ROWS[:2]}
    return folder, trainer(models["qwen2_vl"], folder, sets).train()


def test_a_row_of_an_evaluation_is_a_row_of_the_log_and_its_set(finished: tuple[Path, Any]) -> None:
    paths, summary = RunPaths(finished[0]), finished[1]
    assert logged_steps(paths, EVALUATION) == sorted({0, summary["best_step"], STEPS})
    rows = read_rollouts(paths, STEPS, EVALUATION)
    logged = [key for key in read_rollouts(paths, 1)[0] if key != "sight"]
    assert [*rows[0]] == ["step", "set", "blind", *logged[1:]]
    keys = ("set", "blind", "uid", "slot", "step", "advantage")
    found = [tuple(row[key] for key in keys) for row in rows]
    assert found == [
        *[("held", blind, f"held:{i}", i, STEPS, None) for blind in (None, "shuffled") for i in range(3)],
        *[("other", None, f"other:{i}", i, STEPS, None) for i in range(2)],
    ]
    own, exchanged = rows[:3], rows[3:6]
    for row, other in zip(own, exchanged, strict=True):
        assert row["images"] != other["images"] and row["seed"] == other["seed"]
        assert (row["messages"], row["columns"]) == (other["messages"], other["columns"])
    assert sorted(r["images"] for r in own) == sorted(r["images"] for r in exchanged)
    assert all((paths.images / name).is_file() for row in rows for name in row["images"])


def test_metrics_and_summary_have_the_blind_control_and_the_gap(finished: tuple[Path, Any]) -> None:
    folder, summary = finished
    logged = rows_of(folder)
    for metrics, when in ((logged[0], "before"), (logged[-1], "after")):
        rows = read_rollouts(RunPaths(folder), metrics["step"], EVALUATION)
        scores = {
            blind: [r["parts"]["vowels"] for r in rows if r["set"] == "held" and r["blind"] == blind]
            for blind in (None, "shuffled")
        }
        assert metrics["eval/held/score"] == pytest.approx(fmean(scores[None]))
        assert metrics["eval/held/rewards/vowels/mean"] == metrics["eval/held/score"]
        assert metrics["eval/blind/score"] == pytest.approx(fmean(scores["shuffled"]))
        gap = fmean(scores[None]) - fmean(scores["shuffled"])
        assert metrics["eval/blind/gap"] == pytest.approx(gap, abs=1e-12)
        assert metrics["eval/blind/gap_low"] <= gap + 1e-12 and gap - 1e-12 <= metrics["eval/blind/gap_high"]
        first = summary["first_set"][when]
        assert first["score"] == metrics["eval/held/score"]
        assert first["blind"]["gap"] == metrics["eval/blind/gap"] and first["blind"]["rows"] == 3
    assert summary["headline"] == "mean vowels" and summary["accuracy_before"] is None
    assert "eval/held/accuracy" not in logged[0]


def test_removed_images_are_in_no_prompt(models: dict[str, Path], tmp_path: Path) -> None:
    made = trainer(models["qwen2_vl"], tmp_path / "run", run={"eval_blind": "removed", "max_steps": 1})
    kept: list[tuple[str | None, Any]] = []

    found = made.evaluations.answer(
        made.runner, 0, keep=lambda n, blind, groups: kept.extend((blind, g) for g in groups)
    )
    made.close()
    prompts = {(blind, g.slot): g.prompt for blind, g in kept}
    assert len(prompts) == 6
    for row in range(3):
        assert len(prompts[None, row].engine_prompt.images) == 1
        blind = prompts["removed", row]
        assert blind.engine_prompt.images == () and not blind.vision
        assert not set(blind.token_ids) & made.processor.media_token_ids
    assert found["eval"].blind is not None and found["eval"].blind.kind == "removed"


@pytest.mark.parametrize(
    ("heldout", "kind", "error", "field"),
    [
        ({"blind": HELDOUT}, "removed", ConfigError, "data.eval"),
        ({"own": HELDOUT, "blind": HELDOUT}, None, ConfigError, "run.eval_blind"),
        ([{**HELDOUT[0]}, {**HELDOUT[0]}], "shuffled", DataError, "run.eval_blind"),
        (HELDOUT, "frames", ConfigError, "run.eval_blind = 'frames': no row of eval has a video"),
    ],
)
def test_controls_that_cannot_be_made(
    heldout: Any, kind: str, error: type[Exception], field: str, models: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(error, match=field):
        trainer(models["qwen2_vl"], tmp_path / "run", heldout, run={"eval_blind": kind})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        (HELDOUT, "shuffled"),
        ([HELDOUT[0]] * 2, None),
        ([{"prompt": "q", "answer": "a"}] * 2, None),
        ([{"prompt": "q", "video": f"{name}.mp4"} for name in "ab"], "shuffled"),
        ([{"prompt": "q", "video": "a.mp4"}] * 2, None),
    ],
)
def test_the_control_of_a_warmed_model_is_made_where_media_can_be_exchanged(rows: Any, kind: Any) -> None:
    config = small_config("m", data={"text_only": True})
    assert default_control(load_eval(config, rows)) == kind
    assert default_control({}) is None


def test_a_run_goes_on_under_its_first_headline(finished: tuple[Path, Any], models: dict[str, Path]) -> None:
    made = trainer(models["qwen2_vl"], finished[0].parent / "again")
    state = made.evaluations.state()
    made.close()
    made.evaluations.restore({**state, "headline": "mean vowels"})
    with pytest.raises(ConfigError, match="judged by 'mean reward' up to its checkpoint, and now by 'mean"):
        made.evaluations.restore({**state, "headline": "mean reward"})


@pytest.mark.parametrize(
    ("keep", "best", "after", "kept", "expected"),
    [
        ("best", 4, 0.5, (4, 6), 4),
        ("last", 4, 0.5, (4, 6), 6),
        ("best", 4, 0.9, (4, 6), 6),  # as good as the best
        ("best", 0, 0.5, (6,), 6),  # no checkpoint of it
        ("best", None, 0.5, (6,), 6),
    ],
)  # fmt: skip
def test_the_step_whose_weights_are_saved(
    keep: str, best: int | None, after: float, kept: tuple[int, ...], expected: int, tmp_path: Path
) -> None:
    config = small_config("m", tmp_path, run={"keep": keep})
    found = Evaluations(config, {}, EvalMetric(), several_turns=False)
    found.best = None if best is None else Best(0.9, best)
    found.after = {"one": Evaluation(None, after, 4, after)}
    assert found.kept_step(6, kept)[0] == expected
