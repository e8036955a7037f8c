"""report.html in a browser: images and marks at their pixels, filters and keys, a phone, the dark, no request, 10,000
rollouts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.browser import DARK, LIGHT, Site, browse, found_by, needs_browser, serving
from helpers.runs import group
from PIL import Image

from mm_grpo.rewards import resolve_entry
from mm_grpo.run.folder import RunFolder
from mm_grpo.run.rollout_log import add_to_rollouts
from mm_grpo.types import Group, Turn

pytestmark = needs_browser
PINK, BLUE, GREEN = (255, 45, 149), (0, 168, 240), (0, 128, 64)

# A page that looks into report.html, which stands in a frame of it, and writes where a test reads it what SCRIPT is.
FRAME = """<!doctype html><iframe id="f" style="width: WIDTHpx; height: 900px; border: 0" src="/page.html"></iframe>
<script>onload = () => {
  const frame = document.getElementById("f"), page = frame.contentDocument, view = frame.contentWindow;
  const find = (id) => page.getElementById(id), all = (what) => [...page.querySelectorAll(what)];
  const send = (where, event) => where.dispatchEvent(event);
  const fill = (id, text) => { find(id).value = text; send(find(id), new view.Event("input", { bubbles: true })); };
  const press = (key, where) => send(where || page.body, new view.KeyboardEvent("keydown", { key, bubbles: true }));
  const slot = () => all(".current .group-head span")[0].textContent;
  const open = () => all("details.thinking[open]").length;
  const heads = () => all(".group-head").map((e) => e.textContent).join("; ");
  const status = () => find("status").textContent;
  document.body.dataset.found = [SCRIPT].join("|");
}</script>"""


@pytest.fixture
def site() -> Iterator[Site]:
    with serving() as found:
        yield found


def boxed(slot: int, texts: list[str], image: Image.Image, box: list[int], uid: str = "") -> Group:
    """A group whose rewards read a box; the dataset's image is twice as large as what the model saw."""
    one = group(slot, tuple(i / 4 for i in range(len(texts))), uid or f"object {slot}")
    columns = {"box": box}
    sample = replace(
        one.prompt.sample, images=(image.resize((image.width * 2, image.height * 2)),), columns=columns
    )
    engine = replace(one.prompt.engine_prompt, images=(image,))
    completions = tuple(replace(c, text=t) for c, t in zip(one.completions, texts, strict=True))
    parts = {"iou": [i / 4 for i in range(len(texts))]}
    return replace(
        one,
        prompt=replace(one.prompt, sample=sample, engine_prompt=engine),
        completions=completions,
        parts=parts,
    )


def look(site: Site, tmp_path: Path, page: Path, script: str, *options: str, width: int = 1000) -> list[str]:
    """What `script`, a list of JavaScript values, is on the page."""
    frame = FRAME.replace("WIDTH", str(width)).replace("SCRIPT", script)
    site.pages = {"/page.html": page.read_text(encoding="utf-8"), "/frame.html": frame}
    return found_by(
        browse(tmp_path, f"{site.address}/frame.html", "--dump-dom", "--window-size=1200,1000", *options)
    )


def sight_of(pieces: list[str], nats: list[float]) -> dict[str, Any]:
    return {"sight": {"nats": round(sum(nats), 4), "tokens": nats, "pieces": pieces, "other": "rows:1"}}


