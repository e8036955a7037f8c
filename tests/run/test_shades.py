"""The tokens of a completion with their sight: the pieces are the text, and what does not fit it is left out."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from mm_grpo.run.gallery import LONGEST_TEXT, describe_group
from mm_grpo.run.shades import level_of, shaded, tokens_of, total_of

EVIL = "</td><script>alert(1)</script>\u202e"


def row(pieces: list[str], nats: list[float], **more: Any) -> dict[str, Any]:
    sight = {"nats": sum(nats), "tokens": nats, "pieces": pieces, "other": "rows:2"}
    return {"step": 1, "uid": "u", "completion": "".join(pieces), "sight": sight, **more}


def shown(given: dict[str, Any]) -> dict[str, Any]:
    (one,) = describe_group([json.loads(json.dumps(given))])["completions"]
    found: dict[str, Any] = one
    return found


def test_each_token_has_its_shade() -> None:
    one = shown(row(["It", " is", " red", ".", ""], [0.02, 0.03, 4.5, -0.25, 0.5]))
    assert one["shaded_text"] == [("It is", 0.05, 0), (" red", 4.5, 4), (".", -0.25, -1)]
    assert one["text"] == "It is red." and one["sight"] == {"nats": 4.8, "other": "rows:2"}


@pytest.mark.parametrize(
    ("nats", "level"),
    [(0.0999, 0), (0.1, 1), (0.5, 2), (1.0, 3), (3.0, 4), (-0.0999, 0), (-0.1, -1), (-1.0, -2)],
)
def test_shades_begin_where_the_legend_says(nats: float, level: int) -> None:
    assert level_of(nats) == level


@pytest.mark.parametrize(
    "pieces",
    [
        ["<think>", "why", "</think>", "\n\n", " red"],
        ["<think>", "why</thi", "nk> r", "ed"],
        ["a", "wo" * LONGEST_TEXT, "b"],
        ["a" * (LONGEST_TEXT - 1), "bc", "d"],
        [EVIL, "\x1b[31m", "red", "\ud800"],
        ["word "] * 600,
        ["", "red", ""],
    ],
)
def test_the_pieces_joined_are_the_text(pieces: list[str]) -> None:
    one = shown(row(pieces, [1.0] * len(pieces)))
    for which in ("text", "thinking"):
        if which in one:
            assert "".join(piece for piece, _, _ in one["shaded_" + which]) == one[which]
    assert any(level == 3 for which in ("text", "thinking") for _, _, level in one.get("shaded_" + which, []))
    assert "\u202e" not in json.dumps(one, ensure_ascii=False)


def test_a_cut_text_and_a_token_over_the_end_of_a_part() -> None:
    tokens = [("aaa", 1.0), ("bc", 2.0), ("d", 3.0)]
    assert shaded(tokens, "aaabcd", 0, "aaab… (6 characters)") == [
        ("aaa", 1.0, 3),
        ("b… (6 characters)", 0.0, 0),
    ]
    assert shaded(tokens, "aaabcd", 0, "aaab") == [("aaa", 1.0, 3), ("b", 2.0, 3)]
    assert shaded(tokens, "aaabcd", 4, "cd") == [("c", 2.0, 3), ("d", 3.0, 4)]


@pytest.mark.parametrize(
    "sight",
    [
        None,
        [1],
        {"nats": "1", "tokens": ["1"], "pieces": ["red"]},
        {"nats": True, "tokens": [1.0, 2.0], "pieces": ["red"]},
        {"nats": math.nan, "tokens": [math.nan], "pieces": ["red"]},
        {"nats": math.inf, "tokens": ["1"], "pieces": ["red"]},
        {"tokens": 1.0, "pieces": ["red"]},
        {"tokens": [1.0], "pieces": [3]},
    ],
)
def test_what_is_no_sight_is_left_out(sight: Any) -> None:
    given = {"step": 1, "uid": "u", "completion": "red", "sight": sight}
    assert tokens_of(given) == [] and total_of(given) is None
    (one,) = describe_group([given])["completions"]
    assert one["text"] == "red" and not {"sight", "shaded_text"} & set(one)


def test_tokens_of_another_text_shade_nothing() -> None:
    assert shaded([("blue", 1.0)], "red", 0, "red") is None
    assert shaded([("red", 0.01)], "red", 0, "red") is None  # nothing to show
    one = shown(row(["blue"], [2.0], completion="red"))
    assert "shaded_text" not in one and one["sight"]["nats"] == 2.0


def test_turns_have_their_own_tokens_rewards_and_advantages() -> None:
    turns = [
        {"role": "assistant", "text": "look", "tokens": 2, "reward": 0.25, "advantage": -0.5},
        {"role": "tool", "text": "here", "tokens": 7, "name": "zoom", "arguments": {}},
        {"role": "assistant", "text": "red", "tokens": 2, "reward": None, "advantage": 1.0},
    ]
    first = row(["lo", "ok", "red", ""], [0.6, 0.01, 3.5, 0.0], turns=turns, completion="red", advantage=0.25)
    second = {"step": 1, "uid": "u", "completion": "x", "turns": [turns[0] | {"advantage": 0.0}]}
    group = describe_group([first, second])
    look, tool, red = group["completions"][0]["turns"]
    assert look["shaded_text"] == [("lo", 0.6, 2), ("ok", 0.01, 0)] and red["shaded_text"] == [
        ("red", 3.5, 4)
    ]
    assert (look["reward"], look["tone"], look["strength"], look["signed"]) == (0.25, "down", 2, "-0.50")
    assert (red["reward"], red["tone"], red["strength"], red["signed"]) == (None, "up", 3, "+1.00")
    assert "tone" not in tool and "shaded_text" not in tool
    assert group["completions"][0]["strength"] == 1  # of the largest of the group, that of a turn
    assert group["completions"][1]["turns"][0]["tone"] == "flat"
