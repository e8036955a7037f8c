"""report.html: made from the folder alone, complete, and inert whatever a run wrote."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mm_grpo.run.folder import RunFolder
from mm_grpo.run.paths import RunPaths
from mm_grpo.run.report import (
    CURVES,
    describe_turn,
    draw,
    duration,
    gather,
    message_text,
    pick_groups,
    tiles,
    write_report,
)
from mm_grpo.types import Completion, EnginePrompt, Group, Prompt, Sample, Turn

EVIL = "</td><script>alert(1)</script><img src=x onerror=alert(2)>\"'"


def group(
    slot: int, rewards: tuple[float | None, ...], text: str = "red", side: int = 8, parts: Any = None
) -> Group:
    content = [{"type": "image"}, {"type": "text", "text": f"What colour? {text}"}]
    images = (Image.new("RGB", (side, side // 2), (slot, 0, 0)),)
    sample = Sample(
        f"rows:{slot}{text}", [{"role": "user", "content": content}], images, (), {"answer": text, "n": 3}
    )
    prompt = Prompt(sample, (1,), EnginePrompt((1,), images), None, {})  # type: ignore[arg-type]
    completions = tuple(Completion((1, 2), (-1.0, -1.0), text, "stop", g) for g in range(len(rewards)))
    known = [r for r in rewards if r is not None]
    mean = sum(known) / len(known) if known else 0.0
    advantages = tuple(0.0 if r is None else r - mean for r in rewards)
    return Group(slot, prompt, completions, rewards, advantages, parts=parts or {})


def run(path: Path, text: str = "red") -> RunFolder:
    folder = RunFolder.create(path, f"model:\n  path: {text}\n")
    for step in range(1, 31):
        row: dict[str, Any] = {"reward": step / 30, "grad_norm": 1.0, "step_time": 2.0, "entropy": 0.5}
        row |= {f"rewards/{text}/mean": 0.5, "rewards/format/mean": 1.0, "kl": None}
        if step % 10 == 0:
            row["eval/heldout/accuracy"] = step / 40
        folder.metrics.append(step, row)
        both = (
            group(0, (1.0, 0.0), text, parts={text: [1.0, 0.0]}),
            group(1, (None, 1.0), text, parts={text: [None, 1.0]}),
        )
        folder.write_rollouts(step, both)
    scores = {"before": 0.125, "after": 0.75}
    folder.write_summary(
        {
            "accuracy_before": 0.125,
            "accuracy_after": 0.75,
            "seconds": 125,
            "steps": 30,
            "eval": {"heldout": scores},
        }
    )
    return folder


class Tags(HTMLParser):
    """Every tag and attribute of a page, as a browser would see them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_holds_the_run(tmp_path: Path) -> None:
    page = run(tmp_path / "shapes").write_report().read_text()
    assert "<title>shapes – mm_grpo</title>" in page
    assert "30 steps, finished" in page
    assert "from 12.5%, +62.5 points" in page and ">75.0%<" in page
    for title in ("Reward", "Evaluation accuracy", "Entropy", "Gradient norm", "Step time", "Reward parts"):
        assert re.search(rf"<figcaption>{title}\s", page), title
    assert "KL to the reference" not in page  # never measured
    assert [int(s) for s in re.findall(r"<h3>Step (\d+)</h3>", page)] == [1, 16, 30]
    assert "path: red" in page and "torch 2." in page


def test_the_page_is_well_formed_and_needs_nothing_else(tmp_path: Path) -> None:
    tags = Tags(run(tmp_path).write_report().read_text())
    assert tags.open == []
    sources = [a["src"] for tag, a in tags.tags if tag == "img"]
    assert len(sources) == 6 and all(s and s.startswith("data:image/png;base64,") for s in sources)
    assert not [tag for tag, a in tags.tags if tag in ("script", "link", "iframe") or "href" in a]


def test_what_a_run_wrote_is_inert(tmp_path: Path) -> None:
    page = run(tmp_path / "a", EVIL).write_report().read_text()
    tags = Tags(page)
    assert tags.open == []
    assert {tag for tag, _ in tags.tags} & {"script", "iframe", "object"} == set()
    assert [a for _, a in tags.tags if any(name.startswith("on") for name in a)] == []
    assert len([1 for tag, _ in tags.tags if tag == "img"]) == 6
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "default-src 'none'" in page


def test_a_conversation_shows_its_calls_and_images(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "x: 1\n")
    one = group(0, (1.0, 0.0), "red")
    cut = Image.new("RGB", (6, 4), (9, 9, 9))
    turns = (
        Turn("assistant", f"call {EVIL}", 3, seed=1),
        Turn("tool", "", 5, None, "zoom", {"bbox": [0, 1, 2, 3], "why": EVIL}, (cut,)),
        Turn("tool", f"error: {EVIL}", 0, None, EVIL, {}, (), "unknown_tool"),
        Turn("assistant", "red", 1, seed=2),
    )
    talked = replace(one.completions[0], turns=turns, masked=f"zoom: {EVIL}")
    folder.write_rollouts(1, [replace(one, completions=(talked, one.completions[1]))])

    folder.metrics.append(1, {"reward": 0.5, "tools/call_frequency": 1.5})

    first, second = gather(folder.paths)["rollouts"][0]["groups"][0]["completions"]
    assert [turn["head"] for turn in first["turns"]] == [
        "assistant",
        f"zoom(bbox=[0, 1, 2, 3], why={EVIL})",
        f"{EVIL}()",
        "assistant",
    ]
    (uri,) = first["turns"][1]["images"]
    with Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))) as image:
        assert image.size == (6, 4) and image.getpixel((0, 0)) == (9, 9, 9)
    assert first["turns"][2]["fault"] == "unknown_tool" and second["turns"] == []

    page = folder.write_report().read_text()
    assert "<figcaption>Calls of tools" in page
    tags = Tags(page)
    assert tags.open == [] and len([1 for tag, _ in tags.tags if tag == "img"]) == 2
    assert {tag for tag, _ in tags.tags} & {"script", "iframe", "object"} == set()
    assert [a for _, a in tags.tags if any(name.startswith("on") for name in a)] == []
    assert (
        page.count("zoom(bbox=[0, 1, 2, 3], why=&lt;/td&gt;&lt;script&gt;") == 2
    )  # above the text, and of the image
    assert (
        "not learned from: zoom: &lt;/td&gt;" in page and "(), unknown_tool</span>error: &lt;/td&gt;" in page
    )


