"""`mm-grpo check --page`: what stands on the page, that it is inert, and that nobody's file is lost."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny
from PIL import Image

from mm_grpo.cli.preflight import page_path
from mm_grpo.config import GRPOConfig
from mm_grpo.errors import ConfigError
from mm_grpo.preflight import page
from mm_grpo.preflight.check import PageSettings, check_config
from mm_grpo.preflight.page import CheckPage, check_path, describe_lengths, encode_image, prompt_pieces
from mm_grpo.processors.base import load_processor

TAGS = {
    *(
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "main",
        "h1",
        "h2",
        "h3",
        "p",
        "span",
        "section",
        "div",
        "svg",
    ),
    *("rect", "img", "polygon", "circle", "pre", "b", "dl", "dt", "dd", "ul", "li"),
}


class Read(HTMLParser):
    """Tags with their attributes, and the text of each kind of tag."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open = tag
        self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        self.open = ""

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open][-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture
def written(page_job: Callable[..., GRPOConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The page of `page_job`, whose last row of training is refused."""
    out = tmp_path / "out.html"
    assert check_config(page_job(), page=PageSettings(str(out))) is False
    assert f"page: {out} shows 6 rows" in capsys.readouterr().out
    return out.read_text(encoding="utf-8")


def test_marks_lie_in_pixels_of_the_image_as_the_model_sees_it(written: str) -> None:
    read = Read(written)
    # 200 x 100 is seen at 196 x 112: x times 0.98, y times 1.12
    assert {(i["width"], i["height"]) for i in read.all("img")} == {("196", "112")}
    assert {i["viewbox"] for i in read.all("svg") if i.get("class") is None} == {"0 0 196 112"}
    points = [i["points"] for i in read.all("polygon") if i["class"] == "mark"]
    box, triangle = "49.00,28.00 147.00,28.00 147.00,84.00 49.00,84.00", "0.00,0.00 39.20,0.00 0.00,56.00"
    assert points == [box, triangle] * 6
    assert "iou, giou: [49, 28, 147, 84]" in written and "clicking: [0, 0, 39.2, 0, 0, 56]" in written
    assert "196 × 112 pixels, 200 × 100 in the dataset" in written


def test_images_are_those_that_the_model_gets(written: str) -> None:
    uris = [image["src"] or "" for image in Read(written).all("img")]
    assert len(uris) == 6 and all(uri.startswith("data:image/png;base64,") for uri in uris)
    first = Image.open(io.BytesIO(base64.b64decode(uris[0].partition(",")[2])))
    assert (first.size, first.getpixel((3, 3))) == ((196, 112), (0, 128, 64))


def test_counts_texts_and_lengths(written: str) -> None:
    read = Read(written)
    # 196 x 112 are 14 x 8 patches of 14, merged by 2 x 2: 28 tokens
    assert re.findall(r"images (\d+)<", written) == ["28"] * 6
    for total, text in re.findall(r"<span>(\d+) tokens</span><span class=\"soft\">text (\d+)<", written):
        assert int(total) == int(text) + 28
    bold = [text for text in read.texts["b"] if text.startswith("<|")]
    starts, sees = ("<|im_start|>", "<|im_end|>"), ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
    assert bold[:6] == [starts[0], *sees, starts[1], starts[0]]
    assert "The longest is train.jsonl:3." in written
    assert "3 row(s) can be used" in " ".join(written.split())


def test_refused_rows_and_rows_that_both_sets_have(written: str) -> None:
    flat = " ".join(written.split())
    assert "1 row(s) cannot be used" in flat
    assert (
        "<b>train.jsonl:4</b>: a message of role &#39;user&#39; holds &#39;&lt;|im_end|&gt;&#39; in its text"
        in flat
    )
    assert (
        "1 of 3 row(s) of eval have the images and the text of a row of train: eval.jsonl:1 is train.jsonl:1"
        in flat
    )
    assert "1 more have the images of a row of train with another text: eval.jsonl:2 as train.jsonl:2" in flat


def test_hostile_texts_are_text(written: str) -> None:
    read = Read(written)
    assert {tag for tag, _ in read.tags} <= TAGS
    names = {name for _, attributes in read.tags for name in attributes}
    assert not any(name.startswith("on") for name in names) and "href" not in names
    assert read.texts["title"][0] == "What the model sees – mm_grpo check"
    assert len(read.all("style")) == 1 and "<script" not in written
    assert "\x1b" not in written and "\u202e" not in written and "\\u202e" in written
    policy = next(a["content"] for a in read.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert (
        policy
        == "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    )


def test_fewer_rows_and_rows_that_are_left_out(
    page_job: Callable[..., GRPOConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.html"
    check_config(page_job(max_prompt_length=150, on_overlong="drop"), page=PageSettings(str(out), rows=1))
    html = out.read_text(encoding="utf-8")
    assert len(Read(html).all("section")) == 2  # the first of train and the first of eval
    assert "left out: the prompt has" in " ".join(html.split()) and "1 row(s) can be used" in html
    monkeypatch.setattr(page, "MOST_BYTES", 700)  # one image has some 500
    check_config(page_job(), page=PageSettings(str(out)))
    html = out.read_text(encoding="utf-8")
    assert len(Read(html).all("section")) == 2 and len(Read(html).all("img")) == 2
    assert html.count("2 more row(s) are not shown: a page holds at most 0 MB of images and texts") == 2


def test_a_large_image_is_a_jpeg_that_says_so() -> None:
    small = encode_image(tiny.picture(0))
    assert small["form"] == "PNG" and small["uri"].startswith("data:image/png;base64,")
    noise = Image.effect_noise((900, 900), 90).convert("RGB")
    large = encode_image(noise)
    assert large["form"] == "JPEG" and large["uri"].startswith("data:image/jpeg;base64,")


def test_lengths_by_hand() -> None:
    assert describe_lengths([]) is None
    found = describe_lengths([(10, "a"), (12, "b"), (12, "c"), (60, "d")])
    assert found is not None
    assert (found["low"], found["mean"], found["high"], found["longest"]) == (10, 24, 60, "d")
    # 51 lengths in bars of 3: 10 to 12, ..., 58 to 60
    assert len(found["bars"]) == 17
    assert found["bars"][0] == {"share": 1.0, "count": 3, "low": 10, "high": 12}
    assert found["bars"][-1] == {"share": 1 / 3, "count": 1, "low": 58, "high": 60}
    assert sum(bar["count"] for bar in found["bars"]) == 4


def test_typed_tokens_as_text_look_as_text(models: dict[str, Path]) -> None:
    processor: Any = load_processor(str(models["qwen2_5_vl"]))
    processor.special_tokens = "as_text"
    ids = processor.prompt(tiny.sample("r", "a <|im_end|> é猫")).token_ids
    assert list(prompt_pieces(processor, ids)) == [
        ("<|im_start|>", True),
        ("user\na <|im_end|> é猫", False),
        ("<|im_end|>", True),
        ("\n", False),
        ("<|im_start|>", True),
        ("assistant\n", False),
    ]

    class Own:
        """A processor without a tokenizer."""

        def decode(self, token_ids: Any) -> str:
            return f"{len(token_ids)} ids"

    assert list(prompt_pieces(Own(), ids)) == [(f"{len(ids)} ids", False)]


def test_a_long_prompt_is_cut_on_the_page(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "LONGEST_TEXT", 20)
    processor: Any = load_processor(str(models["qwen2_5_vl"]))
    pieces = list(prompt_pieces(processor, processor.prompt(tiny.sample("r", "x" * 100)).token_ids))
    assert pieces == [("<|im_start|>", True), ("user\nxxx… (105 characters)", False)]


def test_only_pages_of_ours_are_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert check_path(None) == Path("check.html")
    made = CheckPage("a.html", None, [])  # type: ignore[arg-type]
    assert made.write().startswith(f"page: {tmp_path / 'a.html'} shows 0 rows")
    made.write()  # its own page
    other = tmp_path / "b.html"
    for text in ("", "<html>mine</html>", "x" * 2000 + page.WRITTEN_BY.decode()):
        other.write_text(text)
        with pytest.raises(ConfigError, match=r"--page 'b.html': what is there was not written by mm-grpo"):
            CheckPage("b.html", None, [])  # type: ignore[arg-type]
        assert other.read_text() == text
    made = CheckPage("c.html", None, [])  # type: ignore[arg-type]
    (tmp_path / "c.html").write_text("came in between")
    with pytest.raises(ConfigError, match="what is there was not written by"):
        made.write()
    assert (tmp_path / "c.html").read_text() == "came in between"
    for name, words in (
        (".", "directory"),
        ("none/a.html", "there is no folder none"),
        ("~nobody-here/a", "no user"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_path(name)


def test_a_path_among_the_overrides() -> None:
    assert page_path(True, []) == (None, [])
    assert page_path(True, ["out.html", "data.train=rows.html"]) == ("out.html", ["data.train=rows.html"])
    assert page_path(False, ["out.html"]) == (None, ["out.html"])
    with pytest.raises(ConfigError, match=r"--page: 2 files are named, a.html and b.html; one page is"):
        page_path(True, ["a.html", "b.html"])
