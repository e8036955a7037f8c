"""What a hostile or unlucky user brings, as a table: the record of a case, and what several tables are made of.

A case is made in an empty folder, which is then the working folder and the home (`MODEL` in
it leads to a tiny model, where a case asks for one). The tables are in
the other files `cases_...`; `__init__.py` joins them. To add a case: a line in a table, or a
function under `@case`. A class is the first word of a case's name. `heavy` cases import torch or load a model's
processor, and but for a few run with `-m long` only; `unix_user` cases need a user whom permissions bind. Runs of the
tiny model that cases damage, end and resume are in whole_runs.py; killed.py is a run that ends itself.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One case. `make` fills the folder and returns the call that uses what is in it."""

    name: str
    make: Callable[[Path], Call]
    code: int = 2
    words: tuple[str, ...] = ()
    heavy: bool = False
    unix_user: bool = False
    encoding: str = "utf-8"

    @property
    def kind(self) -> str:
        return self.name.split(":")[0]


CASES: list[Case] = []


def add(name: str, make: Callable[[Path], Call], *words: str, **options: Any) -> None:
    CASES.append(Case(name, make, words=words, **options))


def case(
    name: str, *words: str, **options: Any
) -> Callable[[Callable[[Path], Call]], Callable[[Path], Call]]:
    def keep(make: Callable[[Path], Call]) -> Callable[[Path], Call]:
        add(name, make, *words, **options)
        return make

    return keep


def fifo(path: Path) -> None:
    os.mkfifo(path)


def listening(path: Path) -> None:
    server = socket.socket(socket.AF_UNIX)
    server.bind(path.name)  # relative: an address is at most 108 bytes
    server.close()


def circle(path: Path) -> None:
    path.symlink_to(path.with_name("other"))
    path.with_name("other").symlink_to(path.name)


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def closed(path: Path) -> None:
    path.write_text("{}")
    path.chmod(0)


def closed_folder(path: Path) -> None:
    path.mkdir()
    (path / "x").write_text("")
    path.chmod(0)


ODD_FILES: dict[str, tuple[Callable[[Path], Any], bool]] = {
    "a FIFO": (fifo, False),
    "a socket": (listening, False),
    "a folder": (Path.mkdir, False),
    "a circle of links": (circle, False),
    "a link to nothing": (dangling, False),
    "a link to /dev/zero": (lambda path: path.symlink_to("/dev/zero"), False),
    "without permission": (closed, True),
    "an empty file": (Path.touch, False),
}
ODD_NAMES = {
    "of 300 characters": "x" * 300,
    "of 5000 characters": "y/" * 2500,
    "with NUL": "a\0b",
    "of an unknown user": "~nobody-of-this-name/x",
    "that is not there": "./missing/place",
    "below a file": "/etc/hostname/x",
}

GOOD: dict[str, Any] = {
    "model": {"path": "m"},
    "data": {"train": "rows.jsonl"},
    "rewards": ["exact_match"],
    "run": {"dir": "out"},
}


def written(folder: Path, **changes: Any) -> Path:
    """A config that is sound but for the changes, which replace the values of its sections."""
    values = json.loads(json.dumps(GOOD))
    for section, fields in changes.items():
        values[section] = values.get(section, {}) | fields if isinstance(fields, dict) else fields
    path = folder / "config.yaml"
    path.write_text(json.dumps(values))
    return path


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    return Image.new(mode, (width, height))


def user(content: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": content}], "image": "a.png"}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


ASKED = user("?")["prompt"]
SEEN = {"prompt": "?", "image": "a.png"}
