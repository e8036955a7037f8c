"""The rollout log: one object per completion, each image once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mm_grpo.run.paths import RunPaths
from mm_grpo.run.rollout_log import logged_steps, read_rollouts, write_rollouts
from mm_grpo.types import Completion, EnginePrompt, Group, Prompt, Sample, Turn, Video

RED, BLUE = Image.new("RGB", (4, 4), "red"), Image.new("RGB", (4, 4), "blue")
QUESTION = [{"type": "image"}, {"type": "text", "text": "What colour?"}]


def group(
    slot: int,
    image: Image.Image | None = RED,
    columns: dict[str, Any] | None = None,
    content: list[dict[str, Any]] = QUESTION,
    parts: dict[str, list[float | None]] | None = None,
    extra: dict[str, list[Any]] | None = None,
) -> Group:
    """A group of two: the first right, the second cut off."""
    images = () if image is None else (image,)
    # the messages are logged instead
    columns, hidden = {"problem": "?", **(columns or {})}, frozenset({"problem"})
    messages = [{"role": "user", "content": content}]
    sample = Sample(f"rows:{slot}", messages, images, (), columns, prompt_columns=hidden)
    prompt = Prompt(sample, (1, 2, 3), EnginePrompt((1, 3), images), None, {})  # type: ignore[arg-type]
    completions = (
        Completion((7, 8), (-0.5, -0.25), "red", "stop", 41, ((0, 3),)),
        Completion((7, 9, 9), (-0.5, -1.0, -1.0), "blue 🙂", "length", 42, ((0, 3), (2, 4))),
    )
    return Group(slot, prompt, completions, (1.0, None), (0.75, 0.0), parts=parts or {}, extra=extra or {})


def test_a_row_holds_everything_about_a_completion(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    parts: Any = {"exact": [1.0, 0.0], "iou": [None, None]}
    scored = group(5, columns={"answer": "red"}, parts=parts, extra={"parsed": ["red", None]})
    file = write_rollouts(paths, 12, [scored])
    assert file == tmp_path / "rollouts" / "step-000012.jsonl"
    first, second = read_rollouts(paths, 12)
    (name,) = first.pop("images")
    assert first == {
        "videos": [],
        "step": 12,
        "slot": 5,
        "attempt": 0,
        "prompt_digest": "7c68b4906e7ea780",
        "uid": "rows:5",
        "messages": [{"role": "user", "content": QUESTION}],
        "generation": 0,
        "completion": "red",
        "token_digest": "df36c43410b9baa0",
        "tokens": 2,
        "finish_reason": "stop",
        "seed": 41,
        "weight_versions": [[0, 3]],
        "reward": 1.0,
        "parts": {"exact": 1.0, "iou": None},
        "advantage": 0.75,
        "columns": {"answer": "red"},
        "extra": {"parsed": "red"},
    }
    with Image.open(tmp_path / "rollouts" / "images" / name) as saved:
        assert saved.convert("RGB").getpixel((0, 0)) == (255, 0, 0)
    assert (second["generation"], second["seed"], second["reward"]) == (1, 42, None)
    assert (second["completion"], second["weight_versions"]) == ("blue 🙂", [[0, 3], [2, 4]])
    assert second["parts"] == {"exact": 0.0, "iou": None}


def test_an_image_is_saved_once_and_told_apart_by_content(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    write_rollouts(paths, 1, [group(0), group(1), group(2, BLUE), group(3, None)])
    write_rollouts(paths, 2, [group(0, RED.copy())])
    images = [row["images"] for row in read_rollouts(paths, 1)]
    assert images[0] == images[2] != images[4]
    assert images[6] == []
    assert read_rollouts(paths, 2)[0]["images"] == images[0]
    assert len(list(paths.images.iterdir())) == 2
    assert logged_steps(paths) == [1, 2]
    wide, tall = Image.new("RGB", (8, 2)), Image.new("RGB", (2, 8))  # of equal bytes
    write_rollouts(paths, 3, [group(0, wide), group(1, tall)])
    assert len(list(paths.images.iterdir())) == 4


def test_a_video_is_its_frames_and_equal_ones_are_one_file(tmp_path: Path) -> None:
    """Frames of a prompt and of a tool's answer, as JPEG; an image with the pixels of one is a PNG."""
    paths, green = RunPaths(tmp_path), Image.new("RGB", (4, 4), "green")
    one, video = group(0), Video((RED, BLUE, BLUE), (1.0, 1 / 3, 1 / 3), 0.7)
    prompt = replace(one.prompt, engine_prompt=EnginePrompt((1, 2), (video, RED)))
    turn = Turn("tool", "seen", 2, name="clip", videos=(Video((green, RED), (0.0, 2.5), 2.0),))
    talk = replace(one.completions[0], turns=(turn,))
    write_rollouts(paths, 1, [replace(one, prompt=prompt, completions=(talk, one.completions[1]))])
    row = read_rollouts(paths, 1)[0]
    (red,), ((first, second, third),) = row["images"], [video["frames"] for video in row["videos"]]
    assert red.removesuffix(".png") == first.removesuffix(".jpeg") and second == third != first
    assert row["videos"] == [{"frames": [first, second, second], "times": [1.0, 1 / 3, 1 / 3], "fps": 0.7}]
    (shown,) = row["turns"][0]["videos"]
    assert (shown["times"], shown["fps"], shown["frames"][1]) == ([0.0, 2.5], 2.0, first)
    assert len(list(paths.images.iterdir())) == 4
    pixel = Image.open(paths.images / second).getpixel((0, 0))
    assert pixel == pytest.approx((0, 0, 255), abs=2)


def test_a_row_keeps_what_can_be_read(tmp_path: Path) -> None:
    columns = {
        "answer": "x" * 2001, "box": (0, 0, 10, 20), "nested": [[1]], "picture": RED, "long": list(range(65)),
        "ratio": float("inf"), "nothing": None, "right": True, "lines": "one\u2028two\n\x85three",
    }  # fmt: skip
    content = [{"type": "image", "image": RED}, {"type": "text", "text": "?", "cache": {}}]
    write_rollouts(RunPaths(tmp_path), 1, [group(0, columns=columns, content=content)])
    first, second = read_rollouts(RunPaths(tmp_path), 1)
    assert first["columns"] == second["columns"] == {
        "answer": "x" * 2000 + "…", "box": [0, 0, 10, 20], "ratio": "inf", "right": True,
        "lines": "one\u2028two\n\x85three",
    }  # fmt: skip
    assert first["messages"][0]["content"] == [{"type": "image"}, {"type": "text", "text": "?"}]
    raw = (tmp_path / "rollouts" / "step-000001.jsonl").read_bytes()
    assert [json.loads(line)["generation"] for line in raw.strip().split(b"\n")] == [0, 1]
