"""Prompts that are made again of a rollout log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.configs import small_config

from mm_grpo.processors.base import load_processor
from mm_grpo.run.paths import RunPaths
from mm_grpo.run.rollout_log import read_rollouts, write_rollouts
from mm_grpo.trained.proof import prompts_of_run
from mm_grpo.types import Completion, Group, Sample


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_logged_media_make_the_same_prompt(family: str, models: dict[str, Any], tmp_path: Path) -> None:
    """A video of five frames at an odd rate before an image; a row whose frame is gone is left out. Pixels of frames
    are those of a JPEG."""
    processor, paths = load_processor(str(models[family])), RunPaths(tmp_path)
    order = [{"type": "video"}, {"type": "image"}, {"type": "text", "text": "and now?"}]
    messages = [{"role": "user", "content": order}]
    image, video = tiny.picture(1, 90, 70), tiny.video(2, 5, 130, 75, fps=1 / 3)
    prompts = [
        processor.prompt(Sample("a", messages, (image,), (video,))),
        processor.prompt(Sample("b", messages, (image,), (tiny.video(3, 2, 60, 60),))),
    ]
    answer = Completion((1,), (-1.0,), "yes", "stop", 0)
    write_rollouts(paths, 1, [Group(i, p, (answer,), (1.0,), (0.0,)) for i, p in enumerate(prompts)])
    (again, ids), _ = prompts_of_run(paths, processor, small_config(models[family]))
    assert (again.uid, again.token_ids) == ("a", prompts[0].token_ids) and len(ids) == 4
    assert again.engine_prompt.token_ids == prompts[0].engine_prompt.token_ids
    assert torch.equal(again.position_ids, prompts[0].position_ids)
    vision, true_vision = again.vision, prompts[0].vision
    assert torch.equal(vision["image_grid_thw"], true_vision["image_grid_thw"])
    pixels, rows = true_vision["pixel_values"], int(true_vision["image_grid_thw"][0].prod())
    assert torch.equal(vision["pixel_values"][rows:], pixels[rows:])
    assert float((vision["pixel_values"] - pixels).abs().mean()) < 0.05 * float(pixels.std())
    (shown,), (expected,) = again.engine_prompt.videos, prompts[0].engine_prompt.videos
    assert (shown.times, shown.fps) == (expected.times, expected.fps)
    (paths.images / read_rollouts(paths, 1)[1]["videos"][0]["frames"][0]).unlink()
    left = prompts_of_run(paths, processor, small_config(models[family]))
    assert [prompt.uid for prompt, _ in left] == ["a"]
