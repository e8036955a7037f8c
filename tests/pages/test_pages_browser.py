"""Both pages in a browser: what they draw, boxes at their pixels, filters, a phone, hostile texts."""

# ruff: noqa: E501
from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny
from helpers.browser import LIGHT, Site, browse, found_by, needs_browser, serving
from helpers.runs import group
from helpers.runs import run as finished_run
from PIL import Image
from test_report import controlled

from mm_grpo.config import GRPOConfig
from mm_grpo.pages.check_page import CheckPage
from mm_grpo.pages.page import render
from mm_grpo.pages.report import Report
from mm_grpo.preflight.check import check_config
from mm_grpo.processors.base import load_processor
from mm_grpo.rewards import resolve_entry
from mm_grpo.run.folder import RunFolder
from mm_grpo.run.paths import EVALUATION
from mm_grpo.run.rollout_log import add_to_rollouts
from mm_grpo.types import EnginePrompt, Group, Turn

pytestmark = [needs_browser, pytest.mark.slow]
PINK, BLUE, GREEN = (255, 45, 149), (0, 168, 240), (0, 128, 64)

# A page that looks into another, which stands in a frame of it, and writes where a test reads it what SCRIPT is.
FRAME = """<!doctype html><iframe id="f" style="width: WIDTHpx; height: 900px; border: 0" src="/page.html"></iframe>
<script>onload = () => {
  const frame = document.getElementById("f"), page = frame.contentDocument, view = frame.contentWindow;
  const find = (id) => page.getElementById(id), all = (what) => [...page.querySelectorAll(what)];
  const words = (what) => all(what).map((e) => e.textContent).join("; ");
  const send = (where, event) => where.dispatchEvent(event);
  const fill = (id, text) => { find(id).value = text; send(find(id), new view.Event("input", { bubbles: true })); };
  const click = (id) => find(id).click();
  const status = () => find("status").textContent;
  document.body.dataset.found = [SCRIPT].join("|");
}</script>"""


@pytest.fixture
def site() -> Iterator[Site]:
    with serving() as found:
        yield found


def look(site: Site, tmp_path: Path, page: Path, script: str, *options: str, width: int = 1000) -> list[str]:
    """What `script`, a list of JavaScript values, is on the page."""
    frame = FRAME.replace("WIDTH", str(width)).replace("SCRIPT", script)
    site.pages = {"/page.html": page.read_text(encoding="utf-8"), "/frame.html": frame}
    return found_by(
        browse(tmp_path, f"{site.address}/frame.html", "--dump-dom", "--window-size=1200,1000", *options)
    )


def boxed(slot: int, texts: list[str], image: Image.Image, box: list[int], uid: str = "") -> Group:
    """A group whose rewards read a box; the dataset's image is twice as large as what the model saw."""
    one = group(slot, tuple(i / 4 for i in range(len(texts))), uid or f"object {slot}")
    large = image.resize((image.width * 2, image.height * 2))
    sample = replace(one.prompt.sample, images=(large,), columns={"box": box})
    prompt = replace(
        one.prompt, sample=sample, engine_prompt=replace(one.prompt.engine_prompt, media=(image,))
    )
    completions = tuple(replace(c, text=t) for c, t in zip(one.completions, texts, strict=True))
    return replace(
        one, prompt=prompt, completions=completions, parts={"iou": [i / 4 for i in range(len(texts))]}
    )


def sight_of(pieces: list[str], nats: list[float]) -> dict[str, Any]:
    return {"sight": {"nats": round(sum(nats), 4), "tokens": nats, "pieces": pieces, "other": "rows:1"}}


