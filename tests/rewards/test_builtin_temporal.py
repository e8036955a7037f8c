"""temporal_iou: how intervals are written, and times in parts of a video that is shown from second 1 to second 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers import tiny

from mm_grpo.rewards.builtins.temporal import intervals_in, temporal_iou
from mm_grpo.types import Sample

ROW = tiny.sample("row:0", videos=(tiny.video(0),))
"""Frames at 1, 1.5, 2 and 2.5 s, each for half a second."""
FORMS = [
    "[3.5, 8]", "(3.5,8)", "[[3.5, 8.0]]", "3.5 8", "3.5, 8.", "3.5-8", "3.5s-8s", "**3.5** to **8**",
    '{"start": 3.5, "end": 8}', '{"start_time": "0:03.5", "end_time": "00:00:08"}', "start=3.5s; end=8s",
    "['3.5', '8']", "From 3.5 to 8 seconds.", "3.5 s \u2013 8 s", "between 0:03.5 and 0:08", "3.5 until 8 sec",
    "It starts at 3.5 seconds and ends at 8 seconds.", "<3.5 seconds> to <8 seconds>", "[3.5, 8]: 0:03.5 - 0:08",
    "<think>1 to 2</think> 3.5 to 8", "1 to 2 <answer>3.5 to 8</answer> 1 to 2",
]  # fmt: skip
NO_INTERVAL = [
    "3.5", "[3.5, 8, 9]", "-3.5 to 8", "[-3.5, 8]", "start: -3.5, end: 8", "3.5 to 8 minutes", "1m30s to 1m45s",
    "3.5 to 8 %", "3 to 8 frames", "0:75 to 0:80", "3.5.1 to 8.2.1", "[\u0663, \u0668]", "\u00bd to 8", "[3.5, 1e400]",
    "9" * 400 + " to " + "9" * 401, "[3.5, " + "9" * 400 + "]", "<answer></answer> 3.5 to 8",
]  # fmt: skip


@pytest.mark.parametrize("text", FORMS)
def test_forms_of_an_interval(text: str) -> None:
    assert intervals_in(text) == [(3.5, 8.0)]


@pytest.mark.parametrize("text", NO_INTERVAL)
def test_texts_that_hold_no_interval(text: str) -> None:
    assert intervals_in(text) == []


@pytest.mark.parametrize(
    ("text", "interval", "spaces", "score"),
    [
        ("[2, 3]", [0.5, 1], ("seconds", "normalized"), 1),
        ("[1, 3]", "[0.5, 1]", ("seconds", "normalized"), 0.5),
        ("0.5 - 1", [1, 3.0], ("normalized", "seconds"), 0.5),
        ("[1.5, 2]", [[1.5, 2]], ("seconds", "seconds"), 1),
    ],
)
def test_spaces_are_converted_by_video_times(text: str, interval: Any, spaces: Any, score: float) -> None:
    space, gold_space = spaces
    assert temporal_iou(text, interval, ROW, space=space, gold_space=gold_space) == score


def test_a_last_frame_that_fills_a_pair_takes_no_time() -> None:
    (video,) = ROW.videos
    longer = replace(video, frames=(*video.frames, video.frames[-1]), times=(*video.times, video.times[-1]))
    sample = replace(ROW, videos=(longer,))
    assert temporal_iou("[2, 3]", [0.5, 1], sample, gold_space="normalized") == 1


@pytest.mark.parametrize(
    ("interval", "gold_space"),
    [([10, 40], "seconds"), ([0, 2], "seconds"), ([2, 3], "normalized")],
)
def test_a_gold_outside_its_video_is_refused(interval: Any, gold_space: Any) -> None:
    with pytest.raises(ValueError, match="gold_space"):
        temporal_iou("[1, 2]", interval, ROW, space=gold_space, gold_space=gold_space)


@pytest.mark.parametrize("sample", [None, tiny.sample("row:0"), replace(ROW, videos=ROW.videos * 2)])
def test_another_space_takes_one_video(sample: Sample | None) -> None:
    with pytest.raises(ValueError, match="one video"):
        temporal_iou("[1, 2]", [0.5, 1], sample, gold_space="normalized")
    assert temporal_iou("[0, 1]", [0.5, 1], sample, space="normalized", gold_space="normalized") == 0.5
