"""Hostile cases end with the exit code of their class and one message: no traceback, no hang, no file lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from robustness import page
from robustness.case import Case
from robustness.cases import CASES
from robustness.running import problems


def params() -> Iterator[object]:
    """The cases; those that load a model are slow together."""
    for case in CASES:
        loads = not case.command.startswith("check")
        yield pytest.param(case, id=case.name.replace("/", "_"), marks=[pytest.mark.slow] * loads)


@pytest.mark.parametrize("case", params())
def test_a_hostile_input_ends_in_one_message(case: Case, tmp_path: Path, models: dict[str, Path]) -> None:
    (tmp_path / "MODEL").symlink_to(models["qwen2_5_vl"])
    assert problems(case, tmp_path) == []


def test_names_of_cases_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


def test_the_page_is_that_of_the_table() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.text(), (
        "run PYTHONPATH=tests python -m robustness.page"
    )
