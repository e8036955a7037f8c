"""What report.html shows of the rollouts: chosen by a budget, described, and read tolerantly."""

from __future__ import annotations

import base64
import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.runs import group
from PIL import Image

from mm_grpo.run.folder import RunFolder
from mm_grpo.run.gallery import (
    WHOLE,
    Budget,
    Pictures,
    describe_group,
    describe_turn,
    gather_gallery,
    message_text,
    read_rows,
    split_thinking,
    spread_order,
)
from mm_grpo.run.paths import RunPaths
from mm_grpo.types import Group, Turn

EVIL = "</td><script>alert(1)</script>"


def gathered(folder: RunFolder, budget: Budget = WHOLE) -> tuple[list[dict[str, Any]], Pictures]:
    pictures = Pictures(budget.images)
    return gather_gallery(folder.paths, budget, pictures).groups, pictures


def logged(path: Path, *steps: list[Group]) -> RunFolder:
    folder = RunFolder.create(path, "x: 1\n")
    for step, groups in enumerate(steps, start=1):
        folder.write_rollouts(step, groups)
    return folder


def decoded(picture: dict[str, Any]) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(picture["uri"].partition(",")[2])))


def test_a_pipe_is_no_log(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "step-000001.jsonl")
    row = b'{"step": 1, "uid": "train:0"}\n'
    end = os.open(
        tmp_path / "step-000001.jsonl", os.O_RDWR | os.O_NONBLOCK
    )  # so that nobody waits for a writer
    os.write(end, row)
    assert read_rows(tmp_path / "step-000001.jsonl", len(row)) == ([], 0)
    os.close(end)


def test_steps_are_taken_from_both_ends_then_between() -> None:
    assert spread_order([]) == [] and spread_order([7]) == [7]
    order = spread_order(list(range(1, 18)))
    assert order[:5] == [17, 1, 9, 5, 13] and sorted(order) == list(range(1, 18))


def test_a_group_as_the_page_holds_it(tmp_path: Path) -> None:
    rewards: list[tuple[float | None, ...]] = [(0.0, 1.0), (None, None)]
    (first, second), pictures = gathered(logged(tmp_path, [group(i, r) for i, r in enumerate(rewards)]))
    assert (first["step"], first["slot"], first["run"], second["slot"]) == (1, 0, 0, 1)
    assert [(c["tone"], c["signed"], c["strength"]) for c in first["completions"]] == [
        ("down", "-0.50", 3),
        ("up", "+0.50", 3),
    ]
    assert first["answers"] == {"answer": "red"} and first["gold"] == []
    assert first["messages"] == [{"role": "user", "text": "[image] What colour? red"}]
    (name,) = first["images"]
    assert decoded(pictures.held[name]).size == (8, 4)


def test_a_large_picture_is_made_smaller_and_keeps_its_own_pixels(tmp_path: Path) -> None:
    (shown,), pictures = gathered(logged(tmp_path, [group(0, (1.0,), side=1024)]))
    made = pictures.held[shown["images"][0]]
    assert decoded(made).size == (512, 256) and (made["width"], made["height"]) == (1024, 512)
    noise = Image.effect_noise((500, 500), 80).convert("RGB")
    one = group(0, (1.0,))
    prompt = replace(one.prompt, engine_prompt=replace(one.prompt.engine_prompt, images=(noise,)))
    (shown,), pictures = gathered(logged(tmp_path / "b", [replace(one, prompt=prompt)]))
    assert pictures.held[shown["images"][0]]["uri"].startswith("data:image/jpeg;base64,")


def test_an_image_is_held_once(tmp_path: Path) -> None:
    groups, pictures = gathered(logged(tmp_path, *[[group(0, (1.0, 0.0))] for _ in range(5)]))
    assert len(groups) == 5 and len(pictures.held) == 1


def test_the_budget_of_texts_takes_both_ends_and_the_groups_that_differ_most(tmp_path: Path) -> None:
    rewards: list[tuple[float | None, ...]] = [(0.5, 0.5), (0.0, 1.0), (None, None), (0.2, 0.6)]
    steps = [[group(i, r) for i, r in enumerate(rewards)] for _ in range(20)]
    folder = logged(tmp_path, *steps)
    size = len(json.dumps(gathered(folder)[0][0]))
    budget = Budget(int(size * 2.5 * 8), 10**6, 10**7)  # two groups of each of 8 steps, and a bit
    found = gather_gallery(folder.paths, budget, Pictures(budget.images))
    assert {g["slot"] for g in found.groups} == {1, 3}
    steps_shown = sorted({g["step"] for g in found.groups})
    assert steps_shown[0] == 1 and steps_shown[-1] == 20 and 8 <= len(steps_shown) <= 11
    assert (found.steps, found.logged) == (len(steps_shown), 20)
    assert found.left_out == 4 * found.steps - len(found.groups)
    assert sum(len(json.dumps(g)) for g in found.groups) <= budget.texts