@pytest.fixture
def report(tmp_path: Path, site: Site) -> Path:
    """Three steps of twelve groups: boxes, thinking, a conversation, evaluation rows, and hostile texts."""
    evil = (
        f"</script><script>document.title='run'</script><img src='{site.address}/a.png' onerror=alert(1)>"
        + "w" * 3000
        + "\u202e\x1b[31m"
    )
    folder = RunFolder.create(tmp_path / "run", "model:\n  path: m\n")
    specs = [resolve_entry("iou")]
    red = Image.new("RGB", (240, 160), GREEN)
    for step in (1, 2, 3):
        texts = ["<think>" + "because " * 40 + "</think>[20, 20, 120, 100]", "[40, 40, 200, 140]", "nowhere"]
        groups = [boxed(slot, texts, red, [100, 80, 300, 240]) for slot in range(12)]
        groups[5] = boxed(5, [evil, "[1, 1, 9, 9]", evil], red, [100, 80, 300, 240], uid=evil)
        turns = (Turn("assistant", "look", 1, seed=1), Turn("tool", evil, 1, None, "zoom", {}, (red,)))
        talked = replace(groups[2].completions[0], turns=turns)
        own: dict[str, Any] = {"turn_rewards": ((0.5,), (), ()), "turn_advantages": ((-0.5,), (), ())}
        groups[2] = replace(groups[2], completions=(talked, *groups[2].completions[1:]), **own)
        folder.write_rollouts(step, groups, specs)
        sight = {(0, 0, 1): sight_of(["[40", ", 40, 200", ", 140]", ""], [0.2, -0.3, 3.0, 0.0])}
        pieces = [evil[i : i + 9] for i in range(0, len(evil), 9)]
        sight[5, 0, 0] = sight_of(pieces, [float(i % 6) - 2 for i in range(len(pieces))])
        add_to_rollouts(folder.paths, step, sight)
        folder.append_metrics(step, {"reward": 0.25 * step, "entropy": 0.5, f"rewards/{evil}/mean": 0.5})
    folder.append_event(2, evil, "warn", evil)
    for step, text in ((0, "before it"), (3, evil)):
        rows = [
            {"step": step, "uid": f"e:{i}", "completion": text, "reward": step / 3, "blind": blind}
            for i in range(4)
            for blind in (None, "shuffled")
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder.paths.rollouts / f"eval-{step:06d}.jsonl").write_text(lines)
    page = folder.write_report()
    assert page is not None
    return page


@pytest.mark.slow
def test_marks_are_drawn_at_their_pixels(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "model:\n  path: m\n")
    green = Image.new("RGB", (240, 160), GREEN)  # as wide as the page's column: one pixel is one pixel
    one = boxed(0, ["[150, 20, 230, 60]"], green, [40, 80, 240, 240])
    folder.write_rollouts(1, [one], [resolve_entry("iou")])
    page, shot = folder.write_report(), tmp_path / "shot.png"
    assert page is not None
    browse(tmp_path, page.as_uri(), f"--screenshot={shot}", "--window-size=1200,900", LIGHT)
    with Image.open(shot) as image:
        pixels, (width, height) = image.convert("RGB").load(), image.size
    assert pixels is not None
    spots = [(x, y) for y in range(height) for x in range(width) if pixels[x, y] == GREEN]
    left, right = min(x for x, _ in spots), max(x for x, _ in spots)
    top, bottom = min(y for _, y in spots), max(y for _, y in spots)
    # a border of 1 pixel lies over each edge of a picture of 240 × 160, which is scaled to the 238 inside it
    assert (right - left + 1, bottom - top + 1) in ((238, 158), (238, 159)), (left, right, top, bottom)
    scale = 238 / 240

    def at(x: float, y: float) -> tuple[int, int, int]:
        found: tuple[int, int, int] = pixels[round(left + x * scale), round(top + y * scale)]
        return found

    # gold: (40, 80, 240, 240) of the dataset's 480 × 320 is (20, 40, 120, 120) of what the model saw
    for x in range(26, 116, 10):
        assert at(x, 40) == at(x, 120) == PINK, x
    for y in range(46, 116, 10):
        assert at(20, y) == at(120, y) == PINK, y
    for x in range(156, 226, 10):  # predicted: pixels of the image as the model saw it
        assert BLUE in (at(x, 19.5), at(x, 20.5)) and BLUE in (at(x, 59.5), at(x, 60.5)), x
    assert at(70, 80) == at(190, 40) == at(140, 100) == GREEN


