"""Sources of rows: `load` reads whatever `data.train` or `train=` may be, as `Rows`.

`load_train` and `load_eval` are what a config trains on and is evaluated on. A source is

    a path          what paths.py finds: files, folders, globs, a hub's dataset; or a list of such
    rows            a list or tuple of mappings
    a dataset       of the datasets library
    a mapping       {task: shapes, ...} or {task: file.py:function, ...}: rows made by a function, whose arguments
                    the other keys are
    a mixture       a Mixture of several of these with weights (mixture.py); in a config a list of entries

Relative image paths start at `data.image_dir`; if that is not set, at the folder of the dataset's file, or at the
working folder for rows in memory. Nothing is downloaded but a dataset of the hub that is named.

A task is a function with keyword arguments that returns rows; `TASKS` names the package's own. Kinds of file are
in paths.py and readers.py.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mm_grpo.config.source_entries import OWN
from mm_grpo.config.values import is_source
from mm_grpo.data.base import TASK, Rows
from mm_grpo.data.columns import quoted
from mm_grpo.data.dataset import Dataset
from mm_grpo.data.hf_datasets import library_rows
from mm_grpo.data.media_check import check_media
from mm_grpo.data.mixture import MixedDataset, Mixture, mixture_of
from mm_grpo.data.paths import LEGAL, check_shards, find
from mm_grpo.data.readers import JoinedRows, read
from mm_grpo.errors import ConfigError, DataError, UserError
from mm_grpo.import_path import load_named

if TYPE_CHECKING:
    from mm_grpo.config import DataConfig, GRPOConfig

log = logging.getLogger(__name__)
Source = Any
"""Rows (a list of dicts or a datasets.Dataset), paths, a task mapping such as {"task": "shapes"}, or a Mixture."""
RowKey = tuple[Hashable, str]
"""A key that is equal for equal rows, and the name of the row."""
Needs = Callable[[Sequence[str], Callable[[], Iterator[Mapping[str, Any]]], bool], None]
"""Takes the names of the columns, a function that goes through the columns of all rows, and whether the rows are
trained on. Raises if a reward lacks a column (`Scorer.check`)."""
BLIND = "blind"
"""The name of the blind control in metrics; no evaluation set may have it."""
TASKS = {"shapes": "mm_grpo.data.shapes:shapes_rows"}


def load(source: Any, settings: DataConfig, name: str = "train", *, verify: bool = True) -> Rows:
    """Read a source; the module's docstring lists the kinds.

    The other arguments are as of `Dataset`. Raises DataError if the source is unknown, missing, broken or empty, or a
    row of it is wrong.
    """
    if isinstance(source, Dataset | MixedDataset):
        return source
    if isinstance(source, Mapping) and "path" in source:
        source = Mixture([source])
    if isinstance(source, Mixture):
        return _load_mixture(source, settings, name, verify)
    return _load_dataset(source, settings, name, verify=verify)


def _load_dataset(source: Source, settings: DataConfig, name: str, **options: Any) -> Dataset:
    single_file = False
    if isinstance(source, str | os.PathLike):
        source, single_file = [source], os.path.isfile(os.path.expanduser(source))
    if isinstance(source, list | tuple):
        if source and all(isinstance(path, str | os.PathLike) for path in source):
            files = [file for path in source for file in find(os.fspath(path), name)]
            try:
                check_shards([file.path for file in files], name)
            except DataError as error:
                if not single_file:
                    raise
                log.warning("%s", error)
            source = JoinedRows([read(file, name, settings.columns) for file in files])
    elif hasattr(source, "column_names"):
        source = library_rows(source, settings.columns, f"the dataset {name!r}")
    elif isinstance(source, Mapping):
        return _load_task(source, settings, name, **options)
    else:
        raise DataError(f"{name}: the data is a {type(source).__name__}; {LEGAL}")
    return Dataset(source, settings, name=name, **options)


def load_train(
    config: GRPOConfig,
    source: Source | None = None,
    *,
    verify: bool = True,
    needs: Needs | None = None,
    turns: bool = False,
) -> Rows:
    """Load the training rows: `source`, else `data.train`. DataError when there are none.

    With `verify` the rows are checked at once, and the first wrong one raises. Rows with images that would not be read
    are refused in any case, unless `data.text_only` is set or the model may see images in later turns: with `turns`, or
    tools or an environment in the config. `needs` raises if the rewards ask for a column that no row has.
    """
    if source is None:
        source = mixture_of(config.data.train)
    if source is None:
        raise DataError("data.train is not set: give a .jsonl path, a task mapping, or train=rows in Python")
    return _load_checked(source, config, "train", verify, needs, turns, trained=True)


def load_eval(
    config: GRPOConfig,
    source: Source | Mapping[str, Source] | None = None,
    *,
    verify: bool = True,
    needs: Needs | None = None,
    turns: bool = False,
) -> dict[str, Rows]:
    """Load the evaluation sets by name, the headline first; one source alone is "eval". Options as of `load_train`.

    ConfigError for a set called `BLIND`, even without a blind control: a run may be resumed or evaluated with one.
    """
    if source is None:
        sources: Mapping[str, Source] = {name: mixture_of(s) for name, s in config.data.eval_sets().items()}
    elif isinstance(source, Mapping) and not is_source(source):
        sources = source
    else:
        sources = {"eval": source}
    if BLIND in sources:
        raise ConfigError(
            f"data.eval has a set called '{BLIND}': eval/{BLIND}/ are the metrics of the blind control "
            "(run.eval_blind); call the set something else"
        )
    for name, entry in sources.items():
        if isinstance(entry, Mixture) and any("weight" in options for options in entry.entries):
            raise DataError(f"{name}: weight is for training; evaluation uses every row once: leave it out")
    return {  # uids and tables tell a set called train from the training set
        name: _load_checked(entry, config, "eval:train" if name == "train" else name, verify, needs, turns)
        for name, entry in sources.items()
    }


def warn_of_shared_rows(train: Rows, sets: Mapping[str, Rows]) -> None:
    """Warn of evaluation sets with rows of `train`."""
    keys = {name: list(rows.row_keys()) for name, rows in sets.items()}
    for sentence in shared_rows(train.row_keys() if sets else (), keys):
        log.warning("%s", sentence)


def shared_rows(train: Iterable[RowKey], sets: Mapping[str, Sequence[RowKey]]) -> list[str]:
    """Return a sentence about each evaluation set with rows of `train`, by keys that are equal for equal rows."""
    train_rows, sentences = dict(train), []
    for name, keys in sets.items():
        if matches := [(row, train_rows[key]) for key, row in keys if key in train_rows]:
            sentences.append(
                f"{name}: {len(matches)} of {len(keys)} rows are rows of train too, such as {matches[0][0]}, which is "
                f"{matches[0][1]}: what they score was learned by heart"
            )
    return sentences


def _load_checked(
    source: Source,
    config: GRPOConfig,
    name: str,
    verify: bool,
    needs: Needs | None,
    turns: bool,
    *,
    trained: bool = False,
) -> Rows:
    """Load a source, and refuse rows without prompts, without images or without columns that rewards ask for."""
    rows = load(source, config.data, name, verify=False)
    needs_images = not (turns or config.rollout.tools or config.rollout.environment)
    for dataset in rows.sources:
        # a Dataset that was passed in has settings of its own; here the config's count
        if needs_images and not (config.data if dataset is source else dataset).text_only:
            check_media(dataset, verify=verify)
        elif verify:
            dataset.verify()
    if needs is not None:
        try:
            needs(rows.columns, rows.columns_of_rows, trained)
        except UserError as error:
            rows.fields(0)  # rows that cannot be read have no columns: their fault comes first
            raise error if trained else type(error)(f"{name}: {error}") from None
    return rows


def _load_mixture(mixture: Mixture, settings: DataConfig, name: str, verify: bool) -> MixedDataset:
    """Load every entry, each with its own settings."""
    datasets = []
    for label, entry in zip(mixture.names, mixture.entries, strict=True):
        source, source_name = entry["path"], f"{name}/{label}"
        if isinstance(source, Dataset | MixedDataset):
            raise DataError(f"{source_name}: is a Dataset, which has its name and settings; give its rows")
        added = {TASK: entry["task"]} if "task" in entry else None
        limits = {key: entry[key] for key in ("min_pixels", "max_pixels") if entry.get(key) is not None}
        low, high = settings.min_pixels or 1, settings.max_pixels or math.inf
        if limits and not low <= limits.get("min_pixels", low) <= limits.get("max_pixels", high) <= high:
            raise DataError(
                f"{source_name}: {limits}: must be in order, and from data.min_pixels = {settings.min_pixels} to "
                f"data.max_pixels = {settings.max_pixels}, which the engine is started with"
            )
        own_settings = settings.model_copy(update={key: entry[key] for key in OWN if key in entry})
        options = {"verify": verify, "added": added, "pixel_limits": limits}
        datasets.append(_load_dataset(source, own_settings, source_name, **options))
    return MixedDataset(name, datasets, [entry.get("weight", 1.0) for entry in mixture.entries])


def _load_task(source: Mapping[str, Any], settings: DataConfig, name: str, **options: Any) -> Dataset:
    arguments = dict(source)
    task = arguments.pop("task", None)
    if not isinstance(task, str) or (task not in TASKS and ":" not in task):
        raise DataError(
            f"{name}: the task is {task!r}; legal are {quoted(TASKS)} and path/to/file.py:function. Rows in files need "
            f"path: {LEGAL}"
        )
    function = load_named(TASKS.get(task, task), f"{name}: task", DataError)
    try:
        rows = function(**arguments)
    except (TypeError, DataError) as error:  # TypeError: an option is unknown or missing
        legal = quoted(inspect.signature(function).parameters)
        raise DataError(f"{name}: the task {task!r}: {error}; its options are {legal}") from None
    label = task.rpartition(":")[2]
    return Dataset(rows, settings, name=name, row_name=lambda i: f"{name} ({label}) row {i}", **options)
