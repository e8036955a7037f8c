"""What vLLM is started for where the config leaves it to the rows."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import tiny
from helpers.configs import small_config

from mm_grpo.data.sources import load_train
from mm_grpo.environments.builtins import Zoom
from mm_grpo.environments.toolbox import Toolbox
from mm_grpo.errors import ConfigError
from mm_grpo.processors.base import load_processor, processor_of
from mm_grpo.rollout.engine_limits import EngineLimits, engine_limits
from mm_grpo.rollout.prompts import PromptBuilder, TooLong

CONTEXT = 2048


def rows(*texts: str, images: int = 1) -> list[dict[str, Any]]:
    parts = [{"type": "image"}] * images
    shown = [tiny.picture(1, 20, 20)] * images
    contents = [[*parts, {"type": "text", "text": text}] for text in texts]
    return [{"prompt": [{"role": "user", "content": content}], "images": shown} for content in contents]


def limits(models: Any, given: Any, **changes: Any) -> Any:
    rollout = {"engine": "vllm", "max_completion_length": 100}
    config = small_config(models["qwen2_5_vl"], rollout=rollout, **changes)
    processor = processor_of(config)
    return engine_limits(config, processor, [load_train(config, given)], CONTEXT), processor


def test_the_longest_row_with_images_at_their_largest_decides(models: dict[str, Any]) -> None:
    found, processor = limits(models, rows("short", "x" * 400, images=2))
    # one token a character in the tiny vocabulary; two images of 64 tokens (the model's limit of 224 x 224 pixels)
    pictures = (tiny.picture(1, 224, 224), tiny.picture(2, 224, 224))
    longest = processor.prompt(tiny.sample("r", "x" * 400, pictures))
    assert 2 * 64 + 400 < len(longest.token_ids) < 2 * 64 + 400 + 60
    assert found.max_model_len == 768  # that, 100 of the completion, 1 for scoring, in steps of 256
    assert found.max_images == 2
    assert all(words in found.sentence for words in ("up to 768 tokens", "2 image(s)", "2 of 2 rows"))


class Begins:
    def reset(self, images: Any) -> Any:
        return [*images, tiny.picture(2), tiny.video(1)]

    def look(self) -> None:
        """Look."""


def test_media_of_environments_have_room(models: dict[str, Any]) -> None:
    rollout = {"engine": "vllm", "max_images_per_episode": 3, "environment_workers": 0}
    config = small_config(models["qwen2_5_vl"], rollout=rollout)
    processor, data = load_processor(str(models["qwen2_5_vl"])), [load_train(config, rows("x"))]
    for factory, images, videos in ((Begins, 1 + 2 + 3, 0 + 1 + 3), (Zoom, 1 + 3, 0)):
        box = Toolbox(config, (), factory)
        found = engine_limits(config, processor, data, CONTEXT, box)
        box.close()
        assert (found.max_images, found.max_videos) == (images, videos)


def test_videos_count_as_long_and_as_large_as_they_may_be(models: dict[str, Any]) -> None:
    """Two videos of nine frames are five pairs each, of 64 tokens (224 x 224 pixels), beside an image of 64."""
    (image,), pair = rows("x" * 40), [{"type": "video"}] * 2
    content = [*pair, {"type": "text", "text": "x" * 40}]
    two = {"prompt": [{"role": "user", "content": content}], "videos": ["none.mp4", "none.webm"]}
    found, _ = limits(models, [image, two], data={"video_max_frames": 9})
    # 640, 100 of the completion, 1 for scoring, 40 of text and at most 60 of the template, in steps of 256
    assert (found.max_model_len, found.max_images, found.max_videos) == (1024, 1, 2)
    assert "1 image(s) (max_images) and 2 video(s) (max_videos) in a prompt" in found.sentence
    found, _ = limits(models, [image, two], data={"video_max_frames": 8, "video_max_pixels": 32 * 784})
    assert found.max_model_len == 512  # 2 x 4 x 32 + 141 to 201
    set_by_hand = {"engine": "vllm", "max_completion_length": 100, "vllm": {"max_videos": 0, "max_images": 3}}
    config = small_config(models["qwen2_5_vl"], rollout=set_by_hand)
    processor = load_processor(str(models["qwen2_5_vl"]))
    found = engine_limits(config, processor, [load_train(config, [image])], CONTEXT)
    assert (found.max_images, found.max_videos) == (3, 0)


def test_limits_that_are_set_hold_and_the_context_bounds_the_rest(models: dict[str, Any]) -> None:
    found, _ = limits(models, rows("x" * 9000))
    assert (found.max_model_len, found.max_images) == (CONTEXT, 1)
    found, _ = limits(models, rows("x" * 900), data={"max_prompt_length": 300})
    assert found.max_model_len == 512  # 300 + 100 + 1
    vllm = {"max_model_len": 333, "max_images": 4, "max_videos": 0}
    config = small_config("model", rollout={"engine": "vllm", "vllm": vllm})
    found = engine_limits(config, None, [], None)  # type: ignore[arg-type]
    assert found == EngineLimits(333, 4, 0)


def test_of_a_long_list_the_longest_rows_are_looked_at(models: dict[str, Any], monkeypatch: Any) -> None:
    """That with the longest text, and that with the most images."""
    monkeypatch.setattr("mm_grpo.rollout.engine_limits.ROWS", 2)
    found, _ = limits(models, [*rows("x" * 800, *["short"] * 5), *rows("two", images=2)])
    assert found.max_images == 2 and "2 of 7 rows" in found.sentence
    # (800 + 64 + template) * 1.25 + 101, in steps of 256: above 1,179 whatever the template
    assert found.max_model_len == 1280


def test_some_rows_on_disk_are_read_and_longer_ones_fail(models: dict[str, Any], monkeypatch: Any) -> None:
    from datasets import Dataset

    monkeypatch.setattr("mm_grpo.rollout.engine_limits.ROWS", 3)
    for longest, max_model_len in ((2, 2048), (3, 256)):  # rows 0, 2 and 4 are read
        texts = ["x" * 1500 if row == longest else "a" for row in range(6)]
        table = Dataset.from_list([{"prompt": text, "answer": ""} for text in texts])
        found, processor = limits(models, table, data={"text_only": True})
        assert "3 of 6 rows" in found.sentence and found.max_model_len == max_model_len
    config = small_config(models["qwen2_5_vl"], rollout={"max_completion_length": 100})
    builder = PromptBuilder(processor, config, CONTEXT, 256)
    with pytest.raises(TooLong, match=r"rollout.max_completion_length allows 155"):
        builder.process(tiny.sample("train:3", "x" * 1500))
    with pytest.raises(ConfigError, match=r"max_completion_length = 100: .*max_model_len = 101 "):
        PromptBuilder(processor, config, None, 101)


@pytest.mark.parametrize(("coef", "copies"), [(0.0, 1), (0.01, 2)])
def test_a_row_too_long_for_a_pack_follows_policy(models: dict[str, Any], coef: float, copies: int) -> None:
    processor = load_processor(str(models["qwen2_5_vl"]))
    asked = rows("x" * 50)
    for missing, policy, kept in ((0, "drop", True), (1, "drop", False), (1, "stop", True)):
        sample = load_train(small_config(models["qwen2_5_vl"]), asked).sample(0)
        longest = copies * (len(processor.prompt(sample).token_ids) + 6) - missing
        changes: Any = {"data": {"on_overlong": policy}, "optim": {"max_tokens_per_pack": longest}}
        config = small_config(models["qwen2_5_vl"], algorithm={"perception_coef": coef}, **changes)
        builder, dataset = PromptBuilder(processor, config, CONTEXT), load_train(config, asked)
        assert builder.prompts(dataset, {0: 0}).dropped == (not kept)
        assert builder.evaluation.prompts(dataset, {0: 0}).dropped == 0  # nothing is learned from there