def test_the_budget_of_images_leaves_out_groups_whose_images_do_not_fit(tmp_path: Path) -> None:
    folder = logged(tmp_path, [group(i, (0.0, i / 10)) for i in range(10)])
    (_, one) = gathered(folder)
    size = len(next(iter(one.held.values()))["uri"])
    groups, pictures = gathered(folder, Budget(10**6, 3 * size + size // 2, 10**6))
    assert [g["slot"] for g in groups] == [7, 8, 9] and len(pictures.held) == 3
    assert pictures.bytes <= 3.5 * size


def test_reading_is_bounded(tmp_path: Path) -> None:
    folder = logged(tmp_path, *[[group(i, (0.0, 1.0)) for i in range(20)] for _ in range(30)])
    on_disk = sum(file.stat().st_size for file in folder.paths.rollouts.glob("*.jsonl"))
    before = int(Path("/proc/thread-self/io").read_text().split()[1])
    groups, _ = gathered(folder, Budget(10**6, 10**6, on_disk // 10))
    read = int(Path("/proc/thread-self/io").read_text().split()[1]) - before
    assert groups and read < on_disk // 5  # and the images


def test_completions_beyond_the_sixteenth_are_counted(tmp_path: Path) -> None:
    (shown,), _ = gathered(logged(tmp_path, [group(0, tuple(float(g) for g in range(20)))]))
    assert (len(shown["completions"]), shown["left_out"]) == (16, 4)


def test_only_pictures_of_the_run_are_read(tmp_path: Path) -> None:
    folder = logged(tmp_path / "run", [group(0, (1.0, 0.0))])
    Image.new("RGB", (2, 2)).save(tmp_path / "secret.png")
    file = folder.paths.rollout_file(1)
    file.write_text(re.sub(r'"images": \["[^"]*"\]', '"images": ["../../../secret.png"]', file.read_text()))
    (shown,), pictures = gathered(folder)
    assert shown["images"] == [] and pictures.held == {}
    turn = {"role": "tool", "text": "", "name": "zoom", "arguments": {}, "images": ["../../../secret.png", 3]}
    assert describe_turn(turn)["images"] == []


def test_what_is_no_picture_is_left_out(tmp_path: Path) -> None:
    folder = logged(tmp_path, [group(0, (1.0, 0.0))])
    (image,) = folder.paths.images.iterdir()
    image.write_bytes(b"no picture")
    (shown,), pictures = gathered(folder)
    assert shown["images"] == [image.name] and pictures.held == {}


def test_a_conversation_shows_its_calls_and_images(tmp_path: Path) -> None:
    one = group(0, (1.0, 0.0), "red")
    cut = Image.new("RGB", (6, 4), (9, 9, 9))
    turns = (
        Turn("assistant", f"call {EVIL}", 3, seed=1),
        Turn("tool", "", 5, None, "zoom", {"bbox": [0, 1, 2, 3], "why": EVIL}, (cut,)),
        Turn("tool", f"error: {EVIL}", 0, None, EVIL, {}, (), "unknown_tool"),
        Turn("assistant", "red", 1, seed=2),
    )
    talked = replace(one.completions[0], turns=turns, masked=f"zoom: {EVIL}")
    folder = logged(tmp_path, [replace(one, completions=(talked, one.completions[1]))])
    (shown,), pictures = gathered(folder)
    first, second = shown["completions"]
    assert [turn["head"] for turn in first["turns"]] == [
        "assistant",
        f"zoom(bbox=[0, 1, 2, 3], why={EVIL})",
        f"{EVIL}(), unknown_tool",
        "assistant",
    ]
    (name,) = first["turns"][1]["images"]
    image = decoded(pictures.held[name])
    assert image.size == (6, 4) and image.getpixel((0, 0)) == (9, 9, 9)
    assert first["masked"] == f"zoom: {EVIL}" and "turns" not in second
    page = folder.write_report()
    assert page is not None
    html = page.read_text()
    assert html.count('href="#p-') == 2 and html.count("data:image/png;base64,") == 2
    assert "not learned from: zoom: &lt;/td&gt;" in html and "(), unknown_tool</span>" in html


LONG = "word " * 600


@pytest.mark.parametrize(
    ("text", "opened", "parts"),
    [
        ("red", False, ("", "red")),
        ("<think>why</think>\n\nred", False, ("<think>why</think>", "red")),
        ("why</think>red", True, ("why</think>", "red")),
        ("<think>never closed", False, ("<think>never closed", "")),
        ("thinks on", True, ("thinks on", "")),
        (f"{LONG}<answer>red</answer>", False, (LONG[:-580], LONG[-580:] + "<answer>red</answer>")),
        (LONG, False, (LONG[:-600], LONG[-600:])),
        (f"<answer>{LONG}</answer>", False, ("<answer>", f"{LONG}</answer>")),
    ],
)
def test_thinking_is_folded_and_the_answer_stays_in_view(
    text: str, opened: bool, parts: tuple[str, str]
) -> None:
    assert split_thinking(text, opened=opened) == parts
    row = {"step": 1, "uid": "u", "completion": text, "opens_thinking": opened}
    (one,) = describe_group([row])["completions"]
    assert (one.get("thinking", ""), one.get("text", "")) == parts


def test_long_and_hostile_texts_are_cut_and_shown() -> None:
    row = {
        "step": 1,
        "uid": "\x1bu",
        "completion": "a\u202eb" + "x" * 900,
        "messages": [{"role": "user", "content": "y" * 9000}],
        "marks": [
            {"image": 0, "label": "\u202e", "points": [[1, 2]]},
            {"image": 0}, "no", {"points": [], "image": 0, "label": ""},
        ],
    }  # fmt: skip
    shown = describe_group([row])
    assert shown["uid"] == r"\x1bu" and shown["messages"][0]["text"] == "y" * 4000 + "… (9000 characters)"
    (one,) = shown["completions"]
    assert one["text"].startswith(r"a\u202eb") and one["marks"] == [
        {"image": 0, "label": r"\u202e", "points": [(1.0, 2.0)]}
    ]


def evaluation_row(step: int, uid: str, text: str, reward: float, **more: Any) -> str:
    return json.dumps({"step": step, "uid": uid, "completion": text, "reward": reward, **more}) + "\n"


def test_evaluation_rows_are_shown_before_and_after(tmp_path: Path) -> None:
    folder = logged(tmp_path, [group(0, (1.0, 0.0))])
    (name,) = [file.name for file in folder.paths.images.iterdir()]
    rollouts = folder.paths.rollouts
    for step, text in ((0, "blue"), (10, "green"), (20, "red")):
        rows = [
            evaluation_row(step, f"eval:{i}", text, step / 20, images=[name], messages=[]) for i in (1, 2)
        ]
        (rollouts / f"eval-{step:06d}.jsonl").write_text("".join(rows) + '{"torn')
    (rollouts / "eval-other-000005.jsonl").write_text(evaluation_row(5, "o:1", "once", 1.0))
    (rollouts / "eval-notes.jsonl").write_text("mine")
    found = gather_gallery(folder.paths, WHOLE, Pictures(WHOLE.images))
    first, second, other = found.evaluations
    assert (first["set"], first["uid"], first["before_step"], first["after_step"]) == ("", "eval:1", 0, 20)
    assert [first[when][0]["text"] for when in ("before", "after")] == ["blue", "red"]
    assert [second[when][0]["reward"] for when in ("before", "after")] == [0.0, 1.0]
    assert first["images"] == [name] and (other["set"], other["before"][0]["text"]) == ("other", "once")
    assert "after" not in other
    page = folder.write_report()
    assert page is not None and "and 3 evaluation rows" in page.read_text()


def test_evaluation_rows_of_several_sets_in_one_file(tmp_path: Path) -> None:
    folder = logged(tmp_path, [group(0, (1.0, 0.0)), group(1, (1.0, 0.0))])
    own, other = sorted(file.name for file in folder.paths.images.iterdir())
    for step in (0, 4, 8):
        rows = [
            evaluation_row(
                step, "a:1", f"{blind} {step}", 1.0, advantage=None, set=name, blind=blind, images=[image]
            )
            for name, blind, image in (("a", None, own), ("b", None, own), ("a", "shuffled", other))
        ]
        (folder.paths.rollouts / f"eval-step-{step:06d}.jsonl").write_text("".join(rows))
    pictures = Pictures(WHOLE.images)
    first, second = gather_gallery(folder.paths, WHOLE, pictures).evaluations
    assert [(row["set"], row["before_step"], row["after_step"]) for row in (first, second)] == [
        ("a", 0, 8),
        ("b", 0, 8),
    ]
    assert [[one["text"] for one in first[when]] for when in ("before", "after")] == [["None 0"], ["None 8"]]
    blind = first["blind"]
    assert (blind["kind"], blind["images"], blind["before_step"], blind["after_step"]) == (
        "shuffled",
        [other],
        0,
        8,
    )
    assert [[one["text"] for one in blind[when]] for when in ("before", "after")] == [
        ["shuffled 0"],
        ["shuffled 8"],
    ]
    assert "blind" not in second and {own, other} <= set(pictures.held)
    page = folder.write_report()
    assert page is not None
    assert "<h3>images shuffled</h3>" in page.read_text() and "in place of those of a:1" in page.read_text()


def test_lines_that_are_no_rows_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text(
        '{"step": 1, "uid": "a"}\n[1]\n{oops\n{"step": "x", "uid": 1}\n{"step": 2, "uid": "b"}\n{"to'
    )
    assert [row["step"] for row in read_rows(path, 10**6)[0]] == [1, 2]
    assert read_rows(path, 30) == ([{"step": 1, "uid": "a"}], 30)
    assert read_rows(tmp_path / "gone", 30) == ([], 0)


def test_no_rollouts_no_groups(tmp_path: Path) -> None:
    found = gather_gallery(RunPaths(tmp_path), WHOLE, Pictures(WHOLE.images))
    assert (found.groups, found.evaluations, found.steps, found.logged) == ([], [], 0, 0)


def test_a_message_is_text_whatever_its_layout() -> None:
    assert message_text("plain") == "plain"
    assert (
        message_text([{"type": "image"}, {"type": "text", "text": "a"}, {"type": "video"}])
        == "[image] a[video] "
    )
