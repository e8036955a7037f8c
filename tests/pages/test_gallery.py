"""What a run's page shows of the rollouts: chosen by a budget, described, and read tolerantly."""

from __future__ import annotations

import base64
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.runs import group
from PIL import Image

from mm_grpo.pages.gallery import (
    FULL_BUDGET,
    MAX_TEXT,
    Budget,
    Gallery,
    ImageStore,
    describe_completion,
    describe_turn,
    gather_gallery,
    split_thinking,
)
from mm_grpo.pages.page import PageImage
from mm_grpo.run.folder import RunFolder
from mm_grpo.run.paths import EVALUATION
from mm_grpo.types import EnginePrompt, Group, Turn, Video


def gathered(folder: RunFolder, budget: Budget = FULL_BUDGET) -> tuple[Gallery, ImageStore]:
    images = ImageStore(budget.images)
    return gather_gallery(folder.paths, budget, images), images


def logged(path: Path, *steps: list[Group]) -> RunFolder:
    folder = RunFolder(path).start("x: 1\n")
    for step, groups in enumerate(steps, start=1):
        folder.write_rollouts(step, groups)
    return folder


def decoded(picture: PageImage) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(picture.uri.partition(",")[2])))


def test_a_large_picture_is_made_smaller_and_keeps_its_own_pixels(tmp_path: Path) -> None:
    gallery, images = gathered(logged(tmp_path, [group(0, (1.0,), side=1024)]))
    (made,) = (images.by_name[name] for name in gallery.groups[0]["images"])
    assert decoded(made).size == (512, 256) and (made.width, made.height) == (1024, 512)
    noise = Image.effect_noise((500, 500), 80).convert("RGB")
    one = group(0, (1.0,))
    prompt = replace(one.prompt, engine_prompt=replace(one.prompt.engine_prompt, media=(noise,)))
    _, images = gathered(logged(tmp_path / "b", [replace(one, prompt=prompt)]))
    assert [made.uri[:16] for made in images.by_name.values()] == ["data:image/jpeg;"]


def test_a_video_is_a_strip_of_small_frames_that_count(tmp_path: Path) -> None:
    """Frames of the prompt and of a tool's answer, beside an image with the pixels of one."""
    frames = [Image.new("RGB", (600, 300), (0, 0, 60 * level)) for level in range(4)]
    noise = Image.effect_noise((480, 240), 80).convert("RGB")
    video = Video((*frames[:3], noise), (0.5, 1.0, 1.5, 1.5), 2.0)
    one = group(0, (1.0,))
    sample = replace(one.prompt.sample, messages=[{"role": "user", "content": [{"type": "video"}]}])
    prompt = replace(one.prompt, sample=sample, engine_prompt=EnginePrompt((1, 2), (frames[0], video)))
    turns = (Turn("tool", "", 1, name="clip", videos=(Video((frames[3],), (7.25,), 2.0),)),)
    talk = replace(one, prompt=prompt, completions=(replace(one.completions[0], turns=turns),))
    folder = logged(tmp_path, [talk])
    gallery, images = gathered(folder)
    (shown,) = gallery.groups
    (strip,), (turn,) = shown["videos"], shown["completions"][0]["turns"]
    assert (strip["times"], turn["videos"][0]["times"]) == ([0.5, 1.0, 1.5, 1.5], [7.25])
    assert shown["messages"][0]["text"] == ""
    names = [*shown["images"], *strip["frames"], *turn["videos"][0]["frames"]]
    sizes = [decoded(images.by_name[name]).size for name in names]
    assert sizes == [(512, 256), *[(240, 120)] * 5]
    assert [images.by_name[name].width for name in names] == [600, 600, 600, 600, 480, 600]
    forms = [images.by_name[name].uri.partition(";")[0].rpartition("/")[2] for name in names]
    assert forms == ["png", "png", "png", "png", "jpeg", "png"]  # as small as they can be
    assert len(images.by_name) == 6
    size = sum(len(image.uri) for image in images.by_name.values())
    assert images.bytes == size and gathered(folder, Budget(10**6, size - 1))[0].groups == []


def test_the_budget_of_texts_takes_both_ends_and_the_widest_groups(tmp_path: Path) -> None:
    rewards: list[tuple[float | None, ...]] = [(0.5, 0.5), (0.0, 1.0), (None, None), (0.2, 0.6)]
    folder = logged(tmp_path, *[[group(i, r) for i, r in enumerate(rewards)] for _ in range(20)])
    whole, images = gathered(folder)
    assert len(whole.groups) == 80 and len(images.by_name) == 4  # each image once
    budget = Budget(int(len(json.dumps(whole.groups[0])) * 2.5 * 8), 10**6)  # two groups of each of 8 steps
    found, _ = gathered(folder, budget)
    assert {g["slot"] for g in found.groups} == {1, 3}
    steps_shown = sorted({g["step"] for g in found.groups})
    assert steps_shown[0] == 1 and steps_shown[-1] == 20 and 8 <= len(steps_shown) <= 11
    shown, steps = len(found.groups), len(steps_shown)
    counts = {"groups": shown, "evaluations": 0, "steps": steps, "logged": 20, "left_out": 4 * steps - shown}
    assert found.counts == counts
    assert sum(len(json.dumps(g)) for g in found.groups) <= budget.texts


