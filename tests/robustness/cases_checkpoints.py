"""Checkpoints that were damaged, forged or left half written, through `mm-grpo train --resume`.

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
from mm_grpo.learner.state import mark_of
from mm_grpo.run.manifest import KEYS, digest_of
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


def manifest(change: Callable[[dict[str, Any]], Any], *, signed: bool) -> Damage:
    """A manifest with other values; `signed` gives it their digest."""

    def rewrite(checkpoint: Path) -> None:
        path = checkpoint / MANIFEST
        values = json.loads(path.read_text())
        change(values)
        path.write_text(json.dumps({**values, "sha256": digest_of(values)} if signed else values))

    return rewrite


def put(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda values: values.update({key: value})


def other(key: str) -> Callable[[dict[str, Any]], Any]:
    """Another value of the same type."""

    def change(values: dict[str, Any]) -> None:
        kind = type(values[key])
        values[key] = {int: 7, str: "0" * 64, list: [], dict: {"a": 1}}.get(kind, {"a": 1})

    return change


for key in KEYS:
    add(
        f"checkpoints: {MANIFEST} with another {key}",
        resumed(newest(manifest(other(key), signed=False))),
        *PASSED_OVER,
        code=0,
        heavy=True,
    )
    if key != "sha256":
        add(
            f"checkpoints: {MANIFEST} without {key}",
            resumed(newest(manifest(lambda values, key=key: values.pop(key), signed=True))),
            *PASSED_OVER,
            code=0,
            heavy=True,
        )
for name, text in {
    "a list": "[]",
    "null": "null",
    "a number": "3",
    "NaN": '{"format": NaN}',
    "brackets without end": "[" * 100_000,
    "UTF-16": '{"format": 2}'.encode("utf-16"),
    "NUL bytes": b"\0" * 500,
}.items():
    data = text if isinstance(text, bytes) else text.encode()
    add(
        f"checkpoints: {MANIFEST} of {name}",
        resumed(newest(lambda path, data=data: (path / MANIFEST).write_bytes(data))),
        *PASSED_OVER,
        code=0,
        heavy=True,
    )
for name, change in {
    "format 1": put("format", 1),
    "format 4": put("format", 4),
    "format '2'": put("format", "2"),
    "step true": put("step", True),
    "updates of text": put("updates", "2"),
    "no files": put("files", []),
    "negative updates": put("updates", -1),
    "tokens of text": lambda values: values["extra"].update(tokens_seen="many"),
    "a best of another kind": lambda values: values["extra"].update(best=[1]),
    "rewards that are none": lambda values: values["extra"].update(rewards=3),
    "rows that are none": lambda values: values["extra"].update(rows=[1]),
    "files that are none": put("files", [3]),
    "files without marks": put("files", [{"name": STATE}]),
    "a file above the checkpoint": put("files", [{"name": "../../../config.yaml", "bytes": 3, "sha256": ""}]),
}.items():
    add(
        f"checkpoints: {MANIFEST} with {name}, signed",
        resumed(newest(manifest(change, signed=True))),
        *PASSED_OVER,
        code=0,
        heavy=True,
    )
for name, change in {
    "the parameters of another model": put("parameters", {"a": [3]}),
    "the frozen weights of another model": put("frozen", "0" * 64),
    "an empty extra": put("extra", {}),
    "scores that are none": lambda values: values["extra"].update(before={"x": {"score": "high"}}),
}.items():
    add(
        f"checkpoints: {MANIFEST} with {name}, signed",
        resumed(newest(manifest(change, signed=True))),
        NEWEST,
        heavy=True,
    )


def forged(checkpoint: Path) -> None:
    """A state that is no safetensors file, whose mark agrees with it."""
    (checkpoint / STATE).write_bytes(b"\xff" * 64)
    manifest(put("files", [mark_of(checkpoint / STATE).as_dict()]), signed=True)(checkpoint)


add("checkpoints: a state of noise, signed", resumed(newest(forged)), NEWEST, heavy=True)


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
