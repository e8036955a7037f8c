"""A file of the working folder that is named as a module of the standard library is not imported in its place."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from mm_grpo.import_path import library_first

SHADOWED = ("json", "logging", "struct", "tempfile")
MINE = """
def score(completion):
    return float(len(completion))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    for name in SHADOWED:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('the {name} of the working folder')")
    return tmp_path


def test_the_command_finds_modules_of_the_working_folder(folder: Path) -> None:
    """Started as ranks are."""
    command = shlex.split("-P -m mm_grpo.cli rewards try mine:score --completion abc")
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "3", done.stderr


def test_the_folder_comes_behind_the_library_and_before_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    library, packages = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")
    dynamic = os.path.join(library, "lib-dynload")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert library_first(["/w", library, dynamic, packages], "/w") == [library, dynamic, "/w", packages]
    assert library_first(["", library, packages], "/w") == [library, "/w", packages]
    assert library_first(["/bin", library, packages], "/w") == ["/bin", library, packages]
    monkeypatch.setenv("PYTHONPATH", f"/other{os.pathsep}/w")
    assert library_first(["/w", library], "/w") == ["/w", library]
