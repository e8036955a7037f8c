"""Videos in the table of families: what test_families.py does not ask, and the families without videos."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.families import TABLE, answers_of
from helpers.steps import load
from torch import Tensor

from mm_grpo.errors import BadMedia, DataError
from mm_grpo.processors.base import load_processor
from mm_grpo.rollout.transformers_engine import TransformersEngine

pytestmark = pytest.mark.lowest

VIDEOS = [family for family, row in TABLE.items() if row.videos]
ONE_SIZE = ("internvl", "llava_onevision")
"""Families whose models see every frame at one size."""


@pytest.mark.parametrize("family", VIDEOS)
@pytest.mark.field_bug("dropped-video")
def test_log_probs_depend_on_every_frame(family: str, models: dict[str, Path]) -> None:
    """The last frame too, which has no partner in families that join two."""
    processor: Any = load_processor(str(models[family]))
    engine, answer = TransformersEngine(load(models[family]), processor), answers_of(processor, 5)[3]
    video, image = tiny.video(1, 3), (tiny.picture(9),)

    def scored(*pictures: Any) -> Tensor:
        sample = tiny.sample("r", "what", image, (replace(video, frames=pictures),))
        return torch.tensor(engine.score(processor.prompt(sample), answer))

    first, other = scored(*video.frames), tiny.picture(77)
    for place in range(3):
        changed = scored(*video.frames[:place], other, *video.frames[place + 1 :])
        assert float((changed - first).abs().max()) > 1e-3


@pytest.mark.parametrize("family", VIDEOS)
def test_features_of_a_video_are_its_own(family: str, models: dict[str, Path]) -> None:
    """Among others of other lengths, in any order: those it has alone, one for each of its tokens."""
    processor, model = load_processor(str(models[family])), load(models[family])
    media = [tiny.video(1, 3), tiny.picture(2, 112, 60), tiny.video(3, 6), tiny.picture(4), tiny.video(5, 1)]
    pictures = [processor.picture(medium, row="r") for medium in media]  # type: ignore[attr-defined]
    tokens = (processor.image_token_id, processor.video_token_id)  # type: ignore[attr-defined]
    with torch.no_grad():
        joined = processor.family.features(model, processor.family.vision(pictures)).images
        for picture, ours in zip(pictures, joined, strict=True):
            (alone,) = processor.family.features(model, picture.vision).images
            torch.testing.assert_close(ours, alone, atol=1e-5, rtol=0)
            assert ours.flatten(0, -2).shape[0] == sum(token in tokens for token in picture.token_ids)


@pytest.mark.parametrize("family", [family for family, row in TABLE.items() if not row.videos])
def test_families_without_videos_refuse_the_row(family: str, models: dict[str, Path]) -> None:
    processor = load_processor(str(models[family]))
    with pytest.raises(DataError, match=rf"^train:5: .*'{family}' get images alone"):
        processor.prompt(tiny.sample("train:5", videos=(tiny.video(1),)))


@pytest.mark.parametrize("family", ONE_SIZE)
@pytest.mark.parametrize("limit", ["max_pixels", "min_pixels", "resized_height"])
def test_limits_that_no_frame_keeps_are_refused(family: str, limit: str, models: dict[str, Path]) -> None:
    path = str(models[family])
    processor, sample = load_processor(path), tiny.sample("train:5", videos=(tiny.video(1, 2, 90, 50),))
    values = {"max_pixels": 56 * 56, "min_pixels": 56 * 56, "resized_height": 56, "resized_width": 56}
    sample.messages[0]["content"][0].update(values)
    prompt = processor.prompt(sample)
    assert prompt.engine_prompt.videos[0].size == (56, 56)
    assert processor.prompt(prompt.sample).token_ids == prompt.token_ids
    sample.messages[0]["content"][0][limit] += 1 if limit == "min_pixels" else -1
    with pytest.raises(BadMedia, match=r"train:5: video 0: .* every frame at 56x56 = 3136 pixels"):
        processor.prompt(sample)
    with pytest.raises(BadMedia, match=r"data\.video_max_pixels = 3135"):
        load_processor(path, video_max_pixels=3135).prompt(tiny.sample("r", videos=(tiny.video(1),)))
