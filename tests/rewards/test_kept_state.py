"""Rewards get rows of their own, and what they change of the process is put back."""

from __future__ import annotations

import functools
import logging
import os
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mm_grpo.rewards import Scorer
from mm_grpo.types import Turn, Video
from mm_grpo.user_code.kept_state import kept_state, own_copy

SPOILS = """
from collections.abc import Mapping
from PIL import Image, ImageDraw

RED = (255, 0, 0)

def pixels(image):
    held = image.load()
    assert held[0, 0] != RED
    held[0, 0] = RED
    assert held[0, 0] == image.getpixel((0, 0)) == RED

PAINTS = {
    "paste": lambda image: image.paste(RED, (0, 0, 2, 2)),
    "draw": lambda image: ImageDraw.Draw(image).point((0, 0), RED),
    "pixels": pixels,
    "floodfill": lambda image: ImageDraw.floodfill(image, (0, 0), RED),
    "frombytes": lambda image: image.frombytes(bytes(RED) * (image.width * image.height)),
    "putdata": lambda image: image.putdata([RED] * (image.width * image.height)),
}

def spoil(value, paint):
    if isinstance(value, Image.Image):
        PAINTS[paint](value)
        assert value.getpixel((0, 0)) == RED
    elif isinstance(value, str | int | float | None):
        pass
    elif hasattr(value, "frames"):  # a Video, whose fields stay
        spoil(value.frames, paint)
    elif hasattr(value, "uid"):  # a Sample
        spoil((value.messages, value.images, value.columns), paint)
    else:
        for inner in list(value.values() if isinstance(value, Mapping) else value):
            spoil(inner, paint)
        if not isinstance(value, tuple):
            value.clear()
"""
PAINTS = ("paste", "draw", "pixels", "floodfill", "frombytes", "putdata")
HANDED = {
    "completion": ("prompt", "images", "sample", "turns", "gold", "words"),
    "completions": ("prompts", "images", "samples", "turns", "completions", "gold", "words"),
}