@pytest.fixture
def report(tmp_path: Path, site: Site) -> Path:
    """Three steps of twelve groups: boxes, thinking, a conversation, evaluation rows, and hostile texts everywhere."""
    ask = (
        f"<script>document.title='run'</script><img src='{site.address}/a.png' onerror=document.title='run'>"
    )
    evil = f"</script></pre></title>{ask}'\"" + "w" * 3000 + "\u202e\u2028\x1b[31m"
    folder = controlled(tmp_path / "run", source=evil)
    specs, image = [resolve_entry("iou")], Image.new("RGB", (240, 160), GREEN)
    for step in (1, 2, 3):
        texts = ["<think>" + "because " * 40 + "</think>[20, 20, 120, 100]", "[40, 40, 200, 140]", "nowhere"]
        groups = [boxed(slot, texts, image, [100, 80, 300, 240]) for slot in range(12)]
        groups[5] = boxed(5, [evil, "[1, 1, 9, 9]", evil], image, [100, 80, 300, 240], uid=evil)
        shown = Turn("tool", evil, 1, None, "zoom", {evil: evil}, (image,))
        turns = (Turn("assistant", "look", 1, seed=1), shown)
        talked = replace(groups[2].completions[0], turns=turns, masked=evil)
        own: dict[str, Any] = {"turn_rewards": ((0.5,), (), ()), "turn_advantages": ((-0.5,), (), ())}
        groups[2] = replace(groups[2], completions=(talked, *groups[2].completions[1:]), **own)
        folder.write_rollouts(step, groups, specs)
        sight = {(0, 0, 1): sight_of(["[40", ", 40, 200", ", 140]", ""], [0.2, -0.3, 3.0, 0.0])}
        pieces = [evil[i : i + 9] for i in range(0, len(evil), 9)]
        sight[5, 0, 0] = sight_of(pieces, [float(i % 6) - 2 for i in range(len(pieces))])
        add_to_rollouts(folder.paths, step, sight)
    folder.on_log(21, {f"rewards/{evil}/mean": 0.5, "rewards/b/mean": 0.25, "reward": 1.0, "entropy": None})
    folder.append_event(10, evil, "warn", evil)
    environment = json.loads(folder.paths.environment.read_text()) | {"gpu": evil, evil: {evil: evil}}
    folder.paths.environment.write_text(json.dumps(environment))
    folder.paths.config.write_text(f"run:\n  eval_blind: removed\n# {json.dumps(evil)}\n")
    for step, text in ((0, "before it"), (3, evil)):
        same = {"step": step, "completion": text, "reward": step / 3, "set": "a"}
        same |= {"images": [], "messages": [], "columns": {}}
        rows = [{**same, "uid": f"e:{i}", "blind": blind} for i in range(4) for blind in (None, "shuffled")]
        folder.paths.rollout_file(step, EVALUATION).write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    return Report([folder.paths]).write(tmp_path / "report.html")


@pytest.fixture
def check(page_config: Callable[..., GRPOConfig], site: Site, tmp_path: Path) -> Path:
    """The page of a check whose rows hold hostile texts, which ask for files of `site`."""
    check_config(page_config(site.address), page=str(tmp_path / "check.html"))
    return tmp_path / "check.html"


def pixels_of(tmp_path: Path, page: Path, size: str) -> tuple[Any, list[tuple[int, int]]]:
    """A screenshot's pixels, and where those are that have the picture's colour."""
    shot = tmp_path / "shot.png"
    browse(tmp_path, page.as_uri(), f"--screenshot={shot}", f"--window-size={size}", LIGHT)
    with Image.open(shot) as image:
        pixels, (width, height) = image.convert("RGB").load(), image.size
    assert pixels is not None
    return pixels, [(x, y) for y in range(height) for x in range(width) if pixels[x, y] == GREEN]


