"""Rewards with `per_turn`: a number for each turn of the model."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny import sample

from mm_grpo.errors import RewardError
from mm_grpo.rewards.scorer import Scorer
from mm_grpo.types import Completion, EnginePrompt, Prompt, Turn

FILE = """
def by_turn(completion, turns):
    own = [turn for turn in turns if turn["role"] == "assistant"]
    return [len(turn["text"]) if turn["text"] else None for turn in own]
"""


def conversation(*texts: str) -> Completion:
    turns: list[Turn] = []
    for number, text in enumerate(texts):
        turns += [Turn("assistant", text, len(text), seed=number), Turn("tool", "seen", 3, name="look")]
    return Completion((1,), (-1.0,), texts[-1], "stop", 0, turns=tuple(turns[:-1]))


def score(entries: list[Any], *done: Completion, **options: Any) -> Any:
    prompt = Prompt(sample("r"), (1,), EnginePrompt((1,), ()), torch.arange(1), {})
    with closing(Scorer(entries, **options)) as scorer:
        return scorer.score([prompt] * len(done), done, step=1)


def by_turn(answer: Any) -> dict[str, Any]:
    return {"name": lambda completions, **kwargs: answer, "as": "r", "per_turn": True}


DONE = (conversation("a", "", "ccc"), conversation("dd"))


@pytest.mark.parametrize("isolated", [False, pytest.param(True, marks=pytest.mark.long)])
def test_totals_are_sums_and_turns_keep_their_own(isolated: bool, tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(FILE)
    entry = {"name": f"{tmp_path / 'r.py'}:by_turn", "per_turn": True, "weight": 0.5, "isolated": isolated}
    whole = {"name": lambda completion: float(len(completion)), "as": "whole"}
    found = score([entry, whole], *DONE)
    assert found.parts == {"by_turn": [4.0, 2.0], "whole": [3.0, 2.0]}
    assert found.totals == [0.5 * 4 + 3.0, 0.5 * 2 + 2.0]
    assert found.turns == [(0.5, None, 0.5 * 3 + 3.0), (0.5 * 2 + 2.0,)]
    assert found.metrics["rewards/by_turn/mean"] == 3.0


@pytest.mark.parametrize("answer", [[[1, None, 2], None], ((1.0, None, np.float32(2)), None)])
def test_none_is_nothing_and_never_a_zero(answer: Any) -> None:
    found = score([by_turn(answer)], *DONE)
    assert found.totals == [3.0, None] and found.turns == [(1.0, None, 2.0), (None,)]
    assert found.metrics["rewards/r/none"] == 1.0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([[1, 2], [1]], "returned 2 numbers where the model had 3 turns; legal is a list"),
        ([1.0, 2.0], "returned 1.0, a float; legal is a list"),
        ([[1, 2, math.nan], [1]], "which is not finite"),
        ([[1, 2, "x"], [1]], "a str; legal is a list"),
        ([[1, 2, 3]], "returned 1 scores; legal is a list of 2"),
    ],
)
def test_a_wrong_answer_stops_the_run_or_masks(answer: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        score([by_turn(answer)], *DONE)
    masked = {**by_turn(answer), "on_error": "mask"}
    found = score([masked, {"name": lambda completion: 1.0, "as": "other"}], *DONE)
    assert found.totals[0] is None and found.turns[0] == (None, None, None)


def test_one_number_is_refused_where_a_list_is_and_a_list_where_a_number_is() -> None:
    with pytest.raises(RewardError, match="a list; legal is a finite number"):
        score([{"name": lambda completions, **kwargs: [[1.0], [2.0]], "as": "r"}], *DONE)
