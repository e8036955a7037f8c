"""`mm-grpo rewards`: the list, a reward's page, and scores by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mm_grpo.rewards import names


def test_the_list_has_a_line_for_each(command: Any) -> None:
    result = command("rewards")
    lines = result.out.splitlines()
    assert result.code == 0 and [line.split()[0] for line in lines][: len(names())] == names()
    assert all(len(line.split()) > 3 for line in lines)
    assert "1 when the completion's final answer is the gold answer." in result.out


def test_a_reward_of_turns_is_tried_on_one_turn(command: Any, tmp_path: Path) -> None:
    code = "def by_turn(completion, turns):\n    return [len(turn['text']) for turn in turns]\n"
    (tmp_path / "mine.py").write_text(code)
    place = f"{tmp_path}/mine.py:by_turn"
    result = command("rewards", "try", place, "--completion", "red", "--arg", "per_turn=true")
    assert (result.code, result.out) == (0, "3\n"), result.err


def test_the_page_of_a_reward_has_signature_and_documentation(command: Any) -> None:
    out = command("rewards", "exact_match").out
    assert out.startswith("exact_match (built-in; called per completion; weight: 1): (completion: ")
    assert "ignore_case: bool = True" in out and "\n\n1 when the completion's final" in out


@pytest.mark.parametrize(
    ("arguments", "score"),
    [
        (["exact_match", "--completion", "Red.", "--column", "answer=red"], "1"),
        (["exact_match", "--completion", "3", "--column", "answer=3"], "1"),
        (["exact_match", "--completion", "Red", "--column", "answer=red", "--arg", "ignore_case=false"], "0"),
        (["exact_match", "--completion", "x", "--column", "answer=null"],
         "None: the reward does not apply to this row"),
        (["format", "--completion", "Answer: 3", "--arg", r"pattern=Answer: \d+"], "1"),
    ],
)  # fmt: skip
def test_scores_by_hand(arguments: list[str], score: str, command: Any) -> None:
    result = command("rewards", "try", *arguments)
    assert (result.code, result.out.strip()) == (0, score)


FUTURE = "from __future__ import annotations\n"


@pytest.mark.parametrize(("kind", "future"), [("str", ""), ("str | None", FUTURE), ("", "")])
def test_numbers_stay_texts_for_a_reward_of_texts(
    kind: str, future: str, command: Any, tmp_path: Path
) -> None:
    """As the row of docs/data.md has it: "answer": "3"."""
    value = "3" if "str" in kind else 3
    annotation = f": {kind}" if kind else ""
    body = f"    return float(answer == {value!r} and type(answer) is {type(value).__name__})\n"
    (tmp_path / "mine.py").write_text(f"{future}def mine(completion, answer{annotation}):\n{body}")
    place = f"{tmp_path}/mine.py:mine"
    result = command("rewards", "try", place, "--completion", "x", "--column", "answer=3")
    assert (result.code, result.out.strip()) == (0, "1"), result.err
