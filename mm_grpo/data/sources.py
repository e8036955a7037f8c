"""Where rows come from: `load` makes a `Dataset` of whatever `data.train` or `train=` may be.

    a path          .jsonl, .json (a list of rows), .parquet, or a folder written by save_to_disk
    rows            a list or tuple of mappings
    a dataset       of the datasets library
    a mapping       {task: shapes, ...}: rows made by a function, whose arguments the other keys are;
                    with `shuffle_images: true` each row gets another row's images

Relative image paths start at `data.image_dir`; where that is not set, at the folder of the dataset's
file, or at the working folder for rows in memory. Nothing is downloaded.

To add a task: a function with keyword arguments that returns rows, and its line in `TASKS`. To add a
kind of file: a reader of its rows and their names, and its suffix in `_load_path`.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from mm_grpo.data.arrow import as_rows, read_folder, read_parquet
from mm_grpo.data.dataset import Dataset, DataSettings
from mm_grpo.data.layouts import did_you_mean, quoted
from mm_grpo.errors import DataError

TASKS = {"shapes": "mm_grpo.data.shapes:shapes_rows"}

_LEGAL = (
    "legal is the path of a .jsonl, .json or .parquet file or of a folder written by save_to_disk, "
    "a list of rows, a datasets.Dataset, or a mapping such as {task: shapes, ...}"
)
_BLANK = object()


def load(source: Any, settings: DataSettings, name: str = "train", *, verify: bool = True) -> Dataset:
    """The dataset of a source; the module's docstring lists the kinds.

    Args:
        source: what `data.train` or `data.eval` holds, or what was given in Python.
        settings: the config's section `data`.
        name: the first half of every uid, such as "train" or "eval".
        verify: False leaves wrong rows to `Dataset.check`.

    Raises:
        DataError: the source is unknown, missing, broken or empty, or a row of it is wrong.
    """
    if isinstance(source, Dataset):
        return source
    if isinstance(source, str | os.PathLike):
        return _load_path(Path(os.fspath(source)).expanduser(), settings, name, verify)
    if isinstance(source, list | tuple):
        return Dataset(source, settings, name=name, verify=verify)
    if hasattr(source, "column_names"):
        rows = as_rows(source, settings.columns, f"the dataset {name!r}")
        return Dataset(rows, settings, name=name, verify=verify)
    if isinstance(source, Mapping):
        return _load_task(source, settings, name, verify)
    raise DataError(f"{name}: the data is a {type(source).__name__}; {_LEGAL}")


def _load_task(source: Mapping[str, Any], settings: DataSettings, name: str, verify: bool) -> Dataset:
    if "task" not in source:
        raise DataError(
            f"{name}: the data is a mapping with the keys {quoted(source)} and no 'task'; {_LEGAL}"
        )
    options = {key: value for key, value in source.items() if key not in ("task", "shuffle_images")}
    task, shuffle = source["task"], source.get("shuffle_images", False)
    if not isinstance(task, str) or task not in TASKS:
        raise DataError(f"{name}: the task is {task!r}; known tasks: {quoted(TASKS)}")
    if not isinstance(shuffle, bool):
        raise DataError(f"{name}: shuffle_images is {shuffle!r}; legal is true or false")
    module, function_name = TASKS[task].split(":")
    function = getattr(import_module(module), function_name)
    parameters = inspect.signature(function).parameters
    what = f"{name}: the task {task!r}"
    for key in options:
        if key not in parameters:
            legal = [*parameters, "shuffle_images"]
            raise DataError(
                f"{what} has no option {key!r}{did_you_mean(key, legal)}. Its options: {quoted(legal)}"
            )
    missing = [key for key, p in parameters.items() if p.default is p.empty and key not in options]
    if missing:
        raise DataError(f"{what} needs {quoted(missing)}. Its options: {quoted(parameters)}")
    try:
        rows = function(**options)
    except DataError as error:
        raise DataError(f"{what}: {error}") from error
    dataset = Dataset(rows, settings, name=name, row_name=lambda i: f"{name} ({task}) row {i}", verify=verify)
    return dataset.with_shuffled_images() if shuffle else dataset


def _load_path(path: Path, settings: DataSettings, name: str, verify: bool) -> Dataset:
    if not path.exists():
        raise _missing(path, name)
    kind = "a folder" if path.is_dir() else path.suffix.lower()
    folder = path if path.is_dir() else path.parent

    def row_name(index: int) -> str:
        return f"{path}:{lines[index]}" if lines else f"{path} row {index}"

    rows: Any
    lines: list[int] = []
    if kind == ".jsonl":
        rows, lines = _read_jsonl(path)
    elif kind == ".json":
        rows = _read_json(path)
    elif kind in (".parquet", "a folder"):
        stored = read_parquet(path) if kind == ".parquet" else read_folder(path)
        rows = as_rows(stored, settings.columns, str(path))
    else:
        raise DataError(f"{name}: {path} has the suffix {path.suffix!r}; {_LEGAL}")
    return Dataset(rows, settings, name=name, row_name=row_name, folder=folder, verify=verify)


def _missing(path: Path, name: str) -> DataError:
    folder = path.absolute().parent
    if not folder.is_dir():
        return DataError(f"{name}: {path} does not exist, nor does its folder {folder}; {_LEGAL}")
    there = sorted(entry.name for entry in folder.iterdir())
    near = difflib.get_close_matches(path.name, there, n=3)
    hint = f"near names there: {quoted(near)}" if near else f"it holds: {quoted(there[:10])}"
    return DataError(f"{name}: {path} does not exist in {folder}; {hint} ({_LEGAL})")


def _read_jsonl(path: Path) -> tuple[list[Any], list[int]]:
    """One row per line, and the number of each row's line, from 1; blank lines are skipped."""
    rows, lines = [], []
    with path.open("rb") as file:  # bytes: in text, a U+2028 inside a string would end the line
        for number, line in enumerate(file, start=1):
            row = _parse(line, f"{path}:{number}")
            if row is not _BLANK:
                rows.append(row)
                lines.append(number)
    _refuse_empty(rows, path)
    return rows, lines


def _read_json(path: Path) -> list[Any]:
    rows = _parse(path.read_bytes(), str(path))
    rows = [] if rows is _BLANK else rows
    if not isinstance(rows, list):
        raise DataError(
            f"{path}: holds one {type(rows).__name__}; legal is a list of rows, or a .jsonl file of them"
        )
    _refuse_empty(rows, path)
    return rows


def _parse(data: bytes, where: str) -> Any:
    try:
        text = data.decode("utf-8-sig")
        return json.loads(text) if text.strip() else _BLANK
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: is not UTF-8 (at byte {error.start}); save it as UTF-8") from error
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno} column {error.colno}"
        remedy = "mend or remove it"
        if error.msg == "Extra data" and where.endswith(".json"):
            remedy = "if it holds one row a line, call it .jsonl"
        raise DataError(f"{where}: is not valid JSON ({error.msg} at {place}); {remedy}") from error
    except (ValueError, RecursionError) as error:  # thousands of digits, or of lists in lists
        raise DataError(f"{where}: cannot be read ({error}); mend or remove it") from error


def _refuse_empty(rows: list[Any], path: Path) -> None:
    if not rows:
        raise DataError(f"{path}: is empty; it needs at least 1 row")
