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

TESTS = Path(__file__).parent.parent
SHADOWED = ("json", "logging", "struct", "tempfile")
MINE = """
def score(completion):
    return float(len(completion))
"""
IN_FRONT = f"""
import os, sys
sys.path.append({str(TESTS)!r})
from helpers.tiny import sample
from mm_grpo.distributed import launch
from mm_grpo.rewards import Scorer, isolation
from mm_grpo.types import Completion, EnginePrompt, Prompt
sys.path.insert(0, os.getcwd())  # as `python -m` does
"""
REWARDS = """
scorer = Scorer([{"name": "mine:score", "isolated": True, "timeout": 60}], workers=1)
prompt = Prompt(sample("a"), (), EnginePrompt((1,), ()), None, {})
print(scorer.score([prompt], [Completion((1,), (0.0,), "abc", "stop", 0)], step=1).totals)
scorer.close()
"""
RANKS = """
raise SystemExit(launch.launch(1, ["-c", "import json; print(json.dumps([6]))"]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    for name in SHADOWED:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('the {name} of the working folder')")
    return tmp_path


@pytest.mark.parametrize(
    ("program", "printed"), [(REWARDS, "[3.0]"), pytest.param(RANKS, "[6]", marks=pytest.mark.slow)]
)
def test_helper_processes_import_the_standard_library(folder: Path, program: str, printed: str) -> None:
    script = folder / "bin" / "script.py"  # in another folder, as mm-grpo is; not with -P, which is handed on
    script.parent.mkdir()
    script.write_text(IN_FRONT + program)
    done = subprocess.run([sys.executable, script], cwd=folder, capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.returncode) == (printed, 0), done.stderr
    assert "of the working folder" not in done.stderr


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
