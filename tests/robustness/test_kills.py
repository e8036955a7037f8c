"""Runs that a signal, a full disk or a reward ends at some place, each in a process of its own, and their resumption.

What comes out of a resumed run is what a run without a stop has. One case per mechanism.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.configs import merged
from helpers.processes import finished, launch

from robustness.parts import ISOLATED, SEGFAULT, body, reward_file
from robustness.running import command, inside, quiet
from robustness.runs import RUN, complete, metrics_of, whole

SCRIPT = Path(__file__).with_name("killed.py")
PATIENCE = 180.0
CODES = {"SIGKILL": 137, "SIGTERM": 143, "SIGINT": 130, "SIGHUP": 129, "full": 2}
KILLS = [
    ("SIGKILL", "in half a row of metrics.jsonl"),
    ("SIGKILL", "in half a state of a checkpoint"),
    ("SIGKILL", "before a checkpoint is renamed"),
    ("SIGKILL", "before old checkpoints are removed"),
    ("SIGKILL", "while the model is saved"),
    ("SIGTERM", "while the model loads"),
    ("SIGTERM", "while it scores"),
    ("SIGHUP", "before a checkpoint"),
    ("SIGINT", "while it updates"),
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


FORK = "os.fork()\nreturn SCORE"
REGEX = "import re\ndef f(completion):\n    return float(re.match('(a|aa)+$', 'a' * 60 + 'b') is not None)\n"
KILL_PARENT = "os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(9)"


@pytest.mark.long
@pytest.mark.parametrize(
    ("content", "options", "code", "words"),
    [
        pytest.param(body(SEGFAULT), {}, 128 + signal.SIGSEGV, "", id="segmentation fault"),
        pytest.param(REGEX, {"timeout": 1.0}, 1, "r.py", id="the interpreter's lock is held"),
        pytest.param(body(FORK), {}, 0, "the fork came back", id="a fork goes on"),
        pytest.param(
            body(KILL_PARENT), {**ISOLATED, "timeout": 10.0}, 2, "reward 'f'", id="SIGKILL to the parent"
        ),
    ],
)
def test_a_reward_that_ends_processes(
    content: str, options: Mapping[str, Any], code: int, words: str, models: dict[str, Path], tmp_path: Path
) -> None:
    laid(tmp_path, models, **reward_file(**options))
    (tmp_path / "r.py").write_text(content)
    found, output = ended(["-m", "mm_grpo.cli", "train", "config.yaml"], tmp_path)
    assert found == code and words in output, output[-2000:]
    assert code != 0 or len(metrics_of(tmp_path / "out")) == 2


@pytest.mark.long
def test_a_checkpoint_of_two_processes_without_one_s_file_is_passed_over(
    models: dict[str, Path], tmp_path: Path
) -> None:
    folder = laid(
        tmp_path, models, model={"path": str(models["qwen2_5_vl"])}, run={"dir": str(tmp_path / "out")}
    )
    start = ["train", folder / "config.yaml", "run.max_steps=2"]
    assert launch(("-m", "mm_grpo.cli"), 2, start, tmp_path / "ranks", deadline=PATIENCE) == [0, 0]
    (folder / "out" / "checkpoints" / "step-000002" / "state-00001-of-00002.safetensors").unlink()
    with inside(folder), quiet():
        command("train", "config.yaml", "--resume")
    whole(folder)
    assert [row["step"] for row in metrics_of(folder / "out")] == [1, 2, 3, 4]
