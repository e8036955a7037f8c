"""The record of a hostile case, and what cases put in the place of files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Content = str | bytes | Callable[[Path], Any]


@dataclass(frozen=True)
class Case:
    """A command, what is wrong, and what it ends in.

    It is run in an empty folder, which is the home too. MODEL there leads to a tiny model, config.yaml is a sound
    config but for `config` (its changes, or its whole text), `files` are written beside it, and a copy of MODEL at m/
    is damaged by `model`. With `run`, out/ is the folder of a run that was "stopped" in step 4 of 4, or has "ended",
    and `damage` changes it. `words` are in the message. The user's files are as they were, and nothing is new.
    """

    name: str
    command: str
    words: tuple[str, ...] = ()
    code: int = 2
    config: Mapping[str, Any] | str | bytes = field(default_factory=dict)
    files: Mapping[str, Content] = field(default_factory=dict)
    model: Callable[[Path], Any] | None = None
    run: str = ""
    damage: Callable[[Path], Any] = lambda out: None
    within: Callable[[Path], AbstractContextManager[Any]] = lambda folder: nullcontext()
    after: Callable[[Path], Any] = lambda folder: None
    full_disk: bool = False

    @property
    def kind(self) -> str:
        return self.name.split(":")[0]


def fifo(path: Path) -> None:
    os.mkfifo(path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