@pytest.mark.slow
def test_filters_and_keys(report: Path, site: Site, tmp_path: Path) -> None:
    script = """
      status(), all(".group").length,
      (fill("f-step", "2"), status()), (fill("f-step", "2-3"), status()), (fill("f-step", ""), status()),
      (fill("f-low", "0.5"), fill("f-high", "0.5"), status()), (fill("f-low", "0.6"), status()),
      (find("filters").reset(), fill("f-low", ""), fill("f-high", ""), fill("f-uid", "OBJECT 7"), heads()),
      (fill("f-uid", ""), fill("f-text", "ZOOM"), heads()),
      (fill("f-text", "nothing at all"), status()), (fill("f-text", ""), status()),
      (press("n"), status()), (press("n"), press("p"), status()), (press("p"), status()),
      (press("j"), press("j"), slot()), (press("k"), slot()),
      open(), (press("t"), open()), (press("t"), open()),
      (press("/"), page.activeElement.id), (press("j", find("f-text")), slot()),
      (press("Escape", find("f-text")), page.activeElement.id !== "f-text"),
      (fill("f-sight", "1"), status()), (fill("f-sight", ""), status()),
      (press("e"), status()), all(".versus h3").slice(0, 4).map((e) => e.textContent).join(),
      all(".blind > h3").length,
      all(".versus .text").slice(0, 1).map((e) => e.textContent).join(), (press("e"), status()),
      (() => { for (let i = 0; i < 11; i++) press("j"); return status() + " " + slot(); })()"""
    found = look(site, tmp_path, report, script)
    assert found == [
        "1 to 10 of 36", "10",
        "1 to 10 of 12", "1 to 10 of 24", "1 to 10 of 36",
        "1 to 10 of 36", "nothing fits these filters",
        "; ".join(f"step {s}slot 7row rows:7object 7" for s in (1, 2, 3)),
        "; ".join(f"step {s}slot 2row rows:2object 2" for s in (1, 2, 3)),
        "nothing fits these filters", "1 to 10 of 36",
        "11 to 20 of 36", "11 to 20 of 36", "1 to 10 of 36",
        "slot 1", "slot 0",
        "0", "1", "0",
        "f-text", "slot 0",
        "true",
        "1 to 6 of 6", "1 to 10 of 36",
        "1 to 4 of 4", "step 0,step 3,step 0,step 3", "4",
        "before it", "1 to 10 of 36",
        "11 to 20 of 36 slot 10",
    ]  # fmt: skip


TOKENS = """[...all(".completion")[1].querySelectorAll(".text .sight")].map(
  (e) => `${e.className} ${e.title} ${e.textContent}`).join(";")"""
SHADES = "sight g1 +0.20 nats [40;sight n1 -0.30 nats , 40, 200;sight g4 +3.00 nats , 140]"


@pytest.mark.slow
def test_what_is_shown_of_a_group(report: Path, site: Site, tmp_path: Path) -> None:
    script = """
      all("#groups svg.picture").length, all("#pictures image").length,
      all(".completion")[0].querySelector(".text:not(details .text)").textContent,
      all(".completion")[0].querySelector("summary").textContent,
      all(".completion")[1].querySelector(".scores").textContent,
      TOKENS, all(".completion")[1].querySelector(".text").textContent, all("p.sights i.sight").length,
      all("article")[2].querySelector(".turn .scores").textContent,
      all("article")[2].querySelector(".turn .scores").className,
      all(".reward").slice(0, 3).map((e) => e.textContent).join(),
      all("#groups article")[0].querySelectorAll("svg.picture .mark.gold").length,
      all("#groups article")[0].querySelectorAll("svg.picture .mark.predicted").length,
      (() => { const chart = all("figure svg")[0], box = chart.getBoundingClientRect();
        const at = { clientX: box.left + box.width * 0.54, clientY: box.top + 20 };
        chart.dispatchEvent(new view.PointerEvent("pointermove", at));
        return all(".readout")[0].textContent; })(),
      all("line.event").length, all("[data-of='1'].chosen").length,
      (send(all(".completion")[1], new view.PointerEvent("pointerenter")), all("[data-of='1'].chosen").length)"""
    found = look(site, tmp_path, report, script.replace("TOKENS", TOKENS))
    assert found == [
        "11", "1",  # ten groups and the image of a turn: one picture
        "[20, 20, 120, 100]", "thinking, 335 characters",
        "0.25iou 0.25stop, 2 tokenssight 2.9 nats",
        SHADES, "[40, 40, 200, 140]", "6", "0.5-0.50", "scores down a3",
        "0,0.25,0.5", "1", "2", "step 2: 0.5", "2", "0", "2",
    ]  # fmt: skip


