"""Sources of rows: `load` makes a `Dataset` of whatever `data.train` or `train=` may be.

`load_train` and `load_eval` are what a config trains on and is evaluated on. A source is

    a path          what paths.py finds: files, folders, globs, a hub's dataset; or a list of such
    rows            a list or tuple of mappings
    a dataset       of the datasets library
    a mapping       {task: shapes, ...} or {task: file.py:function, ...}: rows made by a function, whose arguments
                    the other keys are
    a mixture       a Mixture of several of these with weights (mixture.py); in a config a list of entries

Relative image paths start at `data.image_dir`; where that is not set, at the folder of the dataset's
file, or at the working folder for rows in memory. Nothing is downloaded but a dataset of the hub that is named.

A task is a function with keyword arguments that returns rows; `TASKS` names those of this package. Kinds of file are
in paths.py and readers.py.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mm_grpo.config.source_entries import OWN
from mm_grpo.config.values import is_source
from mm_grpo.data.columns import quoted
from mm_grpo.data.dataset import TASK, Dataset
from mm_grpo.data.hf_datasets import library_rows
from mm_grpo.data.image_check import check_images
from mm_grpo.data.mixture import MixedDataset, Mixture, mixture_of
from mm_grpo.data.paths import LEGAL, check_shards, find
from mm_grpo.data.readers import JoinedRows, read
from mm_grpo.errors import ConfigError, DataError
from mm_grpo.import_path import load_named

if TYPE_CHECKING:
    from mm_grpo.config import DataConfig, GRPOConfig

log = logging.getLogger(__name__)
Source = Any
"""Rows (a list of dicts or a datasets.Dataset), paths, a task mapping such as {"task": "shapes"}, or a Mixture."""
RowKey = tuple[Hashable, str]
"""What is equal for equal rows, and the name of a row."""
Needs = Callable[[Sequence[str], Callable[[], Iterator[Mapping[str, Any]]], bool], None]
"""Given the names of a dataset's columns, what goes through the columns of its rows, and whether it is trained on;
raises for what is missing (`Scorer.check`)."""
BLIND = "blind"
"""The name under which metrics have the blind control; no evaluation set may have it."""
TASKS = {"shapes": "mm_grpo.data.shapes:shapes_rows"}


def load(
    source: Any,
    settings: DataConfig,
    name: str = "train",
    *,
    verify: bool = True,
    added: Mapping[str, Any] | None = None,
) -> Dataset:
    """The dataset of a source; the module's docstring lists the kinds.

    Args:
        source: what `data.train` or `data.eval` holds, or what was given in Python.
        settings, name, verify, added: as of `Dataset`.

    Raises:
        DataError: the source is unknown, missing, broken or empty, or a row of it is wrong.
    """
    options: dict[str, Any] = {"verify": verify, "added": added}
    alone = False
    if isinstance(source, Dataset):
        return source
    if isinstance(source, Mapping) and "path" in source:
        source = Mixture([source])
    if isinstance(source, Mixture):
        return _load_mixture(source, settings, name, verify)
    if isinstance(source, str | os.PathLike):
        source, alone = [source], os.path.isfile(os.path.expanduser(source))
    if isinstance(source, list | tuple):
        if source and all(isinstance(one, str | os.PathLike) for one in source):
            found = [each for text in source for each in find(os.fspath(text), name)]
            try:
                check_shards([each.path for each in found], name)
            except DataError as error:
                if not alone:
                    raise
                log.warning("%s", error)
            rows = JoinedRows([read(each, name, settings.columns) for each in found])
            return Dataset(rows, settings, name=name, **options)
        return Dataset(source, settings, name=name, **options)
    if hasattr(source, "column_names"):
        rows = library_rows(source, settings.columns, f"the dataset {name!r}")
        return Dataset(rows, settings, name=name, **options)
    if isinstance(source, Mapping):
        return _load_task(source, settings, name, options)
    raise DataError(f"{name}: the data is a {type(source).__name__}; {LEGAL}")


def load_train(
    config: GRPOConfig,
    given: Source | None = None,
    *,
    verify: bool = True,
    needs: Needs | None = None,
    turns: bool = False,
) -> Dataset:
    """The training rows: `given`, else `data.train`. DataError when there are none.

    With `verify` the rows are checked at once, and the first wrong one raises. Rows whose images would not be read are
    refused in any case, unless `data.text_only`, or with `turns`: tools and environments, also those of the config,
    may show images. `needs` raises for what the rewards ask for and no row has.
    """
    source = mixture_of(config.data.train) if given is None else given
    if source is None:
        raise DataError("data.train is not set: give a .jsonl path, a task mapping, or train=rows in Python")
    return _load_checked(source, config, "train", verify, needs, turns, trained=True)


def load_eval(
    config: GRPOConfig,
    given: Source | Mapping[str, Source] | None = None,
    *,
    verify: bool = True,
    needs: Needs | None = None,
    turns: bool = False,
) -> dict[str, Dataset]:
    """The evaluation sets by name, the headline first; a single source is named "eval". Options as of `load_train`.

    ConfigError for a set called `BLIND`, whether there is a blind control or not: a run may be resumed or evaluated
    with one.
    """
    if given is None:
        sources: Mapping[str, Source] = {
            n: mixture_of(source) for n, source in config.data.eval_sets().items()
        }
    elif isinstance(given, Mapping) and not is_source(given):
        sources = given
    else:
        sources = {"eval": given}
    if BLIND in sources:
        raise ConfigError(
            f"data.eval has a set called '{BLIND}': eval/{BLIND}/ are the metrics of the blind control "
            "(run.eval_blind); call the set something else"
        )
    for name, source in sources.items():
        if isinstance(source, Mixture) and any("weight" in entry for entry in source.entries):
            raise DataError(
                f"{name}: weight is for training; an evaluation answers every row once: leave it out"
            )
    return {  # uids and tables tell a set called train from the training set
        name: _load_checked(source, config, "eval:train" if name == "train" else name, verify, needs, turns)
        for name, source in sources.items()
    }


def warn_of_shared_rows(train: Dataset, sets: Mapping[str, Dataset]) -> None:
    """Warn of evaluation sets with rows of `train`."""
    keys = {name: list(rows.row_keys()) for name, rows in sets.items()}
    for sentence in shared_rows(train.row_keys() if sets else (), keys):
        log.warning("%s", sentence)


def shared_rows(train: Iterable[RowKey], sets: Mapping[str, Sequence[RowKey]]) -> list[str]:
    """Return a sentence about each evaluation set with rows of `train`, by keys that are equal for equal rows."""
    known, sentences = dict(train), []
    for name, keys in sets.items():
        if same := [(row, known[key]) for key, row in keys if key in known]:
            sentences.append(
                f"{name}: {len(same)} of {len(keys)} rows are rows of train too, such as {same[0][0]}, which is "
                f"{same[0][1]}: what they score was learned by heart"
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
) -> Dataset:
    """The dataset, unless its rows lack prompts, images or what the rewards ask for."""
    dataset = load(source, config.data, name, verify=False)
    needed = not (turns or config.rollout.tools or config.rollout.environment)
    for part in dataset.parts:
        if needed and not (config.data.text_only if part is dataset else part.text_only):
            check_images(part, verify=verify)
        elif verify:
            part.verify()
    if needs is not None:
        needs(dataset.columns, dataset.columns_of_rows, trained)
    return dataset


def _load_mixture(mixture: Mixture, settings: DataConfig, name: str, verify: bool) -> Dataset:
    """The rows of every entry, each read with its own settings."""
    parts: list[Dataset] = []
    for label, entry in zip(mixture.names, mixture.entries, strict=True):
        of = f"{name}/{label}"
        if isinstance(entry["path"], Dataset):
            raise DataError(f"{of}: is a Dataset, which has its name and settings; give its rows")
        added = {TASK: entry["task"]} if "task" in entry else None
        own = settings.model_copy(update={key: entry[key] for key in OWN if key in entry})
        parts.append(load(entry["path"], own, of, verify=verify, added=added))
    return MixedDataset(name, parts, mixture.weights)


def _load_task(source: Mapping[str, Any], settings: DataConfig, name: str, how: Mapping[str, Any]) -> Dataset:
    options = dict(source)
    task = options.pop("task", None)
    if not isinstance(task, str) or (task not in TASKS and ":" not in task):
        raise DataError(
            f"{name}: the task is {task!r}; legal are {quoted(TASKS)} and path/to/file.py:function. Rows in files need "
            f"path: {LEGAL}"
        )
    function = load_named(TASKS.get(task, task), f"{name}: task", DataError)
    try:
        rows = function(**options)
    except (
        TypeError,
        DataError,
    ) as error:  # TypeError: an option is unknown, or one that it needs is missing
        legal = quoted(inspect.signature(function).parameters)
        raise DataError(f"{name}: the task {task!r}: {error}; its options are {legal}") from None
    label = task.rpartition(":")[2]
    return Dataset(rows, settings, name=name, row_name=lambda i: f"{name} ({label}) row {i}", **how)
