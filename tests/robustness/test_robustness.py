"""Every case of cases.py ends with the exit code of its class and one message: no traceback, no hang."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

import robustness.run_case as by
from robustness import CASES, Case

DEADLINE = 20.0
"""Seconds: the machine may be loaded, and the first case of a process imports torch."""
SHARE = 10
QUICK = (
    "checkpoints: manifest.json with another updates",
    "checkpoints: state-00000-of-00001.safetensors truncated",
    "engines: no load",
    "resume: with run.seed=7",
)
"""Heavy cases that are quick enough."""


def params() -> list[object]:
    """All cases; those that are heavy, and of the others all but a tenth by the digest of their names, are `long`."""
    return [
        pytest.param(
            case,
            id=case.name.replace("/", "_"),
            marks=[
                *[pytest.mark.long]
                * (case.name not in QUICK and (case.heavy or zlib.crc32(case.name.encode()) % SHARE != 0)),
            ],
        )
        for case in CASES
    ]


@pytest.mark.parametrize("case", params())
def test_a_hostile_input_ends_in_one_message(case: Case, tmp_path: Path, models: dict[str, Path]) -> None:
    if case.unix_user and os.geteuid() == 0:
        pytest.skip("permissions do not bind this user")
    (tmp_path / "MODEL").symlink_to(models["qwen2_5_vl"])
    with by.inside(tmp_path):
        outcome = by.run(case.make(tmp_path), DEADLINE, case.encoding)
    assert by.problems(outcome, case.code, case.words) == []


def test_names_of_cases_are_unique_and_enough() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) >= 400 and set(QUICK) <= set(names)
