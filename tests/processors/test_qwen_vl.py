"""Qwen-VL's prompts, and what is refused of a row or a model's folder."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
from helpers import tiny

from mm_grpo.errors import ConfigError, DataError
from mm_grpo.processors.base import load_processor

pytestmark = pytest.mark.lowest


def test_a_text_only_prompt_counts_upwards(models: dict[str, Any]) -> None:
    prompt = load_processor(str(models["qwen3_vl"])).prompt(tiny.sample("r", "hello"))
    n = len(prompt.token_ids)
    assert prompt.position_ids.tolist() == [list(range(n))] * 3
    assert dict(prompt.vision) == {} and prompt.engine_prompt.images == ()


def test_pixel_limits_are_ours_when_given_and_the_models_otherwise(models: dict[str, Any]) -> None:
    path = str(models["qwen2_vl"])
    big = tiny.sample("r", images=(tiny.picture(1, 230, 230),))
    assert load_processor(path).prompt(big).engine_prompt.images[0].size == (224, 224)  # 64 patches of 28
    small = load_processor(path, max_pixels=28 * 28 * 9).prompt(big)
    assert small.engine_prompt.images[0].size == (84, 84)
    assert load_processor(path, max_pixels=50176, video_max_pixels=50176).video_max_pixels == 50176  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"data.video_max_pixels = 50177 is above data.max_pixels = 50176"):
        load_processor(path, max_pixels=50176, video_max_pixels=50177)
    with pytest.raises(ConfigError, match=r"data.min_pixels = 100000 is above data.max_pixels = 50176"):
        load_processor(path, min_pixels=100_000)


def test_videos_that_vllm_would_normalise_as_images_fail(models: dict[str, Any], tmp_path: Path) -> None:
    """It uses the mean and deviation of images for both; JSON's lists equal the classes' tuples."""
    shutil.copytree(models["qwen3_vl"], tmp_path / "model")
    file = tmp_path / "model" / "processor_config.json"
    sample = tiny.sample("train:4", videos=(tiny.video(1),))
    for mean, taken in (([0.5, 0.5, 0.5], True), ([0.4, 0.5, 0.5], False)):
        config = json.loads(file.read_text())
        config["video_processor"]["image_mean"] = mean
        file.write_text(json.dumps(config))
        processor = load_processor(str(tmp_path / "model"))
        assert processor.prompt(tiny.sample("r", images=(tiny.picture(1),))).vision
        if taken:
            assert processor.prompt(sample).vision
            continue
        with pytest.raises(DataError, match=r"train:4: .*image_mean"):
            processor.prompt(sample)


def test_media_and_stop_tokens(models: dict[str, Any]) -> None:
    processor = load_processor(str(models["qwen2_5_vl"]))
    vocabulary = processor.tokenizer.get_vocab()  # type: ignore[attr-defined]
    names = {"<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"}
    assert processor.media_token_ids == {vocabulary[n] for n in names}
    assert processor.stop_token_ids == {vocabulary["<|im_end|>"]}
    assert processor.decode([vocabulary["w"], vocabulary["h"], vocabulary["<|im_end|>"]]) == "wh"


def test_the_tokenizers_and_the_configs_end_tokens_stop(models: dict[str, Any], tmp_path: Path) -> None:
    for file in models["qwen2_5_vl"].glob("*.j*"):
        copy(file, tmp_path)
    vocabulary = load_processor(str(tmp_path)).tokenizer.get_vocab()  # type: ignore[attr-defined]
    ends = {"eos_token_id": [vocabulary["<|endoftext|>"]]}
    (tmp_path / "generation_config.json").write_text(json.dumps(ends))
    stops = load_processor(str(tmp_path)).stop_token_ids
    assert stops == {vocabulary["<|endoftext|>"], vocabulary["<|im_end|>"]}


@pytest.mark.parametrize(("max_pixels", "saved"), [(None, 10**9), (28 * 28 * 9, 28 * 28 * 9)])
def test_a_saved_processor_has_the_models_limit_or_the_configs(
    max_pixels: int | None, saved: int, models: dict[str, Any], tmp_path: Path
) -> None:
    for file in models["qwen2_5_vl"].glob("*.j*"):
        copy(file, tmp_path)
    processor: Any = load_processor(str(tmp_path), max_pixels=max_pixels)
    processor.hf.image_processor.size = {"shortest_edge": 28 * 28, "longest_edge": 10**9}
    processor.limits(None, max_pixels)  # far more than one image may have of a pack
    processor.save(tmp_path / "saved")
    again: Any = load_processor(str(tmp_path)).hf.image_processor.from_pretrained(tmp_path / "saved")
    assert again.size["longest_edge"] == saved


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<|image_pad|>", "2 placeholder(s), 2 image, for 1 media"),
        ("<|vision_start|>", "2 '<|vision_start|>' for 1 image(s)"),
        ("<|video_pad|>", "1 image, 1 video, for 1 media"),
    ],
)
def test_media_tokens_beyond_the_images_are_refused(text: str, words: str, models: dict[str, Any]) -> None:
    processor: Any = load_processor(str(models["qwen2_vl"]))
    with pytest.raises(DataError, match=f"train:5: .* holds {re.escape(repr(text))} in its text"):
        processor.prompt(tiny.sample("train:5", f"look: {text}", (tiny.picture(1),)))
    processor.template += text  # what no row writes, but a template may
    with pytest.raises(DataError) as caught:
        processor.prompt(tiny.sample("train:5", "look", (tiny.picture(1),)))
    assert "train:5" in str(caught.value) and words in str(caught.value)


@pytest.mark.parametrize(("family", "bound", "actual"), [("qwen2_5_vl", 15, 12), ("qwen3_vl", 69, 57)])
def test_the_tokens_of_a_video_are_bounded_by_its_frames(
    models: dict[str, Any], family: str, bound: int, actual: int
) -> None:
    """Three pairs of frames; in Qwen3-VL each with 2 boundaries and a time, one token a character."""
    processor: Any = load_processor(str(models[family]), video_max_pixels=4 * 32**2)
    prompt = processor.prompt(tiny.sample("row", videos=(tiny.video(1, frames=5, width=300, height=300),)))
    ids = processor.encode(prompt.engine_prompt.media)[0][0]
    assert (processor.max_video_tokens(5), len(ids)) == (bound, actual)
