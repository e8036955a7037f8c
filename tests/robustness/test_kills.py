"""Runs that a signal, a full disk or a reward ends at some place, each in a process of its own, and their resumption.

What comes out of a resumed run is what a run without a stop has. One case per mechanism.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.configs import merged
from helpers.processes import finished

from robustness.parts import reward_file
from robustness.running import command, inside, quiet
from robustness.runs import RUN, complete

SCRIPT = Path(__file__).with_name("killed.py")
PATIENCE = 180.0
CODES = {"SIGKILL": 137, "SIGINT": 130, "full": 2}
KILLS = [
    ("SIGKILL", "in half a row of metrics.jsonl"),
    ("SIGKILL", "in half a state of a checkpoint"),
    ("SIGKILL", "before a checkpoint is renamed"),
    ("SIGINT SIGINT", "while it updates"),
    ("full", "before a checkpoint"),
]


def laid(folder: Path, models: dict[str, Path], **changes: Any) -> Path:
    """The folder with a config of the small run in it."""
    (folder / "MODEL").symlink_to(models["qwen2_5_vl"])
    (folder / "config.yaml").write_text(json.dumps(merged(RUN, changes)))
    return folder


def ended(program: Sequence[object], folder: Path) -> tuple[int, str]:
    """The exit code that a shell tells, and the output, of `python PROGRAM` in `folder`."""
    code, output = finished(program, folder / "output.txt", cwd=folder, deadline=PATIENCE, HOME=str(folder))
    return (code if code >= 0 else 128 - code), output


@pytest.mark.long
@pytest.mark.parametrize(("signals", "place"), KILLS)
def test_a_run_that_is_ended_goes_on(
    signals: str, place: str, models: dict[str, Path], tmp_path: Path
) -> None:
    names = signals.split()
    program = [SCRIPT, place, *names, "--", "train", "config.yaml"]
    code, output = ended(program, laid(tmp_path, models))
    assert code == CODES[names[0]], output[-2000:]
    assert names[0] == "SIGKILL" or "Traceback" not in output
    with inside(tmp_path), quiet():
        command("train", "config.yaml", "--resume")
    complete(tmp_path)


REGEX = "import re\ndef f(completion):\n    return float(re.match('(a|aa)+$', 'a' * 60 + 'b') is not None)\n"


@pytest.mark.long
def test_a_reward_that_holds_the_interpreter_ends_the_run(models: dict[str, Path], tmp_path: Path) -> None:
    laid(tmp_path, models, **reward_file(timeout=1.0))
    (tmp_path / "r.py").write_text(REGEX)
    found, output = ended(["-m", "mm_grpo.cli", "train", "config.yaml"], tmp_path)
    assert found == 1 and "r.py" in output, output[-2000:]
