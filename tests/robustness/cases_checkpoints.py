"""Checkpoints that were damaged or left half written, through `mm-grpo train --resume`.

The run was stopped after step 3. Where the newest checkpoint is damaged, the one of step 2 is resumed with a warning,
and what comes out is what a run without a stop has; where all are, the run is refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import robustness.run_case as by
from robustness.cases import add, cut, fifo, listening
from robustness.whole_runs import LAST, resumed

STATE, MANIFEST, LOG = "state-00000-of-00001.safetensors", "manifest.json", "metrics.jsonl"
NEWEST = f"step-{LAST:06d}"
PASSED_OVER = (NEWEST, f"resuming from step-{LAST - 1:06d}")
MOVING = {"algorithm": {"beta": 0.01, "sync_ref_model": True, "ref_model_sync_steps": 1}}
Damage = Callable[[Path], Any]


def newest(damage: Damage) -> Damage:
    return lambda out: damage(out / "checkpoints" / NEWEST)


def every(damage: Damage) -> Damage:
    return lambda out: [damage(each) for each in sorted((out / "checkpoints").glob("step-*"))]


def of_file(name: str, damage: Damage) -> Damage:
    return lambda checkpoint: damage(checkpoint / name)


def replaced(make: Damage) -> Damage:
    """Something else in the place of the file."""

    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


def flip(place: int) -> Damage:
    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)

    return change


FILE_DAMAGES: dict[str, Damage] = {
    "truncated": cut,
    "empty": lambda path: path.write_bytes(b""),
    "gone": Path.unlink,
    "with a flipped bit at its start": flip(0),
    "with a flipped bit at its end": flip(-2),
    "with bytes behind its end": lambda path: path.write_bytes(path.read_bytes() + b"more"),
    "that is a folder": replaced(Path.mkdir),
    "that is a FIFO": replaced(fifo),
    "that is a circle of links": replaced(lambda path: path.symlink_to(path.name)),
    "that is a link to /dev/zero": replaced(lambda path: path.symlink_to("/dev/zero")),
}
for file in (STATE, MANIFEST, LOG):
    for name, damage in FILE_DAMAGES.items():
        add(
            f"checkpoints: {file} {name}",
            resumed(newest(of_file(file, damage))),
            *PASSED_OVER,
            code=0,
            heavy=True,
        )
for name in ("truncated", "gone", "with a flipped bit at its end"):
    add(
        f"checkpoints: reference.safetensors {name}",
        resumed(newest(of_file("reference.safetensors", FILE_DAMAGES[name])), base=MOVING),
        *PASSED_OVER,
        code=0,
        heavy=True,
    )
for file, name in [(STATE, "truncated"), (MANIFEST, "empty"), (MANIFEST, "that is a folder"), (LOG, "gone")]:
    add(
        f"checkpoints: all of them, {file} {name}",
        resumed(every(of_file(file, FILE_DAMAGES[name]))),
        "no checkpoint in",
        "is whole",
        heavy=True,
    )


def another_number(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"adam_steps": 7}))


MANIFESTS: dict[str, Damage] = {
    "a list": lambda path: path.write_text("[]"),
    "brackets without end": lambda path: path.write_text("[" * 100_000),
    "NUL bytes": lambda path: path.write_bytes(b"\0" * 500),
    "another number": another_number,
}
for name, damage in MANIFESTS.items():
    add(
        f"checkpoints: {MANIFEST} of {name}",
        resumed(newest(of_file(MANIFEST, damage))),
        *PASSED_OVER,
        code=0,
        heavy=True,
    )


def renamed(out: Path) -> None:
    (out / "checkpoints" / NEWEST).rename(out / "checkpoints" / "step-000009")


def half_written(make: Damage) -> Damage:
    """What lies under the name that the checkpoint of step 4 is filled under."""
    return lambda out: make(out / "checkpoints" / ".step-000004.new")


def some_files(path: Path) -> None:
    path.mkdir()
    (path / STATE).write_bytes(b"\0" * 1000)


def link_to_notes(path: Path) -> None:
    notes = path.parents[2] / "notes"
    notes.mkdir()
    (notes / "mine.txt").write_text("mine")
    path.symlink_to(notes)


def socket_at(path: Path) -> None:
    with by.inside(path.parent):
        listening(path)


def emptied(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


def as_file(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.touch()


def moved(checkpoint: Path) -> None:
    """Whole, and on another disk, as it were."""
    elsewhere = checkpoint.parents[2] / "elsewhere"
    shutil.move(checkpoint, elsewhere)
    checkpoint.symlink_to(elsewhere)


for name, damage, words in [
    ("half written, a folder with half a state", half_written(some_files), ()),
    ("half written, an empty folder", half_written(Path.mkdir), ()),
    ("half written, a file", half_written(Path.touch), ()),
    ("half written, a link to a folder of the user's", half_written(link_to_notes), ()),
    ("half written, a link to nothing", half_written(lambda path: path.symlink_to("nowhere")), ()),
    ("a renamed one", renamed, ("step-000009", "was renamed")),
    ("an empty folder", newest(emptied), PASSED_OVER),
    ("a file in the place of one", newest(as_file), ("after step 2 are cut",)),
    ("a file in the place of the next", lambda out: (out / "checkpoints" / "step-000004").touch(), ()),
    ("a link to a whole one elsewhere", newest(moved), ()),
    ("a file of the user's beside them", lambda out: (out / "checkpoints" / "notes.txt").touch(), ()),
]:
    add(f"checkpoints: {name}", resumed(damage), *words, code=0, heavy=True)
for name, make in {
    "a file": Path.touch,
    "a FIFO": fifo,
    "a socket": socket_at,
    "a circle of links": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
}.items():
    add(
        f"checkpoints: {name} in the place of their folder",
        resumed(lambda out, make=make: (shutil.rmtree(out / "checkpoints"), make(out / "checkpoints"))),
        "checkpoints",
        heavy=True,
    )
