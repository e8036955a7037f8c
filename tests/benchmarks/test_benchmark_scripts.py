"""Each benchmark from its command line to its JSON, on tiny models, without the processes that import it all again."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest

Result = Callable[..., dict[str, Any]]


TINY = "--size tiny --rounds 1"
SMOKE = {
    "learner": "--size tiny --shapes 2x4x56,3x2x0 --rounds 1",
    "memory": "--vocabularies 1024 --tokens 8 --width 16",
    "step": "--workloads tiny --rounds 2 --warm 1",
    "generation": "--workloads tiny --rounds 2",
}


@pytest.mark.long
@pytest.mark.parametrize("name", SMOKE)
def test_a_script_ends_in_rows_whose_ratios_are_those_of_their_seconds(
    name: str, result: Result, script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = script("common").Machine
    rate = machine.rate
    monkeypatch.setattr(machine, "rate", lambda self: rate(self, rounds=1))
    if name == "step":
        context = multiprocessing.get_context("fork")
        monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
    elif name == "memory":
        memory = script(name)
        monkeypatch.setattr(memory, "in_a_fresh_process", memory.child)
        monkeypatch.setattr(memory, "check_the_method", lambda machine: None)  # blocks are not made as there
    rows = result(name, *SMOKE[name].split())["rows"]
    assert rows
    for row in rows:
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, int | float))
        if {"ratio", "seconds_trl", "seconds_ours"} <= row.keys():
            assert row["ratio"] == pytest.approx(row["seconds_trl"] / row["seconds_ours"], rel=1e-4)
        assert row.get("gradient_gap", 0.0) < 1e-4
