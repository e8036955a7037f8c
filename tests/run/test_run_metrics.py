"""metrics.jsonl and summary.json: what they hold, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mm_grpo.errors import DataError
from mm_grpo.run.metrics import append_event, append_row, cut_events, read_rows


def test_one_object_a_step_in_the_order_given(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_row(path, 1, {"reward": 0.5, "kl": 0, "rewards/iou/mean": None, "note": "warm-up"})
    append_row(path, 2, {"reward": np.float64(0.25)})
    assert path.read_text() == (
        '{"step": 1, "reward": 0.5, "kl": 0, "rewards/iou/mean": null, "note": "warm-up"}\n'
        '{"step": 2, "reward": 0.25}\n'
    )
    assert read_rows(path)[1] == {"step": 2, "reward": 0.25}


def test_what_is_no_plain_number_is_an_error(tmp_path: Path) -> None:
    for values in ({"kl": float("nan")}, {"kl": float("inf")}, {"step": 1}, {"loss": np.zeros(1)}):
        with pytest.raises((ValueError, TypeError)):
            append_row(tmp_path / "m", 3, values)  # type: ignore[arg-type]
    assert not (tmp_path / "m").exists()


def test_a_line_that_a_killed_run_left_unfinished_is_none_and_a_broken_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_text('{"step": 1, "reward": 1.0}\n{"step": 2, "rew')
    assert read_rows(path) == [{"step": 1, "reward": 1.0}]
    assert path.read_text().endswith('"rew')  # a reader changes nothing
    for line in ("{oops", "[1]"):
        path.write_text('{"step": 1}\n' + line + "\n")
        with pytest.raises(DataError, match="m, line 2: "):
            read_rows(path)


def test_events_come_back_and_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert read_rows(path) == []
    for step in (3, 5, 9):
        append_event(path, step, "zero_std", "warn", "m")
    event = {"name": "zero_std", "action": "warn", "message": "m"}
    with path.open("a") as file:
        file.write('{"step": 9, "na')
    assert read_rows(path) == [{"step": step, **event} for step in (3, 5, 9)]
    cut_events(path, 5)
    append_event(path, 6, "zero_std", "warn", "a\ud800b")
    ends = {"step": 5, **event}, {"step": 6, **event, "message": "a?b"}
    assert read_rows(path) == [{"step": 3, **event}, *ends]
