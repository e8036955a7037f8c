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
import stat
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
_SHARD = re.compile(r"(?:(?P<split>.*?)[-_.])?(?P<at>\d{5})-of-(?P<count>\d{5})$")
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
        path = Path(expand_home(given))
        mode = _mode(path)
        split = None
        if mode is None and ":" in given:
            whole, _, split = expand_home(given).rpartition(":")
            path, mode = (Path(whole), _mode(Path(whole))) if whole else (path, None)
            if mode is None or not stat.S_ISDIR(mode):
                path, mode, split = Path(expand_home(given)), None, None
    except OSError as error:
        raise DataError(
            f"{name}: {short_path(given)} cannot be read ({error.strerror or error}); {LEGAL}"
        ) from None
    except ValueError as error:  # an unknown user, a NUL, half a character
        raise DataError(f"{name}: {given!r} is no path: {error}") from None
    if mode is None and glob.has_magic(given):
        return _matching(str(path), name)
    if mode is None and re.fullmatch(r"[\w.-]+/[\w.-]+@\w+", given):
        raise DataError(
            f"{name}: {given} does not exist; a split of a hub's dataset is written {given.replace('@', ':')}"
        )
    if mode is None and is_hub_name(given):
        return [Found("hub", given)]
    if mode is None:
        raise missing(path, name)
    if stat.S_ISDIR(mode):
        return _folder(path, split, name)
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"{name}: {path} has the suffix {path.suffix!r}; {LEGAL}")
    return [Found("file", str(path))]


def is_hub_name(given: str) -> bool:
    """True when a text has the form of a hub's dataset, and no suffix of a file."""
    return bool(_HUB.fullmatch(given)) and not given.lower().endswith(SUFFIXES)


def missing(path: Path, name: str) -> DataError:
    """Make the error for a path that does not exist."""
    folder = path.absolute().parent
    if not folder.is_dir():
        return DataError(f"{name}: {path} does not exist, nor does its folder {folder}; {LEGAL}")
    if path.is_symlink():
        return DataError(f"{name}: {path} is a link to {os.readlink(path)}, which does not exist; {LEGAL}")
    if not os.access(folder, os.R_OK):
        return DataError(f"{name}: {path} does not exist in {folder}, which may not be listed; {LEGAL}")
    return DataError(f"{name}: {path} does not exist in {folder}; {_there(folder, path.name)} ({LEGAL})")


def _there(folder: Path, wanted: str) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    near = difflib.get_close_matches(wanted, names, n=3)
    return f"near names there: {quoted(near)}" if near else f"it holds: {quoted(names[:10])}"


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


def _matching(pattern: str, name: str) -> list[Found]:
    """The files and saved datasets that match a glob."""
    found: list[Found] = []
    for match in expand_glob(pattern):
        if os.path.isdir(match):
            found += [Found("saved", match)] if _is_saved(Path(match)) else []
        elif match.lower().endswith(SUFFIXES) and os.path.basename(match) not in _NOT_ROWS:
            found.append(Found("file", match))
    if not found:
        folder = Path(os.path.dirname(pattern) or ".")
        there = (
            _there(folder, os.path.basename(pattern)) if folder.is_dir() else f"there is no folder {folder}"
        )
        raise DataError(f"{name}: no file matches {pattern}; {there} ({LEGAL})")
    _one_set(
        [Path(each.path) for each in found if each.kind == "file"], pattern, name, "write a narrower pattern"
    )
    return found


def _folder(path: Path, split: str | None, name: str) -> list[Found]:
    if _is_saved(path):
        return [Found("saved", str(path), split)]
    try:
        entries = sorted(path.iterdir())
    except OSError as error:
        raise DataError(f"{name}: {path} cannot be listed ({error.strerror or error})") from None
    files = [
        each
        for each in entries
        if each.suffix.lower() in SUFFIXES
        and not each.name.startswith((".", "_"))
        and each.name not in _NOT_ROWS
    ]
    if not files:
        inner = next((each.name for each in entries if each.is_dir() and any(each.glob("*.parquet"))), None)
        hint = f"; its folder {inner} holds some: give {path / inner}" if inner else ""
        raise DataError(
            f"{name}: {path} is a folder that save_to_disk did not write (no state.json, no dataset_dict.json), and it "
            f"holds no file {', '.join(SUFFIXES)}{hint}"
        )
    if split is not None:
        splits = {_split_of(each) for each in files}
        files = [each for each in files if _split_of(each) == split]
        if not files:
            known = (
                quoted(sorted(each for each in splits if each)) if splits != {None} else "none by their names"
            )
            raise DataError(f"{name}: {path} has no files of the split {split!r}; it has: {known}")
    _one_set(files, str(path), name, f"give {path}:SPLIT")
    return [Found("file", str(each)) for each in files]


def _one_set(files: Sequence[Path], what: str, name: str, remedy: str) -> None:
    """Refuse files that are not the parts of one set: of several kinds, of several splits, or not all of them."""
    kinds = sorted({each.suffix.lower() for each in files})
    if len(kinds) > 1:
        raise DataError(
            f"{name}: {what} holds files of several kinds ({', '.join(kinds)}); give a pattern such as *{kinds[0]}, or "
            "a list of paths"
        )
    splits = sorted({_split_of(each) or "" for each in files})
    if len(splits) > 1:
        raise DataError(
            f"{name}: {what} holds several splits ({', '.join(each or 'files of none' for each in splits)}); {remedy}, "
            "or a list of paths to have them all"
        )
    by_count: dict[tuple[str, int], set[int]] = {}
    for each in files:
        shard = _SHARD.match(each.stem)
        if shard:
            by_count.setdefault((str(each.parent), int(shard["count"])), set()).add(int(shard["at"]))
    for (_, count), there in by_count.items():
        lost = sorted(set(range(count)) - there)
        if lost:
            raise DataError(
                f"{name}: {what} has {len(there)} of {count} shards; missing: "
                f"{', '.join(f'{at:05d}' for at in lost[:5])}. Download the rest, or name the files in a list"
            )


def _split_of(path: Path) -> str | None:
    """The split that a file's name tells: train of train-00000-of-00002.parquet and of train.jsonl."""
    shard = _SHARD.match(path.stem)
    found = _SPLITS.match((shard["split"] or "") if shard else path.stem)
    if found:
        return found[1].lower()
    return (shard["split"] or None) if shard else None


def _is_saved(path: Path) -> bool:
    return any((path / file).is_file() for file in ("state.json", "dataset_dict.json"))
