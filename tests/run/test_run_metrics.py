"""metrics.jsonl and summary.json: what they hold, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mm_grpo.errors import DataError
from mm_grpo.run.metrics import MetricsLog, read_metrics, read_summary, write_summary
from mm_grpo.run.paths import RunPaths

SUMMARY = {"accuracy_before": 0.25, "accuracy_after": 0.5, "seconds": 12.5, "steps": 60, "eval": {}}


def test_one_object_a_step_in_the_order_given(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(1, {"reward": 0.5, "kl": 0, "rewards/iou/mean": None, "note": "warm-up"})
    log.append(2, {"reward": np.float64(0.25)})
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 1, "reward": 0.5, "kl": 0, "rewards/iou/mean": null, "note": "warm-up"}\n'
        '{"step": 2, "reward": 0.25}\n'
    )
    assert read_metrics(tmp_path / "metrics.jsonl")[1] == {"step": 2, "reward": 0.25}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_none_is_an_error(tmp_path: Path, value: float) -> None:
    log = MetricsLog(tmp_path / "m")
    with pytest.raises(ValueError, match=rf"metric 'kl' of step 3 is {value}; a metric is finite, or None"):
        log.append(3, {"reward": 1.0, "kl": value})
    assert not (tmp_path / "m").exists()


def test_only_plain_values_are_logged(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"metric 'loss' of step 1 is a ndarray; log a plain number"):
        MetricsLog(tmp_path / "m").append(1, {"loss": np.zeros(1)})
    with pytest.raises(ValueError, match=r"'step' is the row's own key"):
        MetricsLog(tmp_path / "m").append(1, {"step": 1})


def test_steps_go_up_also_after_a_restart(tmp_path: Path) -> None:
    MetricsLog(tmp_path / "m").append(4, {})
    with pytest.raises(ValueError, match=r"step 4 comes after step 4 in m; steps go up"):
        MetricsLog(tmp_path / "m").append(4, {})


def test_a_line_that_a_killed_run_left_unfinished_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_text('{"step": 1, "reward": 1.0}\n{"step": 2, "rew')
    assert read_metrics(path) == [{"step": 1, "reward": 1.0}]
    assert path.read_text().endswith('"rew')  # a reader changes nothing
    MetricsLog(path).append(2, {"reward": 0.5})
    assert path.read_text() == '{"step": 1, "reward": 1.0}\n{"step": 2, "reward": 0.5}\n'


@pytest.mark.parametrize(
    ("line", "why"),
    [("{oops", "not JSON"), ("[1]", "a row is an object"), ('{"reward": 1}', "a row is an object")],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, why: str) -> None:
    (tmp_path / "m").write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(DataError, match=rf"m, line 2: {why}"):
        read_metrics(tmp_path / "m")


def test_the_summary_comes_back_as_it_was_written(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert read_summary(paths) is None
    summary = SUMMARY | {"eval": {"heldout": {"before": 0.25, "after": 0.5}}, "accuracy_before": None}
    write_summary(paths, summary)
    assert read_summary(paths) == summary == json.loads((tmp_path / "summary.json").read_text())


def test_the_summary_is_complete_and_finite(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"summary.json: missing steps, eval"):
        write_summary(RunPaths(tmp_path), {k: v for k, v in SUMMARY.items() if k not in ("steps", "eval")})
    with pytest.raises(ValueError, match=r"summary.json: 'eval.heldout.after' is nan; a number is finite"):
        write_summary(RunPaths(tmp_path), SUMMARY | {"eval": {"heldout": {"after": float("nan")}}})
    with pytest.raises(ValueError, match=r"'curve\[1\]' is inf"):
        write_summary(RunPaths(tmp_path), SUMMARY | {"curve": [0.0, float("inf")]})
    assert not (tmp_path / "summary.json").exists()
