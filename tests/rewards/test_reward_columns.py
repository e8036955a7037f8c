"""Rewards get every column of their row: the prompt's too, as TRL has them, and encoded images as PIL images."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from helpers import tiny
from PIL import Image, ImageOps

from mm_grpo.config import DataConfig
from mm_grpo.data.dataset import Dataset
from mm_grpo.rewards import Scorer
from mm_grpo.types import Completion, EnginePrompt, Prompt
from mm_grpo.user_code.lazy_image import with_pil_images

SEEN: dict[str, Any] = {}


def encoded(orientation: int = 1) -> bytes:
    """A JPEG of 30 × 20 pixels, red; the orientation says how it is to be turned."""
    exif, data = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    Image.new("RGB", (30, 20), "red").save(data, "JPEG", exif=exif)
    return data.getvalue()


def rows(file: Path) -> list[dict[str, Any]]:
    return [
        {"problem": "What?", "image": {"bytes": encoded(), "path": None}, "solution": "a", "n": 1},
        {"problem": "Who?", "image": {"bytes": encoded(6), "path": "x"}, "solution": "b", "n": 2},
        {"problem": "Why?", "image": {"bytes": None, "path": str(file)}, "solution": "c", "n": 3},
        {"problem": "How?", "image": str(file), "solution": "d", "n": 4},
    ]


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    file = tmp_path / "a.jpg"
    file.write_bytes(encoded())
    return Dataset(rows(file), DataConfig())


def batch_of(dataset: Dataset, generations: int = 1) -> tuple[list[Prompt], list[Completion]]:
    samples = [dataset.sample(i) for i in range(len(dataset)) for _ in range(generations)]
    prompts = [Prompt(s, (1,), EnginePrompt((1,), s.images), None, {}) for s in samples]  # type: ignore[arg-type]
    return prompts, [Completion((1,), (0.0,), "x", "stop", i) for i in range(len(samples))]


def as_trl(completions: list[Any], solution: list[str], **kwargs: Any) -> list[float]:
    SEEN.update(kwargs, solution=solution)
    return [float(len(text)) for text in kwargs["problem"]]


def of_one(completion: str, problem: str, image: Any, images: Any) -> float:
    SEEN.update(problem=problem, image=image, images=images)
    return float(len(problem))


@pytest.fixture(autouse=True)
def _nothing_seen() -> Iterator[None]:
    SEEN.clear()
    yield


def scores(dataset: Dataset, function: Callable[..., Any], **entry: Any) -> Any:
    with closing(Scorer([{"name": function, "as": "r", **entry}], conversational=False)) as with_columns:
        with_columns.check(dataset.columns, dataset.columns_of_rows)
        return with_columns.score(*batch_of(dataset), step=1).parts["r"]


def test_functions_of_trl_get_every_column(dataset: Dataset) -> None:
    assert scores(dataset, as_trl) == [5.0, 4.0, 4.0, 4.0]
    assert SEEN["problem"] == ["What?", "Who?", "Why?", "How?"] == SEEN["prompts"]
    assert (SEEN["solution"], SEEN["n"]) == (["a", "b", "c", "d"], [1, 2, 3, 4])
    *opened, path = SEEN["image"]
    assert path == dataset.fields(3).images[0], "a path stays the path"
    assert [image.size for image in opened] == [(30, 20), (20, 30), (30, 20)], "upright"
    assert all(image.getpixel((0, 0))[0] > 250 for image in opened)
    assert [image.size for (image,) in SEEN["images"]] == [(30, 20), (20, 30), (30, 20), (30, 20)], "ours win"


def of_videos(completion: str, videos: Any) -> float:
    return float(sum(len(video.frames) * video.fps for video in videos))


def of_all_videos(completions: list[Any], videos: Any, **kwargs: Any) -> list[float]:
    return [of_videos(text, own) for text, own in zip(completions, videos, strict=True)]


@pytest.mark.parametrize("function", [of_videos, of_all_videos])
def test_videos_are_those_that_the_model_saw(dataset: Dataset, function: Callable[..., Any]) -> None:
    prompts, completions = batch_of(dataset.head(2))
    clips = tiny.video(1, frames=3, fps=2.0), tiny.video(2, frames=5, fps=0.5)
    shown = EnginePrompt((1,), (tiny.picture(0), *clips))
    sample = prompts[0].sample
    column = replace(sample, columns={**sample.columns, "videos": ["a.mp4"]})  # ours wins
    prompts[0] = replace(prompts[0], engine_prompt=shown, sample=column)
    scores = Scorer([{"name": function, "as": "r"}], conversational=False).score(prompts, completions, step=1)
    assert scores.parts["r"] == [3 * 2.0 + 5 * 0.5, 0.0]


def test_functions_of_one_completion_get_the_prompts_columns_by_name(dataset: Dataset) -> None:
    assert scores(dataset.head(2), of_one) == [5.0, 4.0]
    assert SEEN["problem"] == "Who?" and SEEN["image"].size == (20, 30) == SEEN["images"][0].size
    assert scores(dataset.head(1), lambda completion, problem: 1.0, when={"problem": "What?"}) == [1.0]
    talk = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    of_default = scores(Dataset(talk, DataConfig()), lambda completion, messages=(): float(len(messages)))
    assert of_default == [2.0]


def test_images_no_reward_reads_stay_encoded(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, decoded = batch_of(dataset.head(3), 16), []
    upright = ImageOps.exif_transpose
    monkeypatch.setattr(ImageOps, "exif_transpose", lambda image: decoded.append(image) or upright(image))
    Scorer([{"name": as_trl, "as": "r"}], conversational=False).score(*batch, step=1)
    assert decoded == [] and len(SEEN["image"]) == 48
    first, second = SEEN["image"][:2]
    first.putpixel((0, 0), (0, 0, 255))
    assert second.getpixel((0, 0)) == (254, 0, 0) and len(decoded) == 2


@pytest.mark.parametrize(
    ("form", "mode"), [("GIF", "P"), ("PNG", "RGBA"), ("PNG", "L"), ("WEBP", "RGB"), ("TIFF", "1")]
)
def test_images_of_every_mode_are_what_the_library_decodes(form: str, mode: str) -> None:
    data = io.BytesIO()
    Image.effect_noise((9, 5), 80).convert(mode).save(data, form)
    value = {"bytes": data.getvalue(), "path": None}
    image, expected = with_pil_images(value), datasets.Image().decode_example(value)
    assert (image.mode, image.size) == (expected.mode, (9, 5))
    assert image.convert("RGBA").tobytes() == expected.convert("RGBA").tobytes()


def test_worker_processes_get_images(dataset: Dataset, tmp_path: Path) -> None:
    text = "def area(completion, image, problem):\n    return float(image.size[0] * 100 + len(problem))\n"
    (tmp_path / "areas.py").write_text(text)
    asked = f"{tmp_path / 'areas.py'}:area"
    assert scores(dataset.head(3), asked, isolated=True) == [3005.0, 2004.0, 3004.0]  # type: ignore[arg-type]


def test_a_mapping_that_is_no_image_stays(dataset: Dataset) -> None:
    for value in ({"bytes": b"no image", "path": None}, {"bytes": None, "path": "no/file.png"}):
        prompts, completions = batch_of(dataset.head(1))
        sample = replace(prompts[0].sample, columns={**prompts[0].sample.columns, "image": value})
        Scorer([of_one]).score([replace(prompts[0], sample=sample)], completions, step=1)
        assert SEEN["image"] == value
