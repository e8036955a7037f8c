"""Videos in the families with tiles: sizes, and what is refused. Against transformers' own: test_families.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.families import answers_of
from helpers.steps import load
from torch import Tensor

from mm_grpo.errors import BadMedia, DataError
from mm_grpo.processors.base import load_processor
from mm_grpo.rollout.transformers_engine import TransformersEngine
from mm_grpo.types import Sample, Video

FAMILIES = ("internvl", "llava_onevision")


def row(uid: str, *media: Any, text: str = "what is it") -> Sample:
    """A row whose media stand before its text, in this order."""
    kinds = ["video" if isinstance(medium, Video) else "image" for medium in media]
    content = [*({"type": kind} for kind in kinds), {"type": "text", "text": text}]
    images = tuple(medium for medium in media if not isinstance(medium, Video))
    videos = tuple(medium for medium in media if isinstance(medium, Video))
    return Sample(uid, [{"role": "user", "content": content}], images, videos)


@pytest.mark.parametrize("family", FAMILIES)
def test_frames_are_resized_once_to_a_tile(family: str, models: dict[str, Path]) -> None:
    processor: Any = load_processor(str(models[family]))
    prompt = processor.prompt(row("r", tiny.video(1, 3, 90, 50), tiny.video(2, 2, 200, 100)))
    assert [video.size for video in prompt.engine_prompt.videos] == [(56, 56)] * 2
    assert processor.prompt(prompt.sample).token_ids == prompt.token_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_depend_on_every_frame(family: str, models: dict[str, Path]) -> None:
    processor, model = load_processor(str(models[family])), load(models[family])
    engine, answer = TransformersEngine(model, processor), answers_of(processor, 5)[3]
    video, image = tiny.video(1, 3), tiny.picture(9)

    def scored(*media: Any) -> Tensor:
        return torch.tensor(engine.score(processor.prompt(row("r", *media)), answer))

    first = scored(video, image)
    for number in range(3):
        frames = list(video.frames)
        frames[number] = tiny.picture(77 + number)
        changed = scored(replace(video, frames=tuple(frames)), image)
        assert float((changed - first).abs().max()) > 1e-3
    assert float((scored(image, video) - first).abs().max()) > 1e-3


def test_a_picture_of_an_observation_may_be_a_video(models: dict[str, Path]) -> None:
    for family in FAMILIES:
        processor: Any = load_processor(str(models[family]))
        image, video = tiny.picture(1), tiny.video(2, 3)
        start, both = processor.prompt(row("r", image)), processor.prompt(row("r", image, video))
        picture = processor.picture(video, row="r")
        longer = processor.extended(start, [processor.video_token_id], [picture])
        assert longer.token_ids == (*start.token_ids, *picture.token_ids)
        for key, tensor in both.vision.items():
            assert torch.equal(longer.vision[key], tensor)


@pytest.mark.parametrize("family", ["idefics3", "gemma3"])
def test_families_without_videos_refuse_the_row(family: str, models: dict[str, Path]) -> None:
    processor = load_processor(str(models[family]))
    with pytest.raises(DataError, match=rf"^train:5: .*'{family}' get images alone"):
        processor.prompt(row("train:5", tiny.video(1)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("limit", ["max_pixels", "min_pixels", "resized_height"])
def test_limits_that_no_frame_keeps_are_refused(family: str, limit: str, models: dict[str, Path]) -> None:
    processor = load_processor(str(models[family]))
    sample = row("train:5", tiny.video(1))
    values = {"max_pixels": 56 * 56, "min_pixels": 56 * 56, "resized_height": 56, "resized_width": 56}
    sample.messages[0]["content"][0].update(values)
    assert processor.prompt(sample).engine_prompt.videos[0].size == (56, 56)
    sample.messages[0]["content"][0][limit] += 1 if limit == "min_pixels" else -1
    with pytest.raises(BadMedia, match=r"train:5: video 0: .* every frame at 56x56 = 3136 pixels"):
        processor.prompt(sample)
    small = load_processor(str(models[family]), video_max_pixels=3000)
    with pytest.raises(BadMedia, match=r"data\.video_max_pixels = 3000"):
        small.prompt(row("train:5", tiny.video(1)))
