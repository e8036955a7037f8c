"""The page of `mm-grpo check --page`: what stands on it. What it draws is in test_pages_browser.py."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny
from PIL import Image

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import ConfigError
from mm_grpo.pages import check_page
from mm_grpo.pages.check_page import CheckPage
from mm_grpo.preflight.check import check_config
from mm_grpo.processors.base import load_processor


def checked(config: GRPOConfig, path: Path, **settings: Any) -> tuple[dict[str, Any], str]:
    """The data of the page that a check writes, and the page."""
    check_config(config, page=str(path), **settings)
    html = path.read_text(encoding="utf-8")
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', html)
    assert match is not None
    found: dict[str, Any] = json.loads(match[1])
    return found, html


def test_the_page_holds_images_golds_tokens_and_answers(
    page_config: Callable[..., GRPOConfig], tmp_path: Path
) -> None:
    data, html = checked(page_config(), tmp_path / "out.html")
    train, evaluation = data["sets"]
    assert (train["name"], train["usable"], train["refused_count"], train["lengths"]["longest"]) == (
        "train", 3, 1, "train.jsonl:3",
    )  # fmt: skip
    assert train["refused"][0][0] == "train.jsonl:4" and "<|im_end|>" in train["refused"][0][1]
    # 200 x 100 is seen at 196 x 112: x times 0.98, y times 1.12
    assert data["pictures"] == {str(i): [196, 112] for i in range(6)}
    box, triangle = [[49, 28], [147, 28], [147, 84], [49, 84]], [[0, 0], [39.2, 0], [0, 56]]
    for row in (*train["shown"], *evaluation["shown"]):
        assert [(each["image"], each["label"], each["points"]) for each in row["gold"]] == [
            (0, "iou, giou", box), (0, "clicking", triangle),
        ]  # fmt: skip
        assert [(image["original"], image["jpeg"]) for image in row["images"]] == [([200, 100], False)]
        # 196 x 112 are 14 x 8 patches of 14, merged by 2 x 2: 28 tokens
        assert row["tokens"]["media"] == 28 and row["tokens"]["all"] == row["tokens"]["text"] + 28
    special = [text for text, is_special in train["shown"][0]["prompt"] if is_special]
    sees = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
    assert special == ["<|im_start|>", *sees, "<|im_end|>", "<|im_start|>"]
    assert [name for name, _ in train["shown"][0]["answers"]] == ["iou", "giou", "clicking"]
    (uri,) = re.findall(r'id="u-0">([^<]*)<', html)
    first = Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))
    assert (first.size, first.getpixel((3, 3))) == ((196, 112), (0, 128, 64))


def test_a_video_is_shown_as_its_frames(models: dict[str, Path], tmp_path: Path) -> None:
    """Two pairs of frames of 3 x 3 tokens, one of 12 x 3, and an image of 4 x 4."""
    processor = load_processor(str(models["qwen2_5_vl"]))
    page = CheckPage(str(tmp_path / "page.html"), processor, [], lambda spec, prompt: None)
    sample = tiny.sample(
        "row", "what", (tiny.picture(1, 112, 112),), (tiny.video(1), tiny.video(2, 2, 336, 84))
    )
    prompt = processor.prompt(sample)
    page.add("train", "row", prompt)
    page.write()
    (row,) = page.gather()["sets"][0]["shown"]
    assert row["videos"] == [
        {"frames": ["1", "2", "3", "4"], "times": (1.0, 1.5, 2.0, 2.5)},
        {"frames": ["5", "6"], "times": (1.0, 1.5)},
    ]
    assert row["tokens"] == {
        "text": len(prompt.token_ids) - 70,
        "media": 16 + 18 + 36,
        "all": len(prompt.token_ids),
    }
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert '"pictures":{"0":[112,112],"1":[84,84],' in html and '"6":[336,84]}' in html
    (uri,) = re.findall(r'id="u-6">([^<]*)<', html)
    assert Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).size == (240, 60)


def test_every_source_of_a_mixture_is_shown(page_config: Callable[..., GRPOConfig], tmp_path: Path) -> None:
    rows = str(tmp_path / "train.jsonl")
    (tmp_path / "b").mkdir()
    twice = [
        {"path": rows},
        {"path": rows, "system_prompt": "Look."},
        {"path": [rows, f"{tmp_path}/b/train.jsonl"]},
    ]
    config = page_config()
    for name in ("green", "blue"):
        (tmp_path / "b" / f"{name}.png").symlink_to(tmp_path / f"{name}.png")
    (tmp_path / "b" / "train.jsonl").write_text((tmp_path / "train.jsonl").read_text())
    data, _ = checked(config.with_values({"data.train": twice}), tmp_path / "out.html")
    first, second, third = data["sets"][:3]
    assert [s["name"] for s in (first, second, third)] == ["train/train", "train/train-2", "train/train-3"]
    assert [len(s["shown"]) for s in (first, second, third)] == [3, 3, 6]
    assert first["lengths"]["longest"] == second["lengths"]["longest"] == "train.jsonl:3"
    assert first["lengths"]["high"] < second["lengths"]["high"]
    assert third["shown"][3]["row"] == "b/train.jsonl:1" and third["refused"][1][0] == "b/train.jsonl:4"


def test_the_page_limits_rows_and_bytes(
    page_config: Callable[..., GRPOConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as one:
        one.setattr(check_page, "MAX_ROWS", 1)
        data, _ = checked(page_config(max_prompt_length=150, on_overlong="drop"), tmp_path / "out.html")
    assert [len(of_set["shown"]) for of_set in data["sets"]] == [1, 1]
    assert any(message.startswith("left out: ") for _, message in data["sets"][0]["refused"])
    monkeypatch.setattr(check_page, "MAX_BYTES", 700)  # one image has some 500
    data, _ = checked(page_config(), tmp_path / "out.html")
    assert [(len(of_set["shown"]), of_set["left_out"]) for of_set in data["sets"]] == [(1, 2), (1, 2)]
    assert len(data["pictures"]) == 2


def test_a_page_replaces_only_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = CheckPage("a.html", None, [], None)  # type: ignore[arg-type]
    assert made.write().startswith(f"page: {tmp_path / 'a.html'} shows 0 rows")
    made.write()  # its own page
    (tmp_path / "a.html").write_text("came in between")
    with pytest.raises(ConfigError, match="--page"):
        made.write()
    assert (tmp_path / "a.html").read_text() == "came in between"
    for name in (".", "none/a.html", "~nobody-here/a", "a.html"):
        with pytest.raises(ConfigError, match="--page"):
            CheckPage(name, None, [], None)  # type: ignore[arg-type]