WIDE = """root.clientWidth, root.scrollWidth,
  all("main *").filter((e) => e.getBoundingClientRect().right > WIDTH + 0.5
    && !e.closest("pre, figure svg, .picture")).length,
  view.getComputedStyle(page.body).backgroundColor, page.title, all("script").length,
  (() => { press("e"); return root.scrollWidth; })()""".replace("root", "page.documentElement")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_it_without_scrolling_sideways(
    report: Path, site: Site, tmp_path: Path, scheme: str
) -> None:
    script = WIDE.replace("WIDTH", "360")
    found = look(site, tmp_path, report, script, DARK if scheme == "dark" else LIGHT, width=360)
    ground = "rgb(20, 21, 25)" if scheme == "dark" else "rgb(247, 247, 245)"
    assert found == ["360", "360", "0", ground, "run – mm_grpo", "2", "360"]
    # nothing that its texts ask for
    assert set(site.asked) - {"/favicon.ico"} == {"/frame.html", "/page.html"}


@pytest.mark.slow
def test_the_policy_stands_even_where_a_text_were_not_escaped(
    report: Path, site: Site, tmp_path: Path
) -> None:
    style = (
        f"<style>@import url({site.address}/b.css);</style><link rel=stylesheet href='{site.address}/c.css'>"
    )
    loads = f"<script src='{site.address}/d.js'></script><iframe src='{site.address}/e.html'></iframe>"
    image = f"<img src='{site.address}/a.png' onerror='document.title=1'>"
    hole = f"<script>document.title='run'</script>{image}{style}{loads}"
    site.pages = {"/page.html": report.read_text(encoding="utf-8").replace("<h1>", f"{hole}<h1>")}
    dom = browse(tmp_path, f"{site.address}/page.html", "--dump-dom")
    assert "<title>run – mm_grpo" in dom and hole[:8] in dom
    assert set(site.asked) - {"/favicon.ico"} == {"/page.html"}


@pytest.mark.slow
def test_without_its_script_it_is_a_plain_page(report: Path, site: Site, tmp_path: Path) -> None:
    html = report.read_text(encoding="utf-8")
    start = html.rindex("<script>")
    plain = tmp_path / "plain.html"
    plain.write_text(html[:start] + html[html.index("</script>", start) + 9 :])
    script = """all("#groups article.group:not(.evaluation)").length, all("#groups article.evaluation").length,
      all("figure svg .line").length, find("filters").offsetHeight,
      all("#groups svg.picture use").every((e) => find(e.getAttribute("href").slice(1))),
      page.documentElement.scrollWidth, TOKENS, all(".completion")[1].querySelector(".text").textContent,
      all("article")[2].querySelector(".turn .scores").className, all(".blind > h3").length,
      all("script").length"""
    found = look(site, tmp_path, plain, script.replace("TOKENS", TOKENS), width=360)
    assert found[:6] == ["10", "4", "2", "0", "true", "360"]
    assert found[6:] == [SHADES, "[40, 40, 200, 140]", "scores down a3", "4", "1"]


@pytest.mark.long
def test_ten_thousand_rollouts_open_in_two_seconds(site: Site, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "model:\n  path: m\n")
    images = [Image.effect_noise((120, 80), i + 1).convert("RGB") for i in range(100)]
    for step in range(1, 126):
        texts = [f"<think>{'thinks ' * 80}</think>[{i}, 2, 90, 60]" for i in range(8)]
        groups = [boxed(slot, texts, images[(step * 10 + slot) % 100], [0, 0, 99, 99]) for slot in range(10)]
        folder.write_rollouts(step, groups, [resolve_entry("iou")])
    page = folder.write_report()
    assert page is not None
    html = page.read_text(encoding="utf-8")
    assert "Shown are 1250 groups of 125 of the 125 logged steps." in html
    frame = """<!doctype html><body><script>
      const start = performance.now(), frame = document.createElement("iframe");
      frame.src = "/page.html";
      frame.onload = () => { const found = frame.contentDocument.getElementById("status");
        document.body.dataset.found = [performance.now() - start, found.textContent].join("|"); };
      document.body.append(frame);</script>"""
    site.pages = {"/page.html": html, "/frame.html": frame}
    address = f"{site.address}/frame.html"
    times = []
    for _ in range(3):
        took, status = found_by(browse(tmp_path, address, "--dump-dom", virtual_time=False))
        assert status == "1 to 10 of 1250"
        times.append(float(took))
    assert min(times) < 10_000, times  # under 2,000 is promised, of a quiet machine