def test_boxes_of_a_run_are_drawn_at_their_pixels(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run").start("model:\n  path: m\n")
    green = Image.new("RGB", (240, 160), GREEN)  # as wide as the page's column: one pixel is one pixel
    one = boxed(0, ["[150, 20, 230, 60]"], green, [40, 80, 240, 240])
    folder.write_rollouts(1, [one], [resolve_entry("iou")])
    pixels, spots = pixels_of(tmp_path, Report([folder.paths]).write(tmp_path / "page.html"), "1200,900")
    (left, top), (right, bottom) = (
        tuple(end(spot[i] for spot in spots) for i in (0, 1)) for end in (min, max)
    )
    # a border of 1 pixel lies over each edge of a picture of 240 × 160, which is scaled to the 238 inside it
    assert (right - left + 1, bottom - top + 1) in ((238, 158), (238, 159)), (left, right, top, bottom)

    def at(x: float, y: float) -> tuple[int, int, int]:
        found: tuple[int, int, int] = pixels[round(left + x * 238 / 240), round(top + y * 238 / 240)]
        return found

    # gold: (40, 80, 240, 240) of the dataset's 480 × 320 is (20, 40, 120, 120) of what the model saw
    for x in range(26, 116, 10):
        assert at(x, 40) == at(x, 120) == PINK, x
    for y in range(46, 116, 10):
        assert at(20, y) == at(120, y) == PINK, y
    for x in range(156, 226, 10):  # predicted: pixels of the image as the model saw it
        assert BLUE in (at(x, 19.5), at(x, 20.5)) and BLUE in (at(x, 59.5), at(x, 60.5)), x
    assert at(70, 80) == at(190, 40) == at(140, 100) == GREEN


def test_the_page_of_a_run_draws_everything_and_filters(report: Path, site: Site, tmp_path: Path) -> None:
    drawn = """
      words(".lead").slice(0, 17), words(".card .value"), words(".card .note"), words("figcaption > span:first-child"),
      all("figure")[1].querySelector("polyline.s2").getAttribute("points"), words("figure:nth-child(2) .key"),
      all("circle.expected title")[1].textContent,
      all("figure").map((e) => e.querySelectorAll("line.event").length).join(""), words(".charts ~ p.soft").slice(-47),
      all("#groups svg.picture").length, all("#pictures image").length,
      all(".completion")[0].querySelector(".text:not(details .text)").textContent, all("summary")[1].textContent,
      all(".completion")[1].querySelector(".scores").textContent,
      [...all(".completion")[1].querySelectorAll(".text .sight")].map((e) => `${e.className} ${e.title} ${e.textContent}`).join(";"),
      all("p.sights i.sight").length, words("article:nth-child(3) .turn .scores"), all("article")[2].querySelector(".turn .scores").className,
      all("#groups article")[0].querySelectorAll("svg.picture .overlay.gold").length,
      all("#groups article")[0].querySelectorAll("svg.picture .overlay.predicted").length,
      (() => { const chart = all("figure svg")[2], box = chart.getBoundingClientRect();
        send(chart, new view.PointerEvent("pointermove", { clientX: box.left + box.width * 0.5, clientY: box.top + 20 }));
        return all(".readout")[2].textContent; })(),
      all("[data-of='1'].chosen").length, (send(all(".completion")[1], new view.PointerEvent("pointerenter")), all("[data-of='1'].chosen").length)"""
    filters = """
      status(), all(".group").length,
      (fill("f-step", "2"), status()), (fill("f-step", "2-3"), status()), (fill("f-step", ""), status()),
      (fill("f-low", "0.5"), fill("f-high", "0.5"), status()), (fill("f-low", "0.6"), status()),
      (find("filters").reset(), fill("f-low", ""), fill("f-high", ""), fill("f-uid", "OBJECT 7"), words(".group-head")),
      (fill("f-uid", ""), fill("f-text", "ZOOM"), words(".group-head")),
      (fill("f-text", "nothing at all"), status()), (fill("f-text", ""), status()),
      (click("next"), status()), (click("previous"), status()),
      (fill("f-kind", "evaluations"), status()), all(".versus h3").slice(0, 4).map((e) => e.textContent).join(),
      all(".versus .text")[0].textContent"""
    found = look(site, tmp_path, report, f"{drawn}, {filters}")
    assert found[:23] == [
        "21 steps so far; ", "75.0%; +50.0 points; 0.625; 21", (
            "95 % interval 62.5% to 87.5%; from 25.0%, +50.0 points; 95 % interval +40.0 to +60.0; "
            "images removed: 25.0%; from +5.0 points; mean of the last 4 steps, from 0.250; 1.0 s each"
        ),
        "Reward mean reward; Evaluation accuracy share right; Sight nats per completion; Reward parts mean score; "
        "Step time by phase seconds",
        "58,154 252,145 446,145", "a; blind; expected a", "expected a, step 20: 0.9",
        "11101", "0 throughout, and not drawn: kl to the reference."[-47:],
        "11", "1",  # ten groups and the image of a turn: one picture
        "[20, 20, 120, 100]", "thinking, 335 characters",
        "0.25iou 0.25stop, 2 tokenssight 2.9 nats",
        "sight g1 +0.20 nats [40;sight n1 -0.30 nats , 40, 200;sight g4 +3.00 nats , 140]",
        "6", "0.5-0.50", "scores down a3",
        "1", "2", "step 10: 1",
        "0", "2",
    ]  # fmt: skip
    assert found[23:] == [
        "1 to 10 of 36", "10",
        "1 to 10 of 12", "1 to 10 of 24", "1 to 10 of 36",
        "1 to 10 of 36", "nothing fits these filters",
        "; ".join(f"step {s}slot 7row rows:7object 7" for s in (1, 2, 3)),
        "; ".join(f"step {s}slot 2row rows:2object 2" for s in (1, 2, 3)),
        "nothing fits these filters", "1 to 10 of 36",
        "11 to 20 of 36", "1 to 10 of 36",
        "1 to 4 of 4", "step 0,step 3,step 0,step 3", "before it",
    ]  # fmt: skip


def test_the_page_of_two_runs_draws_both(site: Site, tmp_path: Path) -> None:
    """A colour is a run, the rest of many curves is folded, and an empty completion says so."""
    folders = [finished_run(tmp_path / name, steps=3) for name in ("one", "two")]
    for folder in folders:
        folder.on_log(4, {"reward": 1.0, "completions/mean_length": 4.0, "completions/max_length": 6.0})
    folders[1].write_rollouts(4, [group(0, (1.0, 0.0), text="")])
    data, pictures = Report([folder.paths for folder in folders]).gather()
    page = tmp_path / "page.html"
    page.write_text(render("both", data, pictures), encoding="utf-8")
    script = """words("nav.contents a"), all("nav.contents a").every((a) => find(a.getAttribute("href").slice(1)).tagName === "H2"),
      all(".charts")[0].children.length, all("details.more figure").length > 1, all("details.more[open]").length,
      all("figure .key").filter((key) => /mean|max/.test(key.textContent)).map((key) => `${key.textContent} ${key.firstChild.className.trim()}`).join(),
      words("header h3"), all("header h3 i").map((i) => i.className).join(), all(".message").some((m) => m.textContent.includes("[image]")),
      words(".card .value"), all("td").map((e) => e.textContent).slice(0, 5).join("; "),
      (fill("f-step", "4"), words(".text.soft"))"""
    assert look(site, tmp_path, page, script) == [
        "Curves; Evaluation; Rollouts; one; two", "true", "6", "true", "0",
        "one mean s1,one max s1 dashed,two mean s2,two max s2 dashed", "one; two", "s1,s2", "false",
        "75.0%; 0.300; 4; 2 min; 75.0%; 0.300; 4; 2 min", "one: heldout; 12.5%; 75.0%; –; +62.5 points", "(empty); (empty)",
    ]  # fmt: skip


VIDEOS = """all(".strip").map((strip) => strip.children.length).join(), words(".strip span"),
  all(".strip").map((strip) => strip.getAttribute("aria-label")).join(), all(".strip svg.picture").length,
  all(".strip")[0].scrollWidth > all(".strip")[0].clientWidth, page.documentElement.scrollWidth"""


def test_videos_are_strips_of_frames_with_their_times(
    models: dict[str, Path], site: Site, tmp_path: Path
) -> None:
    """On the page of a run, also in a tool's answer, and on that of a check; a strip scrolls, the page does not."""
    folder, one = RunFolder(tmp_path / "run").start("model:\n  path: m\n"), group(0, (1.0, 0.0))
    video, clip = tiny.video(1), tiny.video(2, 2, fps=3.0)
    turn = Turn("tool", "", 1, name="clip", arguments={"end": 2}, videos=(clip,))
    prompt = replace(one.prompt, engine_prompt=EnginePrompt((1,), (video,)))
    talk = replace(one.completions[0], turns=(turn,))
    folder.write_rollouts(1, [replace(one, prompt=prompt, completions=(talk, one.completions[1]))])
    report = Report([folder.paths]).write(tmp_path / "report.html")
    times = "1 s; 1.5 s; 2 s; 2.5 s; 1 s; 1.333 s"
    script = f'{VIDEOS}, words(".turn .text"), words(".message")'
    assert look(site, tmp_path, report, script, width=360) == [
        "4,2", times, "video 1 of rows:0red,video 1 of clip(end=2)", "6", "true", "360", "", "[image]\nWhat colour? red",
    ]  # fmt: skip
    processor = load_processor(str(models["qwen2_5_vl"]))
    page = CheckPage(str(tmp_path / "check.html"), processor, [], lambda spec, prompt: None)
    page.add("train", "train:0", processor.prompt(tiny.sample("r", videos=(video, clip))))
    page.write()
    assert look(site, tmp_path, tmp_path / "check.html", f'{VIDEOS}, words(".checked > .soft"), words(".legend").trim().slice(-20)', width=360) == [
        "4,2", times, "video 1 of train:0,video 2 of train:0", "6", "true", "360",
        "4 frames of 84 × 84 pixels; 2 frames of 84 × 84 pixels", "images and videos 27",
    ]  # fmt: skip


PHONE = """page.documentElement.scrollWidth, all("main *").filter((e) => e.getBoundingClientRect().right > 360.5
    && !e.closest("pre, .picture, .scroll")).length, page.title, all("script:not([type])").length,
  all("img, link, iframe").length, page.body.textContent.includes(SITE), page.body.textContent.includes("\\u202e")"""


def test_the_evaluations_of_a_run_fit_a_phone(site: Site, tmp_path: Path) -> None:
    """Before, after, interval and change are on a screen of 360 pixels, without scrolling."""
    report = Report([finished_run(tmp_path / "run", steps=3).paths]).write(tmp_path / "report.html")
    script = """all("table.evaluations tr:nth-child(2) .num").length,
      all("table.evaluations *").filter((e) => e.getBoundingClientRect().right > 346).length"""
    assert look(site, tmp_path, report, script, width=360) == ["4", "0"]


def test_the_page_of_a_check_fits_a_phone(check: Path, site: Site, tmp_path: Path) -> None:
    """A screen of 360 pixels shows it whole, and it asks for nothing."""
    script = """words("h2"), words("h2 + p, h2 + p + p"), words("h3.bad"), words("ul b"),
      words(".checked:nth-of-type(1) .legend").trim(), all("svg.picture").length, words(".checked:nth-of-type(1) .soft"),
      all(".checked pre")[0].querySelectorAll("b").length, words(".checked:nth-of-type(1) dt")"""
    looks = PHONE.replace("SITE", json.dumps(site.address))
    shown = look(site, tmp_path, check, f"{looks}, {script}", LIGHT, width=360)
    title = re.findall("<title>(.*?)</title>", check.read_text(encoding="utf-8"))[0]
    assert shown[:7] == ["360", "0", title, "1", "0", "true", "false"]
    assert set(site.asked) - {"/favicon.ico"} == {"/frame.html", "/page.html"}
    found = shown[7:]
    assert found[0] == "train; eval"
    assert re.match(r"3 rows can be used.* The longest is train.jsonl:3.;", found[1])
    assert found[2:4] == ["1 row cannot be used", "train.jsonl:4"] and found[5] == "6"
    assert "196 × 112 pixels, 200 × 100 in the dataset; " in found[6]
    assert "iou, giou: [49, 28, 147, 84];  clicking: [0, 0, 39.2, 0, 0, 56]" in found[6]
    assert found[7] == "6" and found[8].startswith(
        "right answer, iou; right answer, giou; right answer, clicking; box"
    )


def test_the_policy_stands_even_where_a_text_were_markup(report: Path, site: Site, tmp_path: Path) -> None:
    style = (
        f"<style>@import url({site.address}/b.css);</style><link rel=stylesheet href='{site.address}/c.css'>"
    )
    loads = f"<script src='{site.address}/d.js'></script><iframe src='{site.address}/e.html'></iframe>"
    run = (
        f"<script>document.title='run'</script><img src='{site.address}/a.png' onerror=document.title='run'>"
    )
    html = report.read_text(encoding="utf-8").replace("<main>", f"<main>{run}{style}{loads}")
    site.pages = {"/page.html": html}
    dom = browse(tmp_path, f"{site.address}/page.html", "--dump-dom")
    assert "<title>run – mm_grpo" in dom and run[:8] in dom
    assert set(site.asked) - {"/favicon.ico"} == {"/page.html"}
