"""Where rows come from: `load` makes a `Dataset` of whatever `data.train` or `train=` may be.

`load_train` and `load_eval` are what a config trains on and is evaluated on. A source is

    a path          .jsonl, .json (a list of rows), .parquet, or a folder written by save_to_disk
    rows            a list or tuple of mappings
    a dataset       of the datasets library
    a mapping       {task: shapes, ...}: rows made by a function, whose arguments the other keys are;
                    with `shuffle_images: true` each row gets another row's images

Relative image paths start at `data.image_dir`; where that is not set, at the folder of the dataset's
file, or at the working folder for rows in memory. Nothing is downloaded.

The image columns of a `datasets.Dataset` are read as they are stored: plain indexing would decode every image,
whatever its size, and past the limits of images.py. The library itself is imported only to read a file.

To add a task: a function with keyword arguments that returns rows, and its line in `TASKS`. To add a
kind of file: a reader of its rows and their names, and its suffix in `_load_path`.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_grpo.data.columns import PROMPT_FIELDS, did_you_mean, locate, quoted
from mm_grpo.data.dataset import FIRST_ROWS, Dataset, DataSettings, Rows
from mm_grpo.data.image_columns import MissingImages, check_images, missing_images
from mm_grpo.data.jsonl import read_json, read_jsonl
from mm_grpo.data.layouts import MissingPrompt
from mm_grpo.errors import DataError, UserError
from mm_grpo.files import expand_home, short_path

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig

Source = Any
"""Rows (a list of dicts or a datasets.Dataset), a path, or a task mapping such as {"task": "shapes"}."""
TASKS = {"shapes": "mm_grpo.data.shapes:shapes_rows"}

_LEGAL = (
    "legal is the path of a .jsonl, .json or .parquet file or of a folder written by save_to_disk, "
    "a list of rows, a datasets.Dataset, or a mapping such as {task: shapes, ...}"
)


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
        return _load_path(os.fspath(source), settings, name, verify)
    if isinstance(source, list | tuple):
        return Dataset(source, settings, name=name, verify=verify)
    if hasattr(source, "column_names"):
        rows = _library_rows(source, settings.columns, f"the dataset {name!r}")
        return Dataset(rows, settings, name=name, verify=verify)
    if isinstance(source, Mapping):
        return _load_task(source, settings, name, verify)
    raise DataError(f"{name}: the data is a {type(source).__name__}; {_LEGAL}")


def load_train(
    config: GRPOConfig,
    given: Source | None = None,
    *,
    verify: bool = True,
    needs: Callable[[Sequence[str]], None] | None = None,
) -> Dataset:
    """The training rows: `given`, else `data.train`. DataError when there are none.

    With `verify` the rows are checked at once, and the first wrong one raises. Rows whose images would not be read are
    refused in any case, unless `data.text_only`. `needs` is given the names of the columns, and raises for those that
    are missing (`Scorer.check`): one message has all that the first rows lack.
    """
    source = config.data.train if given is None else given
    if source is None:
        raise DataError("data.train is not set: give a .jsonl path, a task mapping, or train=rows in Python")
    return _load_checked(source, config, "train", verify, needs)


def load_eval(
    config: GRPOConfig,
    given: Source | Mapping[str, Source] | None = None,
    *,
    verify: bool = True,
    needs: Callable[[Sequence[str]], None] | None = None,
) -> dict[str, Dataset]:
    """The evaluation sets by name, the headline first; a single source is named "eval". Options as of `load_train`."""
    if given is None:
        sources: Mapping[str, Source] = config.data.eval_sets()
    elif isinstance(given, Mapping) and "task" not in given:
        sources = given
    else:
        sources = {"eval": given}
    return {name: _load_checked(source, config, name, verify, needs) for name, source in sources.items()}


def _load_checked(
    source: Source, config: GRPOConfig, name: str, verify: bool, needs: Callable[[Sequence[str]], None] | None
) -> Dataset:
    """The dataset, unless something that all rows need is missing; each row is read once."""
    text_only = config.data.text_only
    dataset = load(source, config.data, name, verify=False)
    missing: list[UserError] = []
    no_prompt = _missing_prompt(dataset)
    try:
        if no_prompt is not None and not text_only:
            lost = missing_images(dataset.encoded_values(0), dataset.row_name(0))
            missing += [lost] if lost else []
        elif not text_only:
            check_images(dataset, verify=verify)
        elif verify:
            dataset.verify()
    except MissingImages as error:
        missing.append(error)
    try:
        if needs is not None:
            needs(dataset.columns)
    except UserError as error:
        missing.append(error)
    if no_prompt is not None and (verify or missing):
        missing.insert(0, no_prompt)
    if len(missing) > 1:
        columns = quoted(dict.fromkeys(map(dataset.dataset_column, dataset.columns)))
        lines = [f"\n- {line}" for error in missing for line in str(error).splitlines()]
        raise DataError(
            f"{name}: the rows lack {len(lines)} things. Their columns are {columns}{''.join(lines)}"
        )
    if missing:
        raise missing[0]
    return dataset


def _missing_prompt(dataset: Dataset) -> MissingPrompt | None:
    """What is wrong with the first row, where none of the first rows has a column for the prompt."""
    first: MissingPrompt | None = None
    for index in range(min(len(dataset), FIRST_ROWS)):
        try:
            dataset.encoded_fields(index)
        except MissingPrompt as error:
            first = first or error
            continue
        except DataError:
            pass
        return None
    return first


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


def _load_path(given: str, settings: DataSettings, name: str, verify: bool) -> Dataset:
    try:
        path = Path(expand_home(given))
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(path, name) from None
    except OSError as error:
        raise DataError(
            f"{name}: {short_path(given)} cannot be read ({error.strerror or error}); {_LEGAL}"
        ) from None
    except ValueError as error:  # an unknown user, a NUL, half a character
        raise DataError(f"{name}: {given!r} is no path: {error}") from None
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise DataError(f"{name}: {path} is a pipe, a socket or a device, not a file; {_LEGAL}")
    kind = "a folder" if stat.S_ISDIR(mode) else path.suffix.lower()
    folder = path if kind == "a folder" else path.parent

    def row_name(index: int) -> str:
        return f"{path}:{lines[index]}" if lines else f"{path} row {index}"

    rows: Any
    lines: list[int] = []
    try:
        if kind == ".jsonl":
            rows, lines = read_jsonl(path)
        elif kind == ".json":
            rows = read_json(path)
        elif kind in (".parquet", "a folder"):
            stored = _read_parquet(path) if kind == ".parquet" else _read_folder(path)
            rows = _library_rows(stored, settings.columns, str(path))
        else:
            raise DataError(f"{name}: {path} has the suffix {path.suffix!r}; {_LEGAL}")
    except OSError as error:
        raise DataError(f"{name}: {path} cannot be read ({error.strerror or error})") from error
    return Dataset(rows, settings, name=name, row_name=row_name, folder=folder, verify=verify)


def _missing(path: Path, name: str) -> DataError:
    folder = path.absolute().parent
    if not folder.is_dir():
        return DataError(f"{name}: {path} does not exist, nor does its folder {folder}; {_LEGAL}")
    if path.is_symlink():
        return DataError(f"{name}: {path} is a link to {os.readlink(path)}, which does not exist; {_LEGAL}")
    if not os.access(folder, os.R_OK):
        return DataError(f"{name}: {path} does not exist in {folder}, which may not be listed; {_LEGAL}")
    there = sorted(entry.name for entry in folder.iterdir())
    near = difflib.get_close_matches(path.name, there, n=3)
    hint = f"near names there: {quoted(near)}" if near else f"it holds: {quoted(there[:10])}"
    return DataError(f"{name}: {path} does not exist in {folder}; {hint} ({_LEGAL})")


def _read_parquet(path: Path) -> Any:
    """The datasets.Dataset of a Parquet file."""
    with path.open("rb") as file:
        if file.read(4) != b"PAR1":
            raise DataError(f"{path}: is not a Parquet file (it does not begin with PAR1); write it again")
    from datasets import Dataset
    from datasets.exceptions import DatasetsError

    try:
        return Dataset.from_parquet(str(path))
    except (DatasetsError, OSError, ValueError) as error:
        raise DataError(
            f"{path}: cannot be read as Parquet ({error.__cause__ or error}); write it again"
        ) from error


def _read_folder(path: Path) -> Any:
    """What save_to_disk wrote into a folder: a datasets.Dataset or a DatasetDict."""
    if not any((path / file).is_file() for file in ("state.json", "dataset_dict.json")):
        raise DataError(
            f"{path}: is a folder that save_to_disk did not write; give a .jsonl, .json or .parquet file, "
            "or a folder with state.json or dataset_dict.json in it"
        )
    from datasets import load_from_disk
    from datasets.exceptions import DatasetsError

    try:
        return load_from_disk(str(path))
    except (
        DatasetsError,
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:  # by what is missing
        raise DataError(
            f"{path}: cannot be read as a saved dataset ({type(error).__name__}: {error}); write it again"
        ) from error


def _library_rows(dataset: Any, columns: Mapping[str, str], what: str) -> Rows:
    """The rows of a dataset, or of the only one in a DatasetDict.

    Args:
        dataset: a datasets.Dataset, or anything with a length, an index and `column_names`.
        columns: our name → the dataset's column, to know which columns belong to the prompt.
        what: what messages call the dataset.

    Raises:
        DataError: there are several splits, or the dataset is a stream.
    """
    if isinstance(dataset, Mapping):
        if len(dataset) != 1:
            raise DataError(
                f"{what}: holds {len(dataset)} splits ({quoted(dataset)}); give one of them: dataset[split] "
                "in Python, the split's own folder on disk"
            )
        dataset = next(iter(dataset.values()))
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(
            f"{what}: is a {type(dataset).__name__}, without length or index; an epoch is a permutation "
            "of all rows, so load it with streaming=False"
        )
    if not hasattr(dataset, "features") or dataset.format["type"] == "custom":
        rows: Rows = dataset  # not of the library, or with_transform makes its rows: they are as they are
        return rows
    return _EncodedRows(dataset, columns)


class _EncodedRows:
    """Rows of a datasets.Dataset in which the images of the prompt are still encoded."""

    def __init__(self, dataset: Any, columns: Mapping[str, str]) -> None:
        self.column_names: list[str] = list(dataset.format["columns"] or dataset.column_names)
        self._table = dataset.with_format("arrow", columns=self.column_names)
        self._features, self._encoded = copy.deepcopy(dataset.features), copy.deepcopy(dataset.features)
        for field in PROMPT_FIELDS:
            _keep_encoded(_feature(self._features, columns.get(field, field)))
        _keep_encoded(self._encoded)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int, /) -> Any:
        return self._features.decode_example(self._table[index].to_pylist()[0])

    def encoded_row(self, index: int) -> Any:
        """The row with the images of every column still encoded."""
        return self._encoded.decode_example(self._table[index].to_pylist()[0])


def _feature(features: Mapping[str, Any], path: str) -> Any:
    """The feature of a column, or of what lies in it; None where there is none."""
    found = locate(path, features)
    if found is None:
        return None
    column, keys = found
    feature: Any = features[column]
    for key in keys:
        inner = getattr(feature, "feature", feature)  # of a list, what it holds
        feature = inner.get(key) if isinstance(inner, Mapping) else inner
    return feature


def _keep_encoded(feature: Any) -> None:
    """Switch decoding off in a feature and all it contains, but for Json, whose text becomes a value."""
    if isinstance(feature, Mapping):
        for inner in feature.values():
            _keep_encoded(inner)
    elif isinstance(feature, list | tuple):
        for inner in feature:
            _keep_encoded(inner)
    elif hasattr(feature, "feature"):
        _keep_encoded(feature.feature)
    elif hasattr(feature, "decode") and type(feature).__name__ != "Json":
        feature.decode = False
