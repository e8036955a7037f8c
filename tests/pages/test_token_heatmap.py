"""The tokens of a completion with their sight: the pieces are the text, and what does not fit it is left out."""

from __future__ import annotations

from typing import Any

import pytest

from mm_grpo.pages.gallery import MAX_TEXT, describe_completion


def row(pieces: list[str], nats: list[float], **more: Any) -> dict[str, Any]:
    sight = {"nats": sum(nats), "tokens": nats, "pieces": pieces, "other": "rows:2"}
    return {"completion": "".join(pieces), "sight": sight, **more}


def test_tokens_near_0_are_one_piece() -> None:
    one = describe_completion(
        row(["It", " is", " red", ".", "", "?"], [0.02, 0.03, 4.5, -0.25, 0.5, 0.09999])
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
    shaded, plain = (describe_completion(row(pieces, [nats] * len(pieces))) for nats in (1.0, 0.0))
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
    one = describe_completion(row(["lo", "ok", "red", ""], [0.6, 0.01, 3.5, 0.0], turns=turns))
    assert [turn["text"] for turn in one["turns"]] == [[("lo", 0.6), "ok"], "here", [("red", 3.5)]]
