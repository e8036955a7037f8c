"""A picture at its family's size: transformers' image processor changes nothing of it but to cut it into tiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from mm_grpo.errors import ConfigError, DataError
from mm_grpo.processors.base import load_processor

TILED = ("internvl", "smolvlm", "idefics3", "llava_onevision")
TILE = 56
SIDES = st.integers(20, 900)


@pytest.fixture(scope="module")
def processors(models: dict[str, Path]) -> dict[str, Any]:
    return {family: load_processor(str(models[family])) for family in (*TILED, "gemma3")}


def noise(height: int, width: int) -> Image.Image:
    pixels = np.random.default_rng(height + width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def pixels_of(processor: Any, image: Image.Image) -> Tensor:
    """The image as the model's processor normalises it, whole [3, height, width]."""
    own = processor.hf.image_processor
    mean, std = (torch.tensor(x)[:, None, None] for x in (own.image_mean, own.image_std))
    return (torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 - mean) / std


def tiles_of(whole: Tensor) -> Tensor:
    """The tiles [n, 3, TILE, TILE] of an image in whole tiles, row by row."""
    rows, columns = whole.shape[1] // TILE, whole.shape[2] // TILE
    cut = whole.unflatten(2, (columns, TILE)).unflatten(1, (rows, TILE))  # [3, rows, TILE, columns, TILE]
    return cut.permute(1, 3, 0, 2, 4).flatten(0, 1)


