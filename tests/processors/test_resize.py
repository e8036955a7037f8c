"""One resize, to a point that neither transformers' processor nor vLLM's moves away from."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mm_grpo.processors.image_size import NoFixedPoint, resize_to, settle
from mm_grpo.processors.qwen_vl import fixed_size

pytestmark = pytest.mark.lowest

SIDES = st.integers(1, 4000)


@settings(max_examples=60, deadline=None)
@given(SIDES, SIDES, st.sampled_from([28, 32]), st.integers(1, 200), st.integers(1, 1000))
def test_a_fixed_size_is_legal_and_stays(height: int, width: int, factor: int, low: int, extra: int) -> None:
    min_pixels = low * factor * factor
    max_pixels = min_pixels + extra * factor * factor
    try:
        h, w = fixed_size(height, width, factor=factor, min_pixels=min_pixels, max_pixels=max_pixels)
    except NoFixedPoint:
        return
    assert h % factor == 0 and w % factor == 0
    assert min_pixels <= h * w <= max_pixels
    assert fixed_size(h, w, factor=factor, min_pixels=min_pixels, max_pixels=max_pixels) == (h, w)


def test_sizes_by_hand() -> None:
    limits = {"factor": 28, "min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280}
    assert fixed_size(84, 84, **limits) == (84, 84)
    assert fixed_size(100, 90, **limits) == (112, 84)  # 3.57 -> 4, 3.2 -> 3
    assert fixed_size(10, 10, **limits) == (56, 56)  # below the least area


def test_a_size_that_walks_needs_more_than_one_step() -> None:
    """One application of the rule is not enough for thin pictures near the upper limit."""
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    limits = {"factor": 28, "min_pixels": 784, "max_pixels": 784 * 10}
    once = smart_resize(30, 2000, **limits)
    assert smart_resize(*once, **limits) != once
    assert fixed_size(30, 2000, **limits) == (28, 280)


def test_no_size_between_the_limits_is_refused() -> None:
    with pytest.raises(NoFixedPoint, match="100x100 pixels"):
        fixed_size(100, 100, factor=28, min_pixels=3500, max_pixels=3900)
    with pytest.raises(NoFixedPoint, match="aspect ratio"):
        fixed_size(10, 2500, factor=28, min_pixels=784, max_pixels=78400)
    with pytest.raises(NoFixedPoint, match="30x20 pixels"):
        settle((20, 30), lambda size: (0, size[1]))


def test_a_picture_at_its_size_is_the_same_object() -> None:
    image = Image.new("RGB", (84, 56))
    assert resize_to(image, (56, 84)) is image
    for width, height in ((85, 56), (84, 57)):  # one side is right already
        assert resize_to(Image.new("RGB", (width, height)), (56, 84)).size == (84, 56)


def test_the_resize_gives_the_pixels_of_the_models_own_processor() -> None:
    image = tiny.picture(3, 230, 170)
    hf = hf_image_processor(14, {"shortest_edge": 784, "longest_edge": 784 * 16})
    ours = resize_to(image, (84, 112))
    own, theirs = (hf([x], return_tensors="pt")["pixel_values"] for x in (ours, image))
    assert own.shape == theirs.shape and float((own - theirs).abs().max()) < 0.02  # a level is 0.015


@pytest.mark.parametrize("family", tiny.FAMILIES)
@settings(max_examples=10, deadline=None)
@given(
    height=st.integers(8, 700), width=st.integers(8, 700), low=st.integers(1, 20), extra=st.integers(4, 300)
)
def test_libraries_leave_a_fixed_size(family: str, height: int, width: int, low: int, extra: int) -> None:
    """Real processors of both sides: pixels untouched, token counts those of our size."""
    factor = 32 if family == "qwen3_vl" else 28
    size = {"shortest_edge": low * factor**2, "longest_edge": (low + extra) * factor**2}
    try:
        limits = dict(zip(("min_pixels", "max_pixels"), size.values(), strict=True))
        h, w = fixed_size(height, width, factor=factor, **limits)
    except NoFixedPoint:
        return
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (h, w, 3), dtype=np.uint8))
    hf = hf_image_processor(factor // 2, size)
    resized, kept = (hf([image], do_resize=flag, return_tensors="pt") for flag in (True, False))
    assert resized["image_grid_thw"].tolist() == [[1, 2 * h // factor, 2 * w // factor]]
    assert (resized["pixel_values"] == kept["pixel_values"]).all()
    if find_spec("vllm"):  # requirements/cpu.txt has it, and requirements/lowest.txt has not
        final, tokens = vllm_vision_info(family, factor // 2, hf, h, w)
        assert (final.height, final.width) == (h, w)
        assert tokens == (h // factor) * (w // factor)


def hf_image_processor(patch: int, size: dict[str, int]) -> Any:
    from transformers import Qwen2VLImageProcessor

    return Qwen2VLImageProcessor(patch_size=patch, merge_size=2, size=size)


def vllm_vision_info(family: str, patch: int, hf: Any, height: int, width: int) -> Any:
    """What vLLM's own processing info makes of an image: its final size and its token count."""
    from vllm.model_executor.models import qwen2_vl, qwen3_vl

    base: Any = qwen3_vl.Qwen3VLProcessingInfo if family == "qwen3_vl" else qwen2_vl.Qwen2VLProcessingInfo
    vision = SimpleNamespace(patch_size=patch, spatial_merge_size=2, temporal_patch_size=2)

    class Info(base):  # type: ignore[misc]
        def __init__(self) -> None:
            """No engine stands behind it."""

        def get_hf_config(self, *args: Any) -> Any:
            return SimpleNamespace(vision_config=vision)

        def _merge_and_resolve_mm_processor_kwargs(self, kwargs: Any) -> Any:
            return {}

    return Info()._get_vision_info(image_width=width, image_height=height, image_processor=hf, mm_kwargs={})