def test_pictures_of_turns_are_the_run_s_own(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "x: 1\n")
    Image.new("RGB", (2, 2)).save(tmp_path / "secret.png")
    turn = {"role": "tool", "text": "", "name": "zoom", "arguments": {}, "images": ["../../../secret.png"]}
    assert describe_turn(folder.paths, turn)["images"] == []


def test_a_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    page = RunFolder.create(tmp_path, "x: 1\n").write_report().read_text()
    assert "no step yet" in page and "<svg" not in page
    Tags(page)


def test_a_run_under_way_has_a_page(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "x: 1\n")
    folder.metrics.append(1, {"reward": 0.5})
    assert "1 step so far" in folder.write_report().read_text()


def test_only_pictures_of_the_run_are_read(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "x: 1\n")
    Image.new("RGB", (2, 2)).save(tmp_path / "secret.png")
    folder.write_rollouts(1, [group(0, (1.0, 0.0))])
    file = folder.paths.rollout_file(1)
    file.write_text(re.sub(r'"images": \["[^"]*"\]', '"images": ["../../../secret.png"]', file.read_text()))
    (shown,) = gather(folder.paths)["rollouts"][0]["groups"]
    assert shown["images"] == []


def test_a_large_picture_is_made_smaller(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "x: 1\n")
    folder.write_rollouts(1, [group(0, (1.0,), side=1024)])
    (uri,) = gather(folder.paths)["rollouts"][0]["groups"][0]["images"]
    with Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))) as image:
        assert image.size == (512, 256)


def test_the_groups_that_differ_most_are_shown(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "x: 1\n")
    rewards: list[tuple[float | None, ...]] = [(0.5, 0.5), (0.0, 1.0), (None, None), (0.2, 0.6), (0.1, 0.9)]
    folder.write_rollouts(1, [group(i, r) for i, r in enumerate(rewards)])
    groups = gather(folder.paths)["rollouts"][0]["groups"]
    assert [g["slot"] for g in groups] == [1, 3, 4]
    first = groups[0]
    assert [(c["tone"], c["signed"], c["strength"]) for c in first["completions"]] == [
        ("down", "-0.50", 1.0),
        ("up", "+0.50", 1.0),
    ]
    assert first["gold"] == {"answer": "red"}
    assert first["messages"] == [{"role": "user", "text": "[image] What colour? red"}]


def test_completions_beyond_the_eighth_are_counted(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "x: 1\n")
    folder.write_rollouts(1, [group(0, tuple(float(g) for g in range(10)))])
    (shown,) = gather(folder.paths)["rollouts"][0]["groups"]
    assert (len(shown["completions"]), shown["left_out"]) == (8, 2)
    assert "and 2 more in the rollout log" in write_report(folder.paths).read_text()


def test_no_rows_no_groups(tmp_path: Path) -> None:
    assert pick_groups(RunPaths(tmp_path), []) == []


def test_the_accuracy_before_the_run_comes_from_the_summary() -> None:
    curve = next(c for c in CURVES if c.from_summary)
    rows = [{"step": 10, "eval/heldout/accuracy": 0.5}, {"step": 20, "eval/heldout/accuracy": 0.75}]
    summary = {"eval": {"heldout": {"before": 0.25, "after": 0.75}}}
    alone, whole = draw(curve, rows, None), draw(curve, rows, summary)
    assert alone and alone["svg"].count("<circle") == 2
    assert whole and whole["svg"].count("<circle") == 3
    assert "heldout, step 0: 0.25" in whole["svg"]


def test_the_reward_of_a_long_run_is_smoothed() -> None:
    curve = CURVES[0]
    chart = draw(curve, [{"step": s, "reward": float(s)} for s in range(1, 41)], None)
    assert chart and [line.label for line in chart["legend"]] == ["each step", "mean of 5 steps"]
    short = draw(curve, [{"step": s, "reward": float(s)} for s in range(1, 11)], None)
    assert short and short["legend"] == []


def test_the_tiles_are_worked_out() -> None:
    rows = [{"step": s, "reward": s / 10, "step_time": 2.0} for s in range(1, 21)]
    summary = {"accuracy_before": None, "accuracy_after": 0.5, "seconds": 3725, "steps": 20, "eval": {}}
    assert tiles(rows, summary) == [
        {"word": "accuracy", "value": "50.0%", "note": ""},
        {"word": "reward", "value": "1.550", "note": "mean of the last 10 steps, from 0.100"},
        {"word": "steps", "value": "20", "note": "2.0 s each"},
        {"word": "time", "value": "1 h 2 min", "note": "from start to end"},
    ]
    assert tiles([], None) == []


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(59.6, "60 s"), (125, "2 min"), (3599, "1 h 0 min"), (3725, "1 h 2 min")],
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_a_message_is_text_whatever_its_layout() -> None:
    assert message_text("plain") == "plain"
    assert (
        message_text([{"type": "image"}, {"type": "text", "text": "a"}, {"type": "video"}])
        == "[image] a[video] "
    )
