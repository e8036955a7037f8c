"""Rewards get rows of their own, and what they change of the process is put back."""

from __future__ import annotations

import copy
import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from mm_grpo.rewards import Scorer
from mm_grpo.user_code.kept_state import kept_state, own_copy


def edits_and_paints(completion: str, prompt: Any, images: Any, sample: Any) -> float:
    prompt[0]["content"][1]["text"] = "another question"
    prompt.pop()["role"] = "none"
    sample.messages[0]["content"].clear()
    sample.columns["gold"] = None
    for image in (*images, *sample.images):
        image.paste((255, 0, 0), (0, 0, 2, 2))
        assert image.getpixel((1, 1)) == (255, 0, 0)
        ImageDraw.Draw(image).point((0, 0), (0, 255, 0))
        image.putpixel((0, 1), (0, 0, 255))
        image.putalpha(7)
    return 1.0


def pops(completion: str, gold: list[str]) -> float:
    """Right when the completion is the last of the row's list, which it takes off."""
    return float(completion == gold.pop())


def pops_of_all(completions: list[str], gold: list[list[str]], **columns: Any) -> list[float]:
    return [float(text == golds.pop()) for text, golds in zip(completions, gold, strict=True)]


@pytest.mark.parametrize("reward", [pops, pops_of_all])
def test_a_reward_that_pops_from_a_column_scores_the_same_again(
    reward: Any, rows: Callable[..., Any]
) -> None:
    prompts, completions = rows("abab", gold=[["b", "a"]] * 4)
    scorer = Scorer([reward], conversational=False)
    first = scorer.score(prompts, completions, step=1).totals
    assert first == [1.0, 0.0, 1.0, 0.0] == scorer.score(prompts, completions, step=2).totals
    assert all(p.sample.columns["gold"] == ["b", "a"] for p in prompts)


def test_messages_columns_and_images_are_not_the_trainers(rows: Callable[..., Any]) -> None:
    prompts, completions = rows("ab", gold=[["a"], ["b"]])
    before = copy.deepcopy([(p.sample.messages, p.sample.columns) for p in prompts])
    pixels = [i.tobytes() for p in prompts for i in (*p.sample.images, *p.engine_prompt.images)]
    Scorer([edits_and_paints]).score(prompts, completions, step=1)
    assert [(p.sample.messages, p.sample.columns) for p in prompts] == before
    assert [i.tobytes() for p in prompts for i in (*p.sample.images, *p.engine_prompt.images)] == pixels


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
