"""The guards of tools: calls that all fail, tools that nobody calls."""

from __future__ import annotations

from typing import Any

import pytest

from mm_grpo.health.tools import ToolsFailing, ToolsUnused


def row(calls: float | None, failing: float = 0.0, **more: Any) -> dict[str, Any]:
    if calls is None:
        return {"reward": 0.5}
    return {"tools/call_frequency": calls, "tools/failure_frequency": failing, **more}


FAILED = row(2.0, 1.0, **{"tools/failures/bad_arguments": 3, "tools/failures/raised": 1})


def alarms(guard: Any, rows: list[dict[str, Any]]) -> list[int]:
    return [step for step, each in enumerate(rows, start=1) if guard.observe(step, each) is not None]


@pytest.mark.parametrize(
    ("rows", "warned"),
    [
        ([FAILED] * 6, [5, 6]),
        ([FAILED] * 4 + [row(2.0, 0.99)] + [FAILED] * 4, []),
        ([FAILED] * 4 + [row(0.0)] * 20 + [FAILED], [25]),
        ([row(None)] * 9, []),
    ],
    ids=["all fail", "one works", "steps without calls", "no tools"],
)
def test_calls_that_all_fail(rows: list[dict[str, Any]], warned: list[int]) -> None:
    assert alarms(ToolsFailing(), rows) == warned


def test_the_message_names_the_kinds() -> None:
    guard = ToolsFailing()
    (alarm,) = [a for a in (guard.observe(step, FAILED) for step in range(1, 6)) if a]
    assert alarm.action == "warn" and "(bad_arguments, raised in the last)" in alarm.message


@pytest.mark.parametrize(
    ("rows", "warned"),
    [
        ([row(0.0)] * 11, [10, 11]),
        ([row(0.0)] * 9 + [row(0.1)] + [row(0.0)] * 9, []),
        ([row(None)] * 30, []),
    ],
    ids=["never called", "called once", "no tools"],
)
def test_tools_that_nobody_calls(rows: list[dict[str, Any]], warned: list[int]) -> None:
    assert alarms(ToolsUnused(), rows) == warned
