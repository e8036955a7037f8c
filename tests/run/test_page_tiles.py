"""The numbers at the top of report.html and its table of evaluations: worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from mm_grpo.run.curves import Curves
from mm_grpo.run.tiles import duration, evaluation_table, tiles

BLIND: dict[str, Any] = {
    "kind": "shuffled",
    "rows": 8,
    "score": 0.25,
    "interval": [0.125, 0.5],
    "reward": 0.25,
}
SUMMARY: dict[str, Any] = {
    "headline": "accuracy",
    "score_before": 0.25,
    "score_after": 0.75,
    "accuracy_before": 0.25,
    "accuracy_after": 0.75,
    "seconds": 125,
    "steps": 20,
    "eval": {
        "a": {"before": 0.25, "after": 0.75, "rows": 8},
        "b": {"before": 0.5, "after": 0.375, "rows": 8},
    },
    "first_set": {
        "before": {"interval": [0.125, 0.5], "blind": {**BLIND, "gap": 0.0, "gap_interval": [-0.125, 0.125]}},
        "after": {"interval": [0.5, 0.875], "blind": {**BLIND, "gap": 0.5, "gap_interval": [0.25, 0.625]}},
    },
}


def test_the_tiles_are_worked_out() -> None:
    curves = Curves()
    for step in range(1, 21):
        curves.take({"step": step, "reward": step / 10, "step_time": 2.0})
    summary = {"accuracy_before": None, "accuracy_after": 0.5, "seconds": 3725, "steps": 20, "eval": {}}
    assert tiles(curves, summary) == [
        {"word": "accuracy", "value": "50.0%", "note": ""},
        {"word": "reward", "value": "1.550", "note": "mean of the last 10 steps, from 0.100"},
        {"word": "steps", "value": "20", "note": "2.0 s each"},
        {"word": "time", "value": "1 h 2 min", "note": "from start to end"},
    ]
    assert tiles(Curves(), None) == []


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(59.6, "60 s"), (125, "2 min"), (3599, "1 h 0 min"), (3725, "1 h 2 min")],
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_the_gap_that_the_images_make_stands_beside_the_accuracy() -> None:
    assert tiles(Curves(), SUMMARY)[:2] == [
        {
            "word": "accuracy",
            "value": "75.0%",
            "note": "95 % interval 50.0% to 87.5%; from 25.0%, +50.0 points",
        },
        {
            "word": "what the images add",
            "value": "+50.0",
            "unit": "points",
            "note": "95 % interval +25.0 to +62.5; images shuffled: 25.0%; from +0.0 points",
        },
    ]


def test_a_score_that_is_no_share_is_no_percentage() -> None:
    of_score = SUMMARY | {"headline": "mean reward", "accuracy_before": None, "accuracy_after": None}
    first, second, _ = tiles(Curves(), of_score)
    assert (first["word"], first["value"]) == ("mean reward", "0.75")
    assert first["note"] == "95 % interval 0.5 to 0.875; from 0.25, +0.5"
    assert (second["value"], second["unit"]) == ("+0.5", "")
    assert evaluation_table(Curves(), of_score)[0]["after"] == "0.75"


def evaluated(*steps: tuple[int, float, float]) -> Curves:
    curves = Curves()
    for step, right, gap in steps:
        row = {
            "step": step,
            "eval/a/accuracy": right,
            "eval/a/score": right,
            "eval/a/score_low": right - 0.25,
        }
        row |= {"eval/a/score_high": right + 0.25, "eval/b/accuracy": 0.5, "eval/b/score": 0.375}
        row |= {"eval/b/score_low": 0.25, "eval/b/score_high": 0.5, "eval/blind/gap": gap}
        curves.take(row | {"eval/blind/score": 0.125, "eval/blind/gap_low": 0.0, "eval/blind/gap_high": 1.0})
    return curves


def test_a_run_that_goes_on_has_those_of_its_last_evaluation() -> None:
    curves = evaluated((0, 0.25, 0.125), (10, 0.5, 0.375))
    curves.take({"step": 11, "reward": 0.5})
    first, second, *_ = tiles(curves, None, "removed")
    assert first["value"] == "50.0%"
    assert first["note"] == "95 % interval 25.0% to 75.0%; from 25.0%, +25.0 points"
    assert second["value"] == "+37.5"
    assert second["note"] == "95 % interval +0.0 to +100.0; images removed: 12.5%; from +12.5 points"
    words = [tile["word"] for tile in tiles(evaluated((0, 0.25, 0.125)), None)]
    assert words == ["accuracy", "steps"]  # `blind` is a set, for the config asks for no control
    assert tiles(evaluated((0, 0.25, 0.125)), None)[0]["note"] == "95 % interval 0.0% to 50.0%"


def test_the_table_has_the_control_and_the_intervals() -> None:
    rows = evaluation_table(evaluated((20, 0.75, 0.5)), SUMMARY)
    assert [tuple(row[key] for key in ("set", "before", "after", "interval", "change")) for row in rows] == [
        ("a", "25.0%", "75.0%", "50.0% to 87.5%", "+50.0 points"),
        ("a, images shuffled", "25.0%", "25.0%", "12.5% to 50.0%", "+0.0 points"),
        ("a, what the images add", "+0.0 points", "+50.0 points", "+25.0 to +62.5", "+50.0 points"),
        ("b", "50.0%", "37.5%", "25.0% to 50.0%", "-12.5 points"),
    ]
    assert evaluation_table(Curves(), None) == []
    assert evaluation_table(Curves(), SUMMARY)[-1]["interval"] == "–"
