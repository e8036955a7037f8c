"""One command in this process, as the console script runs it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from mm_grpo import cli


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    def call(*arguments: Any) -> Result:
        monkeypatch.setattr(sys, "argv", ["mm-grpo", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
        got = capsys.readouterr()
        return Result(code, got.out, got.err)

    return call
