"""Strings in `data.train`: files, folders of shards or of save_to_disk, globs, a dataset of the hub.

    rows.jsonl, rows.json, rows.csv, ...   a file (`SUFFIXES`)
    saved                                  a folder with state.json or dataset_dict.json
    shards                                 a folder of files of one kind, of one split
    saved:test, shards:test                one split of it
    rows/*.parquet, rows/**/*.jsonl        every file that matches, in the order of their names
    owner/name[[:config]:split]            nothing here, but perhaps a dataset of the hub

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

from mm_grpo.data.columns import brief, quoted
from mm_grpo.errors import DataError
from mm_grpo.files import expand_glob, expand_home, short_path

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")
LEGAL = (
    f"legal is the path of a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file, of a folder of those or of one written "
    "by save_to_disk, a glob, a list of paths, owner/name[[:config]:split] of the hub, a list of rows, a "
    "datasets.Dataset, or a mapping such as {task: shapes, ...}"
)
_NOT_ROWS = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json")
_SHARD = re.compile(r"(?:(?P<split>.*?)[-_.])?(?P<number>\d{5,})[-_]of[-_](?P<total>\d{5,})(-[0-9a-f]{16})?$")
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
        whole, _, last = str(path).rpartition(":")
        if os.path.isdir(whole) and not path.exists():
            path, split = Path(whole), last
        if path.is_dir():
            return _folder(path, split, name)
        if path.exists():
            if path.suffix.lower() not in SUFFIXES:
                raise DataError(f"{name}: {path} has the suffix {path.suffix!r}; {LEGAL}")
            return [Found("file", str(path))]
    except (OSError, ValueError) as error:  # a folder of another user's; an unknown user, half a character
        raise DataError(f"{name}: {short_path(ascii(given)[1:-1])} cannot be read ({error})") from None
    if glob.has_magic(given):
        return _one_set([each for each in map(Path, expand_glob(str(path))) if _is_rows(each)], path, name)
    if _HUB.fullmatch(given) and not given.lower().endswith(SUFFIXES):
        return [Found("hub", given)]
    raise DataError(f"{name}: {missing(path)}")


def check_shards(files: Sequence[str], name: str) -> None:
    """Refuse shards (train-00000-of-00003.parquet) that are no whole sets, counted from 0 or from 1. DataError.

    Several folders may hold one set between them, or a set each.
    """
    sets: dict[tuple[str, str, int], Counter[int]] = {}
    totals: dict[tuple[str, str, Path], int] = {}
    for path in map(Path, files):
        if shard := _SHARD.fullmatch(path.stem):
            stem, suffix, total = path.stem[: shard.start("number")], path.suffix.lower(), int(shard["total"])
            sets.setdefault((stem, suffix, total), Counter())[int(shard["number"])] += 1
            other = totals.setdefault((stem, suffix, path.parent), total)
            if other != total or files.count(str(path)) > 1:
                why = "is named twice" if other == total else f"lies beside shards of a set of {other}"
                raise DataError(f"{name}: {path} {why}; remove what is too much")
    for (stem, suffix, total), counts in sets.items():
        first = int(total in counts and 0 not in counts)
        lacks = [n for n in range(first, first + total) if counts[n] < max(counts.values())]
        if lacks or len(counts) > total:
            what, numbers = ("missing", lacks) if lacks else ("past the last", [max(counts)])
            raise DataError(
                f"{name}: {stem}{numbers[0]:05d}-of-{total:05d}{suffix} is {what} (shards {brief(numbers)}, counted "
                f"from {first}); give the whole set, or name a shard alone to train on a part"
            )


def missing(path: Path) -> str:
    """Say that a path does not exist, and what is near."""
    folder = path.absolute().parent
    if not os.access(folder, os.R_OK | os.X_OK):
        return f"{path} does not exist; nor does its folder {folder}, or it may not be listed ({LEGAL})"
    names = sorted(os.listdir(folder))
    near = difflib.get_close_matches(path.name, names, n=3) or names[:10]
    return f"{path} does not exist; {folder} holds: {quoted(near)} ({LEGAL})"


def _folder(path: Path, split: str | None, name: str) -> list[Found]:
    if _is_saved(path):
        return [Found("saved", str(path), split)]
    entries = sorted(each for each in path.iterdir() if not each.name.startswith((".", "_")))
    files = [
        each for each in entries if _is_rows(each) and not each.is_dir() and split in (None, _split_of(each))
    ]
    if not files:
        wanted = "" if split is None else f" of the split {split!r}"
        raise DataError(
            f"{name}: {path} is a folder that save_to_disk did not write, and it holds no file "
            f"{', '.join(SUFFIXES)}{wanted}; it holds: {quoted(each.name for each in entries[:10])}"
        )
    return _one_set(files, path, name)


def _one_set(paths: list[Path], what: Path, name: str) -> list[Found]:
    """What the paths hold. DataError where there is none, and for several kinds or splits."""
    if not paths:
        raise DataError(f"{name}: no file matches; {missing(what)}")
    files = [each for each in paths if not each.is_dir()]
    kinds = sorted({each.suffix.lower() for each in files})
    splits = sorted({_split_of(each) or "no split" for each in files})
    if len(kinds) > 1 or len(splits) > 1:
        raise DataError(
            f"{name}: {what} holds files of several kinds or splits ({', '.join(kinds)}; {', '.join(splits)}); give a "
            "narrower pattern, a folder as FOLDER:SPLIT, or a list of paths to have them all"
        )
    return [Found("saved" if each.is_dir() else "file", str(each)) for each in paths]


def _split_of(path: Path) -> str | None:
    """The split that a file's name tells: train of train-00000-of-00002.parquet and of train.jsonl."""
    shard = _SHARD.match(path.stem)
    found = _SPLITS.match((shard["split"] or "") if shard else path.stem)
    return found[1].lower() if found else shard and shard["split"]


def _is_rows(path: Path) -> bool:
    if path.is_dir():
        return _is_saved(path)
    return path.suffix.lower() in SUFFIXES and path.name not in _NOT_ROWS


def _is_saved(path: Path) -> bool:
    return any((path / file).is_file() for file in ("state.json", "dataset_dict.json"))
