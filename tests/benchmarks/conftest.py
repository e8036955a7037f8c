"""The benchmarks are scripts beside the package; tests import them by name."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Import a script as `python benchmarks/name.py` would find it; it and what it imports are forgotten after."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = {file.stem for file in FOLDER.glob("*.py")}
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def result(script: Callable[[str], Any], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run a script with arguments and --json; what it wrote."""

    def run(name: str, *arguments: str) -> dict[str, Any]:
        file = tmp_path / "made" / f"{name}.json"
        script(name).main([*arguments, "--json", str(file)])
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found

    return run
