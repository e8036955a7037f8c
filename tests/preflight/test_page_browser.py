"""The page of `mm-grpo check --page` in a browser: marks at their pixels, a phone's width, no request, no script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.browser import DARK, LIGHT, Site, browse, found_by, needs_browser, serving
from PIL import Image

from mm_grpo.config import GRPOConfig
from mm_grpo.preflight.check import PageSettings, check_config

pytestmark = needs_browser
PINK, GREEN = (255, 45, 149), (0, 128, 64)
FRAME = """<!doctype html><iframe id="f" style="width: WIDTHpx; height: 900px; border: 0" src="/page.html"></iframe>
<script>onload = () => {
  const page = document.getElementById("f").contentDocument, root = page.documentElement;
  const wide = [...page.querySelectorAll("main *")].filter(e => e.getBoundingClientRect().right > WIDTH + 0.5);
  document.body.dataset.found = [root.clientWidth, root.scrollWidth, wide.length, page.title,
    page.scripts.length, getComputedStyle(page.body).backgroundColor].join("|");
}</script>"""


@pytest.fixture
def site() -> Iterator[Site]:
    with serving() as found:
        yield found


@pytest.fixture
def page(page_job: Callable[..., GRPOConfig], site: Site, tmp_path: Path) -> Path:
    """The page of `page_job`, whose hostile texts ask for files of `site`."""
    out = tmp_path / "page.html"
    check_config(page_job(site.address), page=PageSettings(str(out)))
    assert site.address in out.read_text(encoding="utf-8")
    return out


@pytest.mark.slow
def test_marks_are_drawn_at_their_pixels(page: Path, tmp_path: Path) -> None:
    shot = tmp_path / "shot.png"
    browse(tmp_path, page.as_uri(), f"--screenshot={shot}", "--window-size=800,2000")
    with Image.open(shot) as image:
        pixels, (width, height) = image.convert("RGB").load(), image.size
    assert pixels is not None
    green = [(x, y) for y in range(height) for x in range(width) if pixels[x, y] == GREEN]
    left, top = min(x for x, _ in green), min(y for _, y in green)
    # the first picture of that colour is 196 x 112 pixels large: the model's size, not scaled
    first = [(x, y) for x, y in green if y < top + 112]
    # a triangle covers the corner at the top left, and its halo hides 3 pixels along the edges
    right, bottom = max(x for x, _ in first), max(y for _, y in first)
    left, top = right - 195, bottom - 111
    picture = {(x, y): pixels[left + x, top + y] for x in range(196) for y in range(112)}
    pink = {place for place, colour in picture.items() if colour == PINK}
    # the box from (49, 28) to (147, 84): strokes of 3 pixels, of which 2 are whole, along each edge
    for x in range(60, 147):
        assert {(x, 27), (x, 28), (x, 83), (x, 84)} <= pink, x
    for y in range(40, 84):
        assert {(146, y), (147, y), (48, y), (49, y)} <= pink, y
    assert all(
        picture[place] == GREEN for place in ((98, 56), (190, 56), (98, 100), (53, 33), (143, 79), (151, 24))
    )
    # the triangle (0, 0), (39.2, 0), (0, 56): its long edge passes the middle (19.6, 28)
    assert any((x, y) in pink for x in (18, 19, 20) for y in (27, 28))
    assert picture[(8, 12)] == GREEN and picture[(30, 40)] == GREEN


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_it_without_scrolling_sideways(
    page: Path, site: Site, tmp_path: Path, scheme: str
) -> None:
    site.pages = {
        "/page.html": page.read_text(encoding="utf-8"),
        "/frame.html": FRAME.replace("WIDTH", "360"),
    }
    dark = DARK if scheme == "dark" else LIGHT
    dom = browse(tmp_path, f"{site.address}/frame.html", "--dump-dom", "--window-size=800,1000", dark)
    width, scrolled, wide, title, scripts, ground = found_by(dom)
    assert (width, scrolled, wide) == ("360", "360", "0")
    assert (title, scripts) == ("What the model sees – mm_grpo check", "0")
    assert ground == ("rgb(21, 22, 26)" if scheme == "dark" else "rgb(251, 251, 249)")
    assert sorted(set(site.asked) - {"/favicon.ico"}) == [
        "/frame.html",
        "/page.html",
    ]  # nothing that its texts ask for


def test_the_same_texts_unescaped_would_ask_and_run(site: Site, tmp_path: Path) -> None:
    """What the test before rests on: this browser follows such a text where nothing stands against it."""
    site.pages = {
        "/evil.html": f"<body><script>document.title='run'</script><img src='{site.address}/a.png'>"
    }
    dom = browse(tmp_path, f"{site.address}/evil.html", "--dump-dom")
    assert "<title>run</title>" in dom and "/a.png" in site.asked


def test_the_policy_stands_even_where_a_text_were_not_escaped(page: Path, site: Site, tmp_path: Path) -> None:
    style = (
        f"<style>@import url({site.address}/b.css);</style><link rel=stylesheet href='{site.address}/c.css'>"
    )
    loads = f"<script src='{site.address}/d.js'></script><iframe src='{site.address}/e.html'></iframe>"
    hole = f"<script>document.title='run'</script><img src='{site.address}/a.png'>{style}{loads}"
    html = page.read_text(encoding="utf-8")
    site.pages = {"/page.html": html.replace("<h1>", f"{hole}<h1>")}
    dom = browse(tmp_path, f"{site.address}/page.html", "--dump-dom")
    assert "<title>What the model sees" in dom and hole[:8] in dom
    assert set(site.asked) - {"/favicon.ico"} == {"/page.html"}
