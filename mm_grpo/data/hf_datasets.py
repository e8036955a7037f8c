"""Rows that the datasets library holds or reads: Parquet, Arrow, what save_to_disk wrote, datasets of the hub.

Images and videos of a `datasets.Dataset` are read as they are stored: plain indexing would decode all of them, past the
limits of images.py and videos.py. The library is imported on first use. Its errors, which share no base class, become a
DataError in `_reading` alone.
"""

from __future__ import annotations

import copy
import glob
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from mm_grpo.data.columns import PROMPT_FIELDS, locate, quoted
from mm_grpo.data.file_states import FileStates
from mm_grpo.data.media_columns import NUMBERED
from mm_grpo.errors import DataError, shorten
from mm_grpo.hub import hub_fault


def library_rows(dataset: Any, columns: Mapping[str, str], what: str, remedy: str = "dataset[split]") -> Any:
    """Return the rows of a dataset, or of the only one in a DatasetDict. DataError for several splits or a stream.

    `columns` (our name → the dataset's column) says which columns belong to the prompt. Messages call the dataset
    `what`, and `remedy` shows how to name one split of several.
    """
    if isinstance(dataset, Mapping):
        if len(dataset) != 1:
            raise DataError(f"{what}: holds {len(dataset)} splits ({quoted(dataset)}); give one: {remedy}")
        dataset = next(iter(dataset.values()))
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(
            f"{what}: is a {type(dataset).__name__}, without length or index; an epoch is a permutation "
            "of all rows, so load it with streaming=False"
        )
    if not hasattr(dataset, "features") or dataset.format["type"] == "custom":
        return dataset  # rows of another library, or made by with_transform: nothing to decode
    return _EncodedRows(dataset, columns)


def open_file(path: Path, columns: Mapping[str, str]) -> Any:
    """Open a Parquet or Arrow file, mapped from the copy that the library makes in its cache."""
    import datasets
    import pyarrow

    with _reading(str(path)):
        kind = path.suffix.lower().removeprefix(".")
        dataset = datasets.load_dataset(kind, data_files=glob.escape(str(path)), split="train")
        pyarrow.default_memory_pool().release_unused()
    return library_rows(dataset, columns, str(path))


def open_saved(path: Path, split: str | None, columns: Mapping[str, str]) -> Any:
    """Open a folder that save_to_disk wrote: a datasets.Dataset, or one split of a DatasetDict."""
    import datasets

    with _reading(str(path)):
        dataset = datasets.load_from_disk(str(path))
    if split is not None:
        splits = list(dataset) if isinstance(dataset, Mapping) else []
        if split not in splits:
            raise DataError(f"{path}: has no split {split!r}; it has: {quoted(splits)}")
        dataset = dataset[split]
    return library_rows(dataset, columns, str(path), f"{path}:SPLIT, or dataset[split] in Python")


def open_hub(source: str, columns: Mapping[str, str], remedy: str) -> Any:
    """Open a dataset of the hub, `owner/name[[:config]:split]`; without a network from the library's cache.

    `remedy` is the advice if a path was meant. DataError if the hub cannot be reached or has no such dataset.
    """
    import datasets

    repository, *options = source.split(":")
    config, split = (None, *options, None)[:2] if len(options) < 2 else options
    with _reading(source):
        fault = hub_fault(repository, dataset=True)
    try:
        with _reading(source, bars=True), _offline() if fault else nullcontext():
            dataset = datasets.load_dataset(repository, config, split=split)
    except DataError as error:
        reason = "; ".join(filter(None, [fault, str(error).removeprefix(f"{source}: ")]))
        raise DataError(
            f"{source}: is no path here, and as a dataset of the hub it cannot be read ({reason}). If it is one, "
            "repair the connection, log in (`hf auth login`) if it is private, or download it and give the folder. "
            f"If it is a path: {remedy}"
        ) from None
    return library_rows(dataset, columns, source, f"{repository}:SPLIT, or {repository}:CONFIG:SPLIT")


@contextmanager
def _reading(what: str, *, bars: bool = False) -> Iterator[None]:
    """Convert every error of the library to a DataError. Hide its log, and without `bars` its progress."""
    import datasets

    level, has_bars = datasets.logging.get_verbosity(), not datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if not bars:
        datasets.disable_progress_bars()
    try:
        yield
    except Exception as error:
        reason = shorten(error.__cause__ or error, 300)
        raise DataError(f"{what}: cannot be read ({type(error).__name__}: {reason})") from None
    finally:
        datasets.logging.set_verbosity(level)
        if has_bars:
            datasets.enable_progress_bars()


@contextmanager
def _offline() -> Iterator[None]:
    """Make the libraries use their caches alone: they would try each file of an unreachable hub for half a minute."""
    import datasets
    import huggingface_hub

    before = datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE = before


class _EncodedRows:
    """Rows of a datasets.Dataset in which all videos and the images of the prompt are still encoded."""

    def __init__(self, dataset: Any, columns: Mapping[str, str]) -> None:
        self.column_names: list[str] = list(dataset.format["columns"] or dataset.column_names)
        self._table = dataset.with_format("arrow", columns=self.column_names)
        self.features, self._encoded = copy.deepcopy(dataset.features), copy.deepcopy(dataset.features)
        names = {*self.column_names, *columns}
        numbered = () if {"image", "images"} & names else filter(NUMBERED.fullmatch, names)
        _keep_encoded(self.features, "Video")
        for field in (*PROMPT_FIELDS, *numbered):
            _keep_encoded(_feature(self.features, columns.get(field, field)))
        _keep_encoded(self._encoded)
        self._files = FileStates(file["filename"] for file in dataset.cache_files)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int, /) -> Any:
        return self.features.decode_example(self._row(index))

    def encoded_row(self, index: int) -> Any:
        """Return the row with the images of every column still encoded."""
        return self._encoded.decode_example(self._row(index))

    def _row(self, index: int) -> Any:
        self._files.look_again()
        return self._table[index].to_pylist()[0]


def _feature(features: Mapping[str, Any], path: str) -> Any:
    """Return the feature of a column or of a value inside it; None if it is missing."""
    location = locate(path, features)
    if location is None:
        return None
    column, keys = location
    feature: Any = features[column]
    for key in keys:
        inner = getattr(feature, "feature", feature)  # a list has the feature of its elements
        feature = inner.get(key) if isinstance(inner, Mapping) else inner
    return feature


def _keep_encoded(feature: Any, kind: str = "") -> None:
    """Switch decoding off in a feature and all features inside, or those of one kind; Json must become a value."""
    if isinstance(feature, Mapping | list | tuple):
        for inner in feature.values() if isinstance(feature, Mapping) else feature:
            _keep_encoded(inner, kind)
    elif hasattr(feature, "feature"):
        _keep_encoded(feature.feature, kind)
    elif (
        hasattr(feature, "decode")
        and kind in ("", type(feature).__name__)
        and (kind or type(feature).__name__) != "Json"
    ):
        feature.decode = False
