"""The digits task: balanced sums, pictures that keep to their split, and what is said without scikit-learn."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
from helpers.recipe_scripts import script

from mm_grpo.errors import DataError

task: Any = script("digits/digits.py")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three pictures of each digit and split, in place of scikit-learn's."""

    def digits(split: str) -> tuple[tuple[task.Digit, ...], ...]:
        def one(value: int, n: int) -> task.Digit:
            return task.Digit(bytes([value, n, split == "train"]) + bytes(61), value)

        return tuple(tuple(one(value, n) for n in range(3)) for value in range(10))

    monkeypatch.setattr(task, "digits", digits)


def test_sums_are_equally_frequent(drawn: None) -> None:
    largest, sums = 4, 9
    rows = [task.pair(split="heldout", index=index, seed=1, largest=largest) for index in range(20 * sums)]
    counts = Counter(first.value + second.value for first, second in rows)
    assert counts == dict.fromkeys(range(sums), 20)
    assert {one.value for two in rows for one in two} == set(range(largest + 1))


def test_without_scikit_learn_one_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    task.digits.cache_clear()
    with pytest.raises(DataError, match=r"which is not installed; pip install 'mm_grpo\[digits\]'"):
        task.digits_rows(split="train", size=2)


def test_no_picture_is_in_both_splits() -> None:
    pytest.importorskip("sklearn", reason="scikit-learn (extra digits) is not installed")
    task.digits.cache_clear()
    train, heldout = (
        {one.levels for same in task.digits(split) for one in same} for split in ("train", "heldout")
    )
    assert not train & heldout and len(train) + len(heldout) == 1797
    assert [len(same) for same in task.digits("heldout")] == [41, 20, 32, 30, 39, 41, 36, 23, 37, 35]
    task.digits.cache_clear()
