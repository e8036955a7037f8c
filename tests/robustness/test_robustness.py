"""Cases of hostile input end with the exit code of their class and one message: no traceback, no hang.

A tenth of all cases, by the digest of their names; all of them with ALL_CASES=1, which takes some minutes, and by
make_table.py.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

import robustness.run_case as by
from robustness import CASES, Case

DEADLINE = 180.0
"""Seconds, nine times what make_table.py gives: the machine may be slow and loaded."""
SHARE = 10
QUICK = (
    "checkpoints: manifest.json of another number",
    "checkpoints: state-00000-of-00001.safetensors truncated",
    "engines: no load",
    "resume: with run.seed=7",
)
"""Heavy cases that are quick enough."""


def params() -> list[object]:
    """The cases that are run; heavy ones are `long`, but for a few that are quick enough."""
    everything = bool(os.environ.get("ALL_CASES"))
    return [
        pytest.param(
            case,
            id=case.name.replace("/", "_"),
            marks=[pytest.mark.long] * (case.heavy and case.name not in QUICK),
        )
        for case in CASES
        if everything or case.name in QUICK or zlib.crc32(case.name.encode()) % SHARE == 0
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