def test_the_budget_of_images_leaves_out_groups_whose_images_do_not_fit(tmp_path: Path) -> None:
    folder = logged(tmp_path, [group(i, (0.0, i / 10)) for i in range(10)])
    size = len(next(iter(gathered(folder)[1].by_name.values())).uri)
    gallery, images = gathered(folder, Budget(10**6, 3 * size + size // 2))
    assert [g["slot"] for g in gallery.groups] == [7, 8, 9] and len(images.by_name) == 3


def test_only_pictures_of_the_run_are_read(tmp_path: Path) -> None:
    folder = logged(tmp_path / "run", [group(0, (1.0, 0.0))])
    Image.new("RGB", (2, 2)).save(tmp_path / "secret.png")
    file = folder.paths.rollout_file(1)
    file.write_text(re.sub(r'"images": \["[^"]*"\]', '"images": ["../../../secret.png"]', file.read_text()))
    gallery, images = gathered(folder)
    assert gallery.groups[0]["images"] == [] and images.by_name == {}
    turn = {"role": "tool", "text": "", "name": "zoom", "arguments": {}, "images": ["../../../secret.png"]}
    assert describe_turn(turn)["images"] == []
    video = {"frames": ["../../../secret.png"], "times": [0.0], "fps": 2.0}
    assert describe_turn({**turn, "videos": [video]})["videos"] == [{"frames": [], "times": [0.0]}]


@pytest.mark.parametrize(
    ("text", "opened", "parts"),
    [
        ("red", False, ("", "red")),
        ("<think>why</think>\n\nred", False, ("<think>why</think>", "red")),
        ("why</think>red", True, ("why</think>", "red")),
        ("<think>never closed", False, ("<think>never closed", "")),
        ("thinks on", True, ("thinks on", "")),
    ],
)
def test_thinking_is_folded_and_the_answer_stays_in_view(
    text: str, opened: bool, parts: tuple[str, str]
) -> None:
    assert split_thinking(text, opened=opened) == parts
    one = describe_completion({"completion": text, "opens_thinking": opened})
    assert (one.get("thinking", ""), one.get("text", "")) == parts


def test_evaluation_rows_are_shown_before_and_after(tmp_path: Path) -> None:
    folder = logged(tmp_path, [group(0, (1.0, 0.0))])
    (own,) = (file.name for file in folder.paths.images.iterdir())
    for step in (0, 4, 8):
        rows: list[dict[str, Any]] = [
            {"step": step, "uid": "a:1", "completion": f"{blind} {step}", "set": name, "blind": blind,
             "images": [own], "messages": [], "columns": {}}
            for name, blind in (("a", None), ("b", None), ("a", "shuffled"))
        ]  # fmt: skip
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        folder.paths.rollout_file(step, EVALUATION).write_text(lines)
    (folder.paths.rollouts / "eval-notes.jsonl").write_text("mine")
    gallery, _ = gathered(folder)
    assert [row["set"] for row in gallery.evaluations] == ["a", "b"]
    for row in gallery.evaluations:
        assert (row["before_step"], row["after_step"]) == (0, 8)
        assert [one["text"] for one in (*row["before"], *row["after"])] == ["None 0", "None 8"]


def row_with_sight(pieces: list[str], nats: list[float], **more: Any) -> dict[str, Any]:
    sight = {"nats": sum(nats), "tokens": nats, "pieces": pieces, "other": "rows:2"}
    return {"completion": "".join(pieces), "sight": sight, **more}


def test_tokens_near_0_are_one_piece() -> None:
    one = describe_completion(
        row_with_sight(["It", " is", " red", ".", "", "?"], [0.02, 0.03, 4.5, -0.25, 0.5, 0.09999])
    )
    assert one["text"] == ["It is", (" red", 4.5), (".", -0.25), "?"]
    assert one["sight"] == {"nats": pytest.approx(4.89999), "other": "rows:2"}


@pytest.mark.parametrize(
    ("pieces", "thinking"),
    [
        (["<think>", "why", "</think>", "\n\n", " red"], "<think>why</think>"),
        (["<think>", "why</thi", "nk> r", "ed"], "<think>why</think>"),
        (["<think>a", "wo" * MAX_TEXT, "b</think>", "red"], "<think>awo"),
    ],
)
def test_the_pieces_joined_are_the_text(pieces: list[str], thinking: str) -> None:
    shaded, plain = (describe_completion(row_with_sight(pieces, [nats] * len(pieces))) for nats in (1.0, 0.0))
    assert plain["thinking"].startswith(thinking)
    for which in ("text", "thinking"):
        assert "".join(p if isinstance(p, str) else p[0] for p in shaded[which]) == plain[which]
        assert any(isinstance(piece, tuple) for piece in shaded[which])


def test_turns_have_their_own_tokens() -> None:
    turns: list[dict[str, Any]] = [
        {"role": "assistant", "text": "look", "tokens": 2},
        {"role": "tool", "text": "here", "tokens": 7, "name": "zoom"},
        {"role": "assistant", "text": "red", "tokens": 2},
    ]
    one = describe_completion(row_with_sight(["lo", "ok", "red", ""], [0.6, 0.01, 3.5, 0.0], turns=turns))
    assert [turn["text"] for turn in one["turns"]] == [[("lo", 0.6), "ok"], "here", [("red", 3.5)]]