def view(value: Any) -> Any:
    """All that a value holds, as plain data."""
    if isinstance(value, Image.Image):
        return value.size, value.mode, value.tobytes()
    if isinstance(value, dict):
        return {key: view(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [view(inner) for inner in value]
    return view(vars(value)) if hasattr(value, "__dataclass_fields__") else value


def looked(rows: Callable[..., Any]) -> tuple[list[Any], list[Any]]:
    """Two conversations in which the model looked at a picture."""
    gold = [[{"boxes": [[1, 2]], "image": Image.new("RGB", (4, 4))}] for _ in range(2)]
    prompts, completions = rows("ab", gold=gold)
    for i, text in enumerate("ab"):
        picture = Image.new("RGB", (4, 4))
        clip = Video((Image.new("RGB", (4, 4)), picture), (0.0, 0.5), 2.0)
        shown: Any = {"images": (picture,), "videos": (clip,)}
        tool = Turn("tool", "seen", 1, name="look", arguments={"box": [[0, 1]]}, **shown)
        turns = (Turn("assistant", "look", 1, seed=0), tool, Turn("assistant", text, 1, seed=1))
        completions[i] = replace(completions[i], turns=turns)
    return prompts, completions


@pytest.mark.parametrize("how", ["plain", "async", "isolated"])
@pytest.mark.parametrize("kind", HANDED)
def test_what_a_reward_does_to_what_it_is_handed_nobody_else_sees(
    kind: str, how: str, rows: Callable[..., Any], tmp_path: Path, scorer: Callable[..., Scorer]
) -> None:
    """Of rows, tool turns and settings of entries: not the trainer, nor a later call, nor another reward."""
    prompts, completions = looked(rows)
    words, seen = ["a", ["b"]], list[Any]()

    def sees(completions: Any, **handed: Any) -> list[float]:
        handed = {name: value for name, value in handed.items() if not name.startswith(("log_", "environ"))}
        seen.append(view([completions, handed]))
        return [1.0] * len(completions)

    Scorer([sees]).score(prompts, completions, step=1)
    untouched, entries = view([prompts, completions, words]), list[Any]()
    for name in HANDED[kind]:
        for paint in PAINTS if how == "plain" and name == "turns" else PAINTS[:1]:
            extra = "" if name == "words" else "words, "
            named = kind if name == kind else f"{kind}, {name}"
            answer = "1.0" if kind == "completion" else "[1.0] * count"
            spoils = f"assert {name}\n    count = len({kind})\n    spoil({name}, {paint!r})"
            code = f"def f({named}, {extra}other=None):\n    {spoils}\n"
            file = tmp_path / f"{name}_{paint}.py"
            file.write_text(f"{SPOILS}\n{'async ' * (how == 'async')}{code}    return {answer}\n")
            entry = {"name": f"{file}:f", "as": f"{name}_{paint}", "words": words}
            entries.append(entry | ({"isolated": True, "max_concurrency": 1} if how == "isolated" else {}))
    for entry in [*entries, *entries]:
        one = scorer(entry, sees, conversational=True)
        for step in (1, 2) if how != "isolated" else (1,):
            assert one.score(prompts, completions, step=step).totals == [2.0, 2.0]
        one.close()
        assert view([prompts, completions, words]) == untouched, entry["as"]
    first, *later = [[done, {**handed, "trainer_state": None}] for done, handed in seen]
    assert all(each == first for each in later)


def test_a_palette_of_a_column_and_arrays_are_not_shared() -> None:
    """Pillow writes palettes into pixels that are shared."""
    indexed = Image.new("P", (2, 2))
    indexed.putpalette([1, 2, 3] * 256)
    value = {"a": np.array([["x"], ["y"]], dtype=object), "b": bytearray(b"ab"), "c": indexed}
    made = own_copy(value)
    made["a"][0][0] = made["b"][0] = 0
    made["c"].putpalette([9, 9, 9] * 256)
    made["c"].load()
    assert value["a"][0][0] == "x" and value["b"] == b"ab"
    assert indexed.convert("RGB").getpixel((0, 0)) == (1, 2, 3)


def test_images_are_copied_when_they_are_written_to_and_not_before() -> None:
    image = Image.new("RGB", (2, 2))
    made = own_copy([image, image])
    assert made[0].im is made[1].im is image.im
    made[0].load()[0, 0] = (1, 1, 1)
    assert made[0].im is not image.im and made[1].getpixel((0, 0)) == (0, 0, 0)
    assert pickle.loads(pickle.dumps(made[0])).getpixel((0, 0)) == (1, 1, 1)


def test_what_a_reward_logs_is_what_it_was_then(rows: Callable[..., Any]) -> None:
    """A list that a reward fills and logs again is not the same one for all rows."""
    held: list[str] = []

    def logs(completion: str, log_extra: Any) -> float:
        held.append(completion)
        log_extra("so far", held)
        return 1.0

    assert Scorer([logs]).score(*rows("abc"), step=1).extra["so far"] == [["a"], ["a", "b"], ["a", "b", "c"]]


def test_what_a_partial_holds_is_the_users(rows: Callable[..., Any]) -> None:
    def counts(completion: str, *, cache: list[str]) -> float:
        cache.append(completion)
        return 1.0

    cache: list[str] = []
    Scorer([{"name": functools.partial(counts, cache=cache), "as": "r"}]).score(*rows("ab"), step=1)
    assert cache == ["a", "b"]


def test_own_copy_goes_all_the_way_down_and_keeps_kinds() -> None:
    image, array, thing = Image.new("RGB", (2, 2)), np.zeros(2), object()
    value = {"a": [1, ("x", [image])], "b": array, "c": thing, "d": {3}}
    made = own_copy(value)
    assert made["a"] is not value["a"] and made["a"][1][1][0] is not image
    assert isinstance(made["a"][1], tuple) and made["b"] is not array and made["d"] == {3}
    assert made["c"] is thing  # of a class of the user's own


def leaves_gradients_off(completion: str) -> float:
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    os.chdir("/")
    return 1.0


def test_global_state_is_put_back_and_the_reward_named(
    rows: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    with caplog.at_level(logging.WARNING):
        assert Scorer([leaves_gradients_off]).score(*rows("a"), step=1).totals == [1.0]
    assert torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32
    assert Path.cwd() == tmp_path and torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1] and np.random.get_state()[1].tolist() == drawn[2]  # type: ignore[index]
    (said,) = [r.getMessage() for r in caplog.records]
    assert said.startswith(
        "reward 'leaves_gradients_off' changed torch's gradient mode, torch's default dtype, the working folder for"
    )


def test_state_is_put_back_after_a_reward_that_raises() -> None:
    with pytest.raises(ZeroDivisionError), kept_state("reward 'x'"):
        torch.set_grad_enabled(False)
        _ = 1 / 0
    assert torch.is_grad_enabled()
