"""Strings in `data.train`: files, folders of shards or of save_to_disk, globs, datasets of the hub.

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
NOT_ROWS = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json")
_SHARD = re.compile(r"(?:(?P<split>.*?)[-_.])?(?P<number>\d{5,})[-_]of[-_](?P<total>\d{5,})(-[0-9a-f]{16})?$")
SPLITS = re.compile(r"(train|training|test|testing|validation|valid|val|dev|eval)(?![A-Za-z])", re.IGNORECASE)
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.-]+){0,2}")


@dataclass(frozen=True)
class Location:
    """Place of rows: a file, a folder that save_to_disk wrote, or a dataset of the hub."""

    kind: Literal["file", "saved", "hub"]
    path: str
    """For the hub owner/name[[:config]:split]."""
    split: str | None = None
    """Split of a saved DatasetDict; None if the string names none."""


def find(source: str, name: str) -> list[Location]:
    """Resolve a string to its files, in order. Messages call the dataset `name`.

    Raises:
        DataError: it names nothing, or files that do not belong together.
    """
    try:
        path, split = Path(expand_home(source)), None
        folder, _, suffix = str(path).rpartition(":")
        if os.path.isdir(folder) and not path.exists():
            path, split = Path(folder), suffix
        if path.is_dir():
            return _folder(path, split, name)
        if path.exists():
            if path.suffix.lower() not in SUFFIXES:
                raise DataError(f"{name}: {path} has the suffix {path.suffix!r}; {LEGAL}")
            return [Location("file", str(path))]
    except (OSError, ValueError) as error:  # no permission; an unknown user, half a character
        raise DataError(f"{name}: {short_path(ascii(source)[1:-1])} cannot be read ({error})") from None
    if glob.has_magic(source):
        return _one_set([match for match in map(Path, expand_glob(str(path))) if _is_rows(match)], path, name)
    if _HUB.fullmatch(source) and not source.lower().endswith(SUFFIXES):
        return [Location("hub", source)]
    raise DataError(f"{name}: {missing(path)}")


def check_shards(files: Sequence[str], name: str) -> None:
    """Raise DataError unless shards (train-00000-of-00003.parquet) are complete sets, counted from 0 or from 1.

    Several folders may hold one set between them, or a set each.
    """
    sets: dict[tuple[str, str, int], Counter[int]] = {}
    totals: dict[tuple[str, str, Path], int] = {}
    for path in map(Path, files):
        if shard := _SHARD.fullmatch(path.stem):
            stem, suffix, total = path.stem[: shard.start("number")], path.suffix.lower(), int(shard["total"])
            sets.setdefault((stem, suffix, total), Counter())[int(shard["number"])] += 1
            first_total = totals.setdefault((stem, suffix, path.parent), total)
            if first_total != total or files.count(str(path)) > 1:
                why = "is named twice"
                if first_total != total:
                    why = f"lies beside shards of a set of {first_total}"
                raise DataError(f"{name}: {path} {why}; remove what is too much")
    for (stem, suffix, total), counts in sets.items():
        first = int(total in counts and 0 not in counts)
        lacks = [n for n in range(first, first + total) if counts[n] < max(counts.values())]
        if lacks or len(counts) > total:
            problem, numbers = ("missing", lacks) if lacks else ("past the last", [max(counts)])
            raise DataError(
                f"{name}: {stem}{numbers[0]:05d}-of-{total:05d}{suffix} is {problem} (shards {brief(numbers)}, counted "
                f"from {first}); give the whole set, or name a shard alone to train on a part"
            )


def missing(path: Path) -> str:
    """Return a sentence that a path does not exist, with names near it."""
    folder = path.absolute().parent
    if not os.access(folder, os.R_OK | os.X_OK):
        return f"{path} does not exist; nor does its folder {folder}, or it may not be listed ({LEGAL})"
    names = sorted(os.listdir(folder))
    near = difflib.get_close_matches(path.name, names, n=3) or names[:10]
    return f"{path} does not exist; {folder} holds: {quoted(near)} ({LEGAL})"


def _folder(path: Path, split: str | None, name: str) -> list[Location]:
    if _is_saved(path):
        return [Location("saved", str(path), split)]
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith((".", "_")))
    files = [f for f in entries if _is_rows(f) and not f.is_dir() and split in (None, _split_of(f))]
    if not files:
        of_split = "" if split is None else f" of the split {split!r}"
        raise DataError(
            f"{name}: {path} is a folder that save_to_disk did not write, and it holds no file "
            f"{', '.join(SUFFIXES)}{of_split}; it holds: {quoted(entry.name for entry in entries[:10])}"
        )
    return _one_set(files, path, name)


def _one_set(paths: list[Path], what: Path, name: str) -> list[Location]:
    """Return the locations of the paths. DataError if there are none, or of several kinds or splits."""
    if not paths:
        raise DataError(f"{name}: no file matches; {missing(what)}")
    files = [path for path in paths if not path.is_dir()]
    kinds = sorted({file.suffix.lower() for file in files})
    splits = sorted({_split_of(file) or "no split" for file in files})
    if len(kinds) > 1 or len(splits) > 1:
        raise DataError(
            f"{name}: {what} holds files of several kinds or splits ({', '.join(kinds)}; {', '.join(splits)}); give a "
            "narrower pattern, a folder as FOLDER:SPLIT, or a list of paths to have them all"
        )
    return [Location("saved" if path.is_dir() else "file", str(path)) for path in paths]


def _split_of(path: Path) -> str | None:
    """Return the split in a file's name: train of train-00000-of-00002.parquet and of train.jsonl."""
    shard = _SHARD.match(path.stem)
    split = SPLITS.match((shard["split"] or "") if shard else path.stem)
    return split[1].lower() if split else shard and shard["split"]


def _is_rows(path: Path) -> bool:
    if path.is_dir():
        return _is_saved(path)
    return path.suffix.lower() in SUFFIXES and path.name not in NOT_ROWS


def _is_saved(path: Path) -> bool:
    return any((path / file).is_file() for file in ("state.json", "dataset_dict.json"))