@pytest.mark.parametrize("family", TILED)
@settings(max_examples=15)
@given(height=SIDES, width=SIDES)
def test_tiles_are_not_resized(family: str, height: int, width: int, processors: dict[str, Any]) -> None:
    processor = processors[family]
    prompt = processor.prompt(tiny.sample("r", "what", (noise(height, width),)))
    (image,) = prompt.engine_prompt.images
    assert processor.fixed_size((image.height, image.width)) == (image.height, image.width)
    assert prompt.token_ids == processor.prompt(tiny.sample("r", "what", (image,))).token_ids
    whole, made = pixels_of(processor, image), prompt.vision["pixel_values"]
    if family == "llava_onevision":  # on a canvas with borders, after the picture of the whole
        rows, columns = (-(-side // TILE) for side in (image.height, image.width))
        assert rows * TILE == image.height or columns * TILE == image.width
        canvas = torch.zeros(3, rows * TILE, columns * TILE)
        top, left = (rows * TILE - image.height) // 2, (columns * TILE - image.width) // 2
        canvas += pixels_of(processor, Image.new("RGB", (1, 1)))
        canvas[:, top : top + image.height, left : left + image.width] = whole
        whole, made = canvas, made[1:]
    else:
        assert image.height % TILE == 0 and image.width % TILE == 0
        assert processor.min_pixels <= image.height * image.width <= processor.max_pixels
    count = len(tiles_of(whole))
    torch.testing.assert_close(made[:count], tiles_of(whole), atol=1e-5, rtol=0)
    assert len(made) == count + (family != "llava_onevision" and count > 1)


def test_sizes_by_hand(processors: dict[str, Any]) -> None:
    # at most 16 tiles; 3 : 1 is a row of three, and two rows of six where the picture has half of their area
    assert processors["internvl"].fixed_size((100, 300)) == (112, 336)
    assert processors["internvl"].fixed_size((60, 180)) == (56, 168)
    assert processors["internvl"].fixed_size((50, 50)) == (56, 56)
    # the longest edge is 4 tiles whatever the picture's is
    assert processors["smolvlm"].fixed_size((50, 50)) == (224, 224)
    assert processors["smolvlm"].fixed_size((10, 300)) == (56, 224)
    assert processors["smolvlm"].fixed_size((300, 160)) == (224, 168)  # 119.5 -> 120 -> three tiles
    # 1 : 3 fits 168 x 56 without a border, 100 x 90 in 112 x 112 with one of 5 on each side
    assert processors["llava_onevision"].fixed_size((300, 100)) == (168, 56)
    assert processors["llava_onevision"].fixed_size((100, 90)) == (112, 101)
    assert processors["gemma3"].fixed_size((300, 100)) == (56, 56)


@pytest.mark.parametrize(
    ("family", "limits", "least", "most", "size"),
    [
        ("internvl", {"min_pixels": 3 * TILE**2 - 5, "max_pixels": 4 * TILE**2}, 3 * TILE**2, 4 * TILE**2, (112, 112)),
        ("smolvlm", {"max_pixels": 5 * TILE**2}, 2 * TILE**2, 4 * TILE**2, (112, 112)),
        ("llava_onevision", {"max_pixels": 4 * TILE**2}, TILE**2, 4 * TILE**2, (111, 112)),
        ("gemma3", {"max_pixels": 10**6}, TILE**2, TILE**2, (56, 56)),
    ],
)  # fmt: skip
def test_limits_are_kept_in_whole_tiles(
    family: str, limits: Any, least: int, most: int, size: Any, models: dict[str, Path], tmp_path: Path
) -> None:
    processor: Any = load_processor(str(models[family]), **limits)
    assert (processor.min_pixels, processor.max_pixels) == (least, most)
    sample = tiny.sample("r", "what", (noise(700, 710),))
    prompt = processor.prompt(sample)
    (image,) = prompt.engine_prompt.images
    assert (image.height, image.width) == size
    assert len(prompt.token_ids) <= processor.max_prompt_tokens(sample, 1)
    processor.save(tmp_path)  # with the limits that were set
    (tmp_path / "config.json").write_text((models[family] / "config.json").read_text())
    if family != "llava_onevision":  # whose limits are no field of its processor
        assert load_processor(str(tmp_path)).prompt(sample).token_ids == prompt.token_ids


@pytest.mark.parametrize(
    ("family", "limits", "words"),
    [
        ("internvl", {"max_pixels": 100}, r"data\.max_pixels = 100 .* an image needs one at least: max_pixels >= 3136"),
        ("smolvlm", {"max_pixels": 100}, r"data\.max_pixels = 100 .* max_pixels must be at least 3136"),
        ("llava_onevision", {"max_pixels": 100}, "none of the model's resolutions has .* from 3136 to 28224 pixels"),
        ("gemma3", {"max_pixels": 100}, r"data\.max_pixels = 100: every image .* = 3136 pixels"),
    ],
)  # fmt: skip
def test_impossible_limits_are_refused(
    family: str, limits: dict[str, int], words: str, models: dict[str, Path]
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_processor(str(models[family]), **limits)


MEDIA = {
    "internvl": {"<IMG_CONTEXT>", "<img>", "</img>", "<video>"},
    "smolvlm": {"<image>", "<fake_token_around_image>", "<global-img>"}
    | {f"<row_{r}_col_{c}>" for r in range(1, 5) for c in range(1, 5)},
    "llava_onevision": {"<image>", "<video>"},
    "gemma3": {"<start_of_image>", "<image_soft_token>", "<end_of_image>"},
}


@pytest.mark.parametrize("family", MEDIA)
def test_media_tokens_are_never_sampled_nor_typed(family: str, processors: dict[str, Any]) -> None:
    processor = processors[family]
    names = set(processor.tokenizer.convert_ids_to_tokens(sorted(processor.media_token_ids)))
    assert names == MEDIA[family]
    for name in sorted(names)[:4]:
        with pytest.raises(
            DataError,
            match=r"^r: (a message of role 'user' holds .*a special token|the prompt('s text holds| has 2 image))",
        ):
            processor.prompt(tiny.sample("r", f"look: {name}", (noise(60, 60),)))


@pytest.mark.parametrize("text", ["x", "\n\nx", "a\n\nb"])
def test_gemmas_line_breaks_run_together_as_transformers_own(text: str, processors: dict[str, Any]) -> None:
    processor = processors["gemma3"]
    parts: list[dict[str, str]] = [{"type": "text", "text": "see\n"}, {"type": "image"}, {"type": "image"}]
    sample = tiny.sample("r", text, (noise(60, 60), noise(70, 60)))
    sample.messages[0]["content"][:] = [*parts, {"type": "text", "text": text}]
    prompt = processor.prompt(sample)
    shown = processor.hf.apply_chat_template(sample.messages, tokenize=False, add_generation_prompt=True)
    theirs = processor.hf(text=[shown], images=[list(prompt.engine_prompt.images)], add_special_tokens=False)
    assert list(prompt.token_ids) == theirs["input_ids"][0]
    assert processor.tokenizer.convert_tokens_to_ids("\n\n\n\n") in prompt.token_ids
