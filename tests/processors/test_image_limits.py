"""Limits of one image: followed inside the run's, at a size that the engine's rule leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mm_grpo.processors.base import load_processor
from mm_grpo.processors.image_size import NoFixedPoint

AREA = 56 * 56
"""A tile of the tiny models."""


@pytest.fixture(scope="module")
def processors(models: dict[str, Path]) -> dict[str, Any]:
    names = ("qwen2_vl", "qwen3_vl", "internvl", "smolvlm", "llava_onevision", "gemma3")
    return {name: load_processor(str(models[name])) for name in names}


@pytest.mark.parametrize(
    ("family", "size", "limits", "expected"),
    [
        # the run's: 784 to 50,176 pixels, sides of 28; 640 x 480 at 10,000 pixels is 115.5 x 86.6
        ("qwen2_vl", (480, 640), {"max_pixels": 10_000}, (84, 112)),
        ("qwen2_vl", (56, 56), {"min_pixels": 10_000}, (112, 112)),  # 100 x 100, rounded up
        ("qwen2_vl", (480, 640), {"resized_height": 100, "resized_width": 60}, (112, 56)),
        ("qwen2_vl", (480, 640), {"min_pixels": 28_000, "max_pixels": 28_000}, (140, 168)),  # 5.18 and 6.90 sides
        ("qwen2_vl", (56, 56), {"min_pixels": 28_000, "max_pixels": 28_000}, (140, 140)),  # 168 x 168 is 28,224
        ("qwen2_vl", (56, 56), {"min_pixels": 2_000_000}, (224, 224)),  # clipped
        ("qwen2_vl", (480, 640), {"max_pixels": 1}, (28, 28)),  # clipped
        ("qwen2_vl", (480, 640), {"resized_height": 9000, "resized_width": 9000}, (224, 224)),
        ("qwen3_vl", (480, 640), {"max_pixels": 10_000}, (64, 96)),  # sides of 32: 2.7 and 3.6
        # the run's: 1 to 16 tiles
        ("internvl", (100, 300), {}, (112, 336)),
        ("internvl", (100, 300), {"max_pixels": 6 * AREA}, (56, 168)),
        ("internvl", (300, 300), {"max_pixels": 9 * AREA}, (112, 112)),  # the engine makes 3 x 3 tiles 4 x 4
        ("internvl", (300, 300), {"min_pixels": 9 * AREA, "max_pixels": 9 * AREA}, (112, 112)),
        ("internvl", (50, 50), {"resized_height": 200, "resized_width": 100}, (224, 112)),
        ("internvl", (50, 50), {"max_pixels": 1}, (56, 56)),
        ("llava_onevision", (100, 90), {"max_pixels": AREA}, (56, 51)),
        ("llava_onevision", (100, 90), {"max_pixels": 10**6}, (112, 101)),
        # always as large as the model makes it
        ("smolvlm", (10, 300), {"max_pixels": 4 * AREA}, (56, 224)),
        ("gemma3", (300, 100), {"min_pixels": 10, "max_pixels": 10**6}, (56, 56)),
        ("gemma3", (300, 100), {"resized_height": 56, "resized_width": 56}, (56, 56)),
    ],
)  # fmt: skip
def test_sizes_under_limits_by_hand(
    family: str, size: Any, limits: dict[str, int], expected: Any, processors: dict[str, Any]
) -> None:
    processor = processors[family]
    assert processor.image_size(size, limits) == expected
    assert processor.fixed_size(expected) == expected


@pytest.mark.parametrize(
    ("family", "limits"),
    [
        ("qwen2_vl", {"resized_height": 28, "resized_width": 28 * 201}),
        ("internvl", {"min_pixels": 3 * AREA + 1, "max_pixels": 4 * AREA - 1}),
        ("llava_onevision", {"min_pixels": AREA + 1, "max_pixels": AREA + 2}),
        ("smolvlm", {"max_pixels": 5 * AREA}),
        ("smolvlm", {"resized_height": 112, "resized_width": 112}),
        ("gemma3", {"max_pixels": AREA - 1}),
        ("gemma3", {"min_pixels": AREA + 1}),
        ("gemma3", {"resized_height": 112, "resized_width": 112}),
    ],
)
def test_limits_that_a_family_cannot_follow_are_refused(
    family: str, limits: dict[str, int], processors: dict[str, Any]
) -> None:
    with pytest.raises(NoFixedPoint):
        processors[family].image_size((100, 100), limits)
