"""The clips of the recipe video_qa: what one frame, and the set of frames, gives away."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from helpers.clips import write_clip

from mm_grpo import GRPOConfig
from mm_grpo.data import load
from mm_grpo.errors import DataError
from mm_grpo.import_path import load_named

EXAMPLES = Path(__file__).parents[2] / "examples"


def clips(name: str) -> Any:
    return load_named(f"{EXAMPLES}/video_qa/clips.py:{name}", "clips", DataError)


def pixels(scene: Any) -> list[bytes]:
    return [clips("render")(scene, frame).tobytes() for frame in range(clips("FRAMES"))]


@pytest.mark.parametrize("task", ["move", "order", "count", "when"])
def test_answers_are_even_and_the_first_frame_is_dark(task: str) -> None:
    scenes = [clips("scene")(split="train", index=index, task=task) for index in range(120)]
    if task in ("move", "count"):
        counts = Counter(scene.answer for scene in scenes)
        assert {*counts.values()} == {120 // len(counts)}
    if task == "order":  # the right answer is named first in every other question
        assert sum(scene.options.index(scene.answer) for scene in scenes) == 60
    assert all(scene.lights[0] is None for scene in scenes)
    colours = {colour for scene in scenes[:20] for colour in np.unique(np.frombuffer(pixels(scene)[0], "u1"))}
    assert colours == {clips("OFF")[0], clips("BACKGROUND")[0]}


def test_both_directions_show_the_same_frames() -> None:
    scenes = [clips("scene")(split="train", index=index, task="move") for index in range(200)]
    lit = {answer: [s for s in scenes if s.answer == answer] for answer in ("left", "right")}
    frames = {a: {frame for s in group for frame in s.lights} for a, group in lit.items()}
    assert frames["left"] == frames["right"] and len(frames["left"]) == 3 * 5 + 1
    for scene in scenes[:40]:
        lamps = [light[0] for light in scene.lights if light]
        assert lamps == sorted(lamps, reverse=scene.answer == "left") and {*lamps} == {0, 1, 2}


def test_rows_are_read_as_videos_and_splits_share_no_scene() -> None:
    config = GRPOConfig.from_yaml(EXAMPLES / "video_qa" / "config.yaml")
    rows = load(config.data.train, config.data)
    sample = rows.sample(3)
    (video,) = sample.videos
    assert (len(video.frames), video.times, video.fps) == (8, tuple(n / 2 for n in range(8)), 2.0)
    start, end = sample.columns["interval"]
    scene = clips("scene")(split="train", index=0, task="when", seed=1)
    on = [n / 2 for n, light in enumerate(scene.lights) if light]
    assert (start, end) == (on[0], on[-1] + 0.5) and sample.columns["answer"] == f"{start:.1f} to {end:.1f}"
    assert [frame.tobytes() for frame in video.frames] == pixels(scene)
    places = [(index, task) for index in range(60) for task in get_args(clips("Task"))]
    train, heldout = (
        {repr(clips("scene")(split=split, index=index, task=task)) for index, task in places}
        for split in ("train", "heldout")
    )
    assert not train & heldout


def test_captions_but_those_of_order_and_guesses_do_not_tell_the_answer() -> None:
    rng = random.Random(0)
    for task in get_args(clips("Task")):
        scenes = [clips("scene")(split="train", index=index, task=task) for index in range(60)]
        assert all(scene.answer not in clips("caption")(scene).split() for scene in scenes if task != "order")
        share = sum(clips("guess")(scene, rng) == scene.answer for scene in scenes) / 60
        assert share < 0.7


@pytest.mark.parametrize("options", [{"split": "test"}, {"tasks": []}, {"tasks": ["fly"]}, {"size": 0}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=next(iter(options))):
        clips("clips_rows")(**{"split": "train", "size": 4, **options})


def test_the_config_of_a_public_set_reads_its_rows(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write_clip(tmp_path / "a" / "b.mp4", [n / 30 for n in range(60)])
    row = {
        "problem_id": 2, "problem": "How many balls enter the scene?", "data_type": "video", "options": [],
        "problem_type": "numerical", "process": "<think>one, two</think>", "solution": "<answer>2</answer>",
        "path": "./a/b.mp4", "data_source": "CLEVRER",
    }  # fmt: skip
    (tmp_path / "video.jsonl").write_text(json.dumps(row) + "\n")
    config = GRPOConfig.from_yaml(
        EXAMPLES / "video_qa" / "public.yaml", [f"data.train={tmp_path}/video.jsonl"]
    )
    sample = load(config.data.train, config.data).sample(0)
    (video,) = sample.videos
    assert (len(video.frames), video.times[0], sample.columns["answer"]) == (4, 0.0, "2")
    content = [{"type": "video"}, {"type": "text", "text": row["problem"]}]
    assert sample.messages == ({"role": "user", "content": content},)
