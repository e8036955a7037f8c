"""Positions of small videos, worked out by hand; and that a learner with transformers' positions would be noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.families import answers_of, plain_inputs, plain_logprobs, prompts_of
from helpers.steps import config_for, load

from mm_grpo.learner.learner import Learner
from mm_grpo.processors.base import load_processor
from mm_grpo.processors.qwen_vl import QwenVLProcessor
from mm_grpo.types import Video

pytestmark = pytest.mark.lowest

TEXT, VIDEO, IMAGE, START, END = 1, 2, 3, 4, 5


def positions(processor: Any, ids: list[int], *media: Any) -> list[tuple[int, ...]]:
    """Positions (t, y, x) of ids in the numbers above, with media that have their final sizes."""
    tokens = {TEXT: 100, VIDEO: processor.video_token_id, IMAGE: processor.image_token_id}
    tokens |= {START: 101, END: 102}
    side, patch = processor.factor, processor.hf.image_processor.patch_size
    grids = [
        (len(m.frames) // 2 if isinstance(m, Video) else 1, m.size[1] // patch, m.size[0] // patch)
        for m in media
    ]
    assert all(m.size[0] % side == 0 == m.size[1] % side for m in media)
    vision = {"image_grid_thw": torch.tensor(grids)}
    found = processor.positions([tokens[t] for t in ids], vision, media)
    return [tuple(column) for column in found.T.tolist()]


@pytest.mark.parametrize(
    ("family", "fps", "times"),
    [
        ("qwen2_vl", 2.0, [2, 3, 4, 5]),
        ("qwen2_vl", 0.5, [2, 3, 4, 5]),
        # 4 positions a second, and 2 frames at once
        ("qwen2_5_vl", 2.0, [2, 6, 10, 14]),
        ("qwen2_5_vl", 3.0, [2, 4, 7, 10]),  # 2 + 0, 2.67, 5.33, 8
        ("qwen2_5_vl", 2.4, [2, 5, 8, 12]),  # 2 + 0, 3.33, 6.67, 10
        ("qwen2_5_vl", 16.0, [2, 2, 3, 3]),
    ],
)
def test_time_is_in_the_positions_of_a_video(
    family: str, fps: float, times: list[int], models: dict[str, Path]
) -> None:
    """Eight frames of one row of two tokens; a text goes on behind the largest position, an image at the next one."""
    processor = load_processor(str(models[family]))
    video, image = tiny.video(1, 8, 56, 28, fps), tiny.picture(1, 28, 28)
    ids = [TEXT, TEXT, *[VIDEO] * 8, TEXT, IMAGE, TEXT]
    end = max(times[-1], 3) + 1
    assert positions(processor, ids, video, image) == [
        (0, 0, 0),
        (1, 1, 1),
        *((t, 2, x) for t in times for x in (2, 3)),
        (end, end, end),
        (end + 1, end + 1, end + 1),
        (end + 2, end + 2, end + 2),
    ]


def test_time_is_text_between_the_pairs_of_frames(models: dict[str, Path]) -> None:
    processor = load_processor(str(models["qwen3_vl"]))
    pair = [TEXT, START, VIDEO, VIDEO, END]
    assert positions(
        processor, [TEXT, *pair, *pair, IMAGE], tiny.video(1, 4, 64, 32), tiny.picture(1, 32, 32)
    ) == [
        (0, 0, 0),
        *((1, 1, 1), (2, 2, 2), (3, 3, 3), (3, 3, 4), (5, 5, 5)),
        *((6, 6, 6), (7, 7, 7), (8, 8, 8), (8, 8, 9), (10, 10, 10)),
        (11, 11, 11),
    ]


@pytest.mark.parametrize("family", ["qwen3_vl", tiny.HYBRID])
def test_the_time_of_a_pair_is_between_its_frames(family: str, models: dict[str, Path]) -> None:
    """Frames at 1, 1.4, 1.8, 2.2 and 2.6 seconds; the last one stands for two."""
    processor: Any = load_processor(str(models[family]))
    prompt = processor.prompt(tiny.sample("r", "", videos=(tiny.video(1, 5, 64, 32, fps=2.5),)))
    text = processor.tokenizer.decode(list(prompt.token_ids)).replace("<|video_pad|>" * 2, "**")
    middle = "".join(f"<{time} seconds><|vision_start|>**<|vision_end|>" for time in ("1.2", "2.0", "2.6"))
    assert f"<|vision_start|>{middle}<|vision_end|>" in text


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.field_bug("video-times")
def test_other_positions_than_the_definitions_would_be_seen(
    family: str, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers' own, which up to 5.19 are others after a long video, but not in Qwen3-VL."""
    processor, model = load_processor(str(models[family])), load(models[family])
    (prompt,) = prompts_of("two videos and an image", processor)
    inputs = plain_inputs(processor, prompt)
    seconds = torch.tensor([2 / video.fps for video in prompt.engine_prompt.videos])
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw")
    grids = {name: inputs[name] for name in names}
    theirs = model.model.get_rope_index(**grids, second_per_grid_ts=seconds)[0][:, 0]
    answer, config = answers_of(processor, 3)[3], config_for(models[family])
    plain = plain_logprobs(model, processor, prompt, answer, config.rollout.temperature)[0].detach()

    def gap() -> float:
        learner = Learner(model, processor, config, 10)
        (again,) = prompts_of("two videos and an image", processor)
        ours = learner.score(again, [answer], as_sampled=True)[0]
        return float((torch.tensor(ours) - plain).abs().max())

    assert gap() <= 1e-5
    monkeypatch.setattr(QwenVLProcessor, "positions", lambda *_: theirs)
    assert (gap() > 1e-3) == (not torch.equal(theirs, prompt.position_ids))
