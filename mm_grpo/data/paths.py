"""Strings in `data.train`: files, folders of shards or of save_to_disk, globs, a dataset of the hub.

    rows.jsonl, rows.json, rows.csv, ...   a file (`SUFFIXES`)
    saved                                  a folder with state.json or dataset_dict.json
    shards                                 a folder of files of one kind, of one split
    saved:test, shards:test                one split of it
    rows/*.parquet, rows/**/*.jsonl        every file that matches, in the order of their names
    owner/name[:config][:split]            nothing here, but perhaps a dataset of the hub

Not here: how any of them is read (readers.py). To add a kind of file: its suffix here and its reader there.
"""

from __future__ import annotations

import difflib
import glob
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mm_grpo.data.columns import quoted
from mm_grpo.errors import DataError
from mm_grpo.files import expand_glob, expand_home, short_path

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")
LEGAL = (
    f"legal is the path of a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file, of a folder of those or of one written "
    "by save_to_disk, a glob, a list of paths, owner/name[:config][:split] of the hub, a list of rows, a "
    "datasets.Dataset, or a mapping such as {task: shapes, ...}"
)
_NOT_ROWS = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json")
_SHARD = re.compile(r"(?:(?P<split>.*?)[-_.])?\d{5}-of-(?P<count>\d{5})$")
_SPLITS = re.compile(
    r"(train|training|test|testing|validation|valid|val|dev|eval)(?![A-Za-z])", re.IGNORECASE
)
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.-]+){0,2}")


@dataclass(frozen=True)
class Found:
    """One thing that holds rows: a file, or a folder that save_to_disk wrote with the split that was asked for."""

    kind: Literal["file", "saved", "hub"]
    path: str
    split: str | None = None


def find(given: str, name: str) -> list[Found]:
    """Resolve a string to its files, in order. `name` is the dataset's, for messages.

    Raises:
        DataError: it names nothing, or files that do not belong together.
    """
    try:
        path, split = Path(expand_home(given)), None
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        whole, _, split = str(path).rpartition(":")
        if not (whole and os.path.isdir(whole)):
            return _not_a_path(given, path, name)
        path = Path(whole)
    except (OSError, ValueError) as error:  # a circle of links; an unknown user, a NUL, half a character
        raise DataError(
            f"{name}: {short_path(ascii(given)[1:-1])} cannot be read ({error}); {LEGAL}"
        ) from None
    if path.is_dir():
        return _folder(path, split, name)
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"{name}: {path} has the suffix {path.suffix!r}; {LEGAL}")
    return [Found("file", str(path))]


def missing(path: Path) -> str:
    """Say where a path does not exist, and what is near."""
    if path.is_symlink():
        return f"{path} is a link to {os.readlink(path)}, which does not exist; {LEGAL}"
    return f"{path} does not exist; {_there(path.absolute().parent, path.name)} ({LEGAL})"


def _not_a_path(given: str, path: Path, name: str) -> list[Found]:
    """What a string names that is no path: files by a glob, or a dataset of the hub."""
    if glob.has_magic(given):
        return _matching(str(path), name)
    if re.fullmatch(r"[\w.-]+/[\w.-]+@\w+", given):
        raise DataError(
            f"{name}: {given} does not exist; a split of a hub's dataset is written {given.replace('@', ':')}"
        )
    if _HUB.fullmatch(given) and not given.lower().endswith(SUFFIXES):
        return [Found("hub", given)]
    raise DataError(f"{name}: {missing(path)}")


def _there(folder: Path, wanted: str) -> str:
    if not os.access(folder, os.R_OK | os.X_OK):
        return f"nor does its folder {folder}, or it may not be listed"
    names = sorted(entry.name for entry in folder.iterdir())
    near = difflib.get_close_matches(wanted, names, n=3)
    return f"near names in {folder}: {quoted(near)}" if near else f"{folder} holds: {quoted(names[:10])}"


def _matching(pattern: str, name: str) -> list[Found]:
    """The files and saved datasets that match a glob."""
    found: list[Found] = []
    for path in map(Path, expand_glob(pattern)):
        if _is_saved(path) if path.is_dir() else _is_rows(path):
            found.append(Found("saved" if path.is_dir() else "file", str(path)))
    if not found:
        folder = Path(os.path.dirname(pattern) or ".")
        raise DataError(
            f"{name}: no file matches {pattern}; {_there(folder, os.path.basename(pattern))} ({LEGAL})"
        )
    _one_set([Path(each.path) for each in found if each.kind == "file"], pattern, name)
    return found


def _folder(path: Path, split: str | None, name: str) -> list[Found]:
    if _is_saved(path):
        return [Found("saved", str(path), split)]
    try:
        entries = sorted(path.iterdir())
    except OSError as error:
        raise DataError(f"{name}: {path} cannot be listed ({error.strerror or error})") from None
    files = [each for each in entries if _is_rows(each) and not each.name.startswith((".", "_"))]
    if split is not None:
        files = [each for each in files if _split_of(each) == split]
    if not files:
        inner = next((each.name for each in entries if each.is_dir() and any(each.glob("*.parquet"))), None)
        hint = f"; its folder {inner} holds some: give {path / inner}" if inner else ""
        wanted = "" if split is None else f" of the split {split!r}"
        raise DataError(
            f"{name}: {path} is a folder that save_to_disk did not write, and it holds no file "
            f"{', '.join(SUFFIXES)}{wanted}{hint}; it holds: {quoted(each.name for each in entries[:10])}"
        )
    _one_set(files, str(path), name)
    return [Found("file", str(each)) for each in files]


def _one_set(files: Sequence[Path], what: str, name: str) -> None:
    """Refuse files that are not the parts of one set: of several kinds, of several splits, or not all of them."""
    kinds = sorted({each.suffix.lower() for each in files})
    splits = sorted({_split_of(each) or "no split" for each in files})
    if len(kinds) > 1 or len(splits) > 1:
        raise DataError(
            f"{name}: {what} holds files of several kinds or splits ({', '.join(kinds)}; {', '.join(splits)}); give a "
            "narrower pattern, a folder as FOLDER:SPLIT, or a list of paths to have them all"
        )
    shards = Counter((each.parent, int(m["count"])) for each in files if (m := _SHARD.match(each.stem)))
    for (_, count), there in shards.items():
        if there < count:
            raise DataError(
                f"{name}: {what} has {there} of {count} shards; download the rest, or name the files in a list"
            )


def _split_of(path: Path) -> str | None:
    """The split that a file's name tells: train of train-00000-of-00002.parquet and of train.jsonl."""
    shard = _SHARD.match(path.stem)
    found = _SPLITS.match((shard["split"] or "") if shard else path.stem)
    return found[1].lower() if found else shard and shard["split"]


def _is_rows(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and path.name not in _NOT_ROWS


def _is_saved(path: Path) -> bool:
    return any((path / file).is_file() for file in ("state.json", "dataset_dict.json"))
