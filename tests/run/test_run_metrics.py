"""metrics.jsonl and summary.json: what they hold, and what they refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from mm_grpo.errors import DataError
from mm_grpo.run.metrics import MetricsLog, iter_metrics, new_rows, read_metrics, read_summary, write_summary
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


def test_what_is_no_plain_number_of_a_new_step_is_an_error(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "m")
    for value in (float("nan"), float("inf"), 1e300, 10**30):
        with pytest.raises(ValueError, match=f"metric 'kl' of step 3 is {re.escape(str(value))}"):
            log.append(3, {"reward": 1.0, "kl": value})
    with pytest.raises(TypeError, match="metric 'loss' of step 1 is a ndarray"):
        log.append(1, {"loss": np.zeros(1)})
    with pytest.raises(ValueError, match="'step'"):
        log.append(1, {"step": 1})
    assert not (tmp_path / "m").exists()
    log.append(4, {})
    with pytest.raises(ValueError, match="step 4 comes after step 4"):
        MetricsLog(tmp_path / "m").append(4, {})  # also after a restart


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
    for wrong in (
        {k: v for k, v in SUMMARY.items() if k != "steps"},
        SUMMARY | {"eval": {"a": float("nan")}},
    ):
        with pytest.raises(ValueError):
            write_summary(RunPaths(tmp_path), wrong)
    assert not (tmp_path / "summary.json").exists()


def bytes_moved() -> tuple[int, int]:
    """The bytes that this thread has read and written so far: one that another test left may be at work."""
    counts = dict(line.split(": ") for line in Path("/proc/thread-self/io").read_text().splitlines())
    return int(counts["rchar"]), int(counts["wchar"])


def test_the_cost_of_a_row_does_not_grow_with_the_run(tmp_path: Path) -> None:
    row = {"reward": 0.5, **{f"metric/{i}": i / 7 for i in range(60)}}
    line = json.dumps({"step": 1000, **row}) + "\n"
    moved = {}
    for rows in (1_000, 20_000):
        path = tmp_path / f"{rows}.jsonl"
        path.write_text(line * rows)
        idle = bytes_moved()
        before = bytes_moved()
        log = MetricsLog(path)
        log.append(1001, row)
        log.append(1002, row)
        after = bytes_moved()
        moved[rows] = [after[i] - before[i] - (before[i] - idle[i]) for i in (0, 1)]
        assert log.last_step == 1002 and path.stat().st_size == len(line) * (rows + 2)
    (read, written), (read_long, written_long) = moved.values()
    assert written == written_long == 2 * len(line)
    assert read_long <= read + 100 and read < 20_000  # the end of the file; a full read would be 30 MB


def test_the_end_of_a_log_is_found_whatever_the_length_of_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "m"
    for lines, torn in (([], "x" * 40_000), (["y" * 50_000], ""), (["a", "b" * 40_000], "c" * 70_000)):
        whole = "".join(json.dumps({"step": i, "text": text}) + "\n" for i, text in enumerate(lines))
        path.write_text(whole + torn)
        assert MetricsLog(path).last_step == len(lines) - 1
        assert path.read_text() == whole
    path.write_text('{"step": 1}\n{oops\n')
    with pytest.raises(DataError, match="m, last line: not JSON"):
        MetricsLog(path)


def test_a_reader_that_comes_again_reads_what_was_added(tmp_path: Path) -> None:
    path = tmp_path / "m"
    log = MetricsLog(path)
    log.append(1, {"reward": 0.5})
    rows, at = new_rows(path, 0)
    assert rows == [{"step": 1, "reward": 0.5}] == list(iter_metrics(path))
    with path.open("a") as file:
        file.write('{"step": 2, "rew')
    assert new_rows(path, at) == ([], at)
    log = MetricsLog(path)
    log.append(2, {})
    assert new_rows(path, at) == ([{"step": 2}], path.stat().st_size)
