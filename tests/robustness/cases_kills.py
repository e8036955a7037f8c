"""Runs that a signal ends at some place, and their resumption: what comes out is what a run without a stop has."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import robustness.run_case as by
from robustness.cases import Call, add
from robustness.whole_runs import resume, straight, write_config

SCRIPT = Path(__file__).with_name("killed.py")
PLACES = [
    "while the model loads",
    "before the first step",
    "while it samples",
    "while it scores",
    "while it updates",
    "while rollouts are written",
    "in half a row of metrics.jsonl",
    "before a checkpoint",
    "in half a state of a checkpoint",
    "before a checkpoint's manifest",
    "before a checkpoint is renamed",
    "before old checkpoints are removed",
    "while the model is saved",
    "before the summary",
]
STOPPED = [
    "before the first step",
    "while it scores",
    "before a checkpoint",
    "in half a state of a checkpoint",
    "before a checkpoint is renamed",
    "while the model is saved",
]
CODES = {"SIGKILL": 137, "SIGTERM": 143, "SIGINT": 130, "SIGHUP": 129}


def ended(place: str, *signals: str) -> Callable[[Path], Call]:
    """The exit code and the message of a run that is sent signals at a place."""

    def make(folder: Path) -> Call:
        config = write_config(folder)
        by.start_forks()
        return lambda: by.process([SCRIPT, place, *signals, "--", "train", config], folder)

    return make


def ended_and_resumed(place: str, *signals: str, code: int) -> Callable[[Path], Call]:
    def make(folder: Path) -> Call:
        end = ended(place, *signals)(folder)
        with by.quiet():
            other = straight(folder)

        def call() -> None:
            try:
                end()
            except SystemExit as leaving:
                assert leaving.code == code, leaving.code
            else:
                assert code == 0, "the run was not ended"
            resume(folder, straight_run=other)

        return call

    return make


for place in PLACES:
    add(
        f"kills: SIGKILL {place}, and resumed",
        ended_and_resumed(place, "SIGKILL", code=137),
        code=0,
        heavy=True,
    )
for name in ("SIGTERM", "SIGINT", "SIGHUP"):
    for place in STOPPED:
        # the last step is done: the run ends by itself
        code = 0 if place == "while the model is saved" else CODES[name]
        add(
            f"kills: {name} {place}, and resumed",
            ended_and_resumed(place, name, code=code),
            code=0,
            heavy=True,
        )
    add(
        f"kills: {name} while it updates",
        ended("while it updates", name),
        "--resume",
        code=CODES[name],
        heavy=True,
    )
    add(
        f"kills: {name} while the model loads",
        ended("while the model loads", name),
        code=CODES[name],
        heavy=True,
    )
add(
    "kills: Ctrl-C twice while it updates",
    ended("while it updates", "SIGINT", "SIGINT"),
    "interrupted",
    code=130,
    heavy=True,
)
for place in ("while it updates", "in half a state of a checkpoint", "while the model is saved"):
    add(
        f"kills: Ctrl-C twice {place}, and resumed",
        ended_and_resumed(place, "SIGINT", "SIGINT", code=130),
        code=0,
        heavy=True,
    )
add(
    "kills: SIGTERM twice while it updates",
    ended("while it updates", "SIGTERM", "SIGTERM"),
    "--resume",
    code=143,
    heavy=True,
)

# a disk that fills up

for place, what in {
    "while rollouts are written": "",
    "before a checkpoint": "a checkpoint cannot be written",
    "while the model is saved": "model",
}.items():
    add(f"run folder: a disk that is full {place}", ended(place, "full"), what, "run.dir", heavy=True)
    add(
        f"run folder: a disk that is full {place}, and resumed",
        ended_and_resumed(place, "full", code=2),
        code=0,
        heavy=True,
    )

# several processes


def of_two(change: Callable[[Path], object]) -> Callable[[Path], Call]:
    """A run of two processes that ended after two steps, resumed by one."""

    def make(folder: Path) -> Call:
        from helpers.processes import launch

        config = write_config(folder)
        by.start_forks()
        command = ["train", config, "run.max_steps=2", f"run.dir={folder / 'out'}"]
        codes = launch(("-m", "mm_grpo.cli"), 2, command, folder / "ranks", deadline=by.PATIENCE)
        assert codes == [0, 0], codes
        change(folder / "out" / "checkpoints")
        return lambda: resume(folder, straight_run=None)

    return make


SECOND = "step-000002/state-00001-of-00002.safetensors"
for name, change, words in [
    ("as it was", lambda kept: None, ("step 4/4",)),
    (
        "without the second's file",
        lambda kept: (kept / SECOND).unlink(),
        ("lacks state-00001", "step-000001"),
    ),
    (
        "with one file twice",
        lambda kept: shutil.copy(kept / SECOND.replace("00001-of", "00000-of"), kept / SECOND),
        ("state-00001-of-00002", "step-000001"),
    ),
]:
    add(f"resume: a checkpoint of two processes by one, {name}", of_two(change), *words, code=0, heavy=True)
