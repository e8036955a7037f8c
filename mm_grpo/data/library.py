"""Rows that the datasets library holds or reads: Parquet, Arrow, what save_to_disk wrote, datasets of the hub.

The image columns of a `datasets.Dataset` are read as they are stored: plain indexing would decode every image,
whatever its size, and past the limits of images.py. The library is imported only where one of these is read.
"""

from __future__ import annotations

import copy
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mm_grpo.data.columns import PROMPT_FIELDS, locate, quoted
from mm_grpo.data.paths import missing
from mm_grpo.errors import DataError

PATIENCE = 12.0
"""Seconds that the hub may take to answer the first question; a download may take any time."""


def library_rows(dataset: Any, columns: Mapping[str, str], what: str, remedy: str = "") -> Any:
    """The rows of a dataset, or of the only one in a DatasetDict.

    Args:
        dataset: a datasets.Dataset, or anything with a length, an index and `column_names`.
        columns: our name → the dataset's column, to know which columns belong to the prompt.
        what: what messages call the dataset.
        remedy: how one split of several is named.

    Raises:
        DataError: there are several splits, or the dataset is a stream.
    """
    if isinstance(dataset, Mapping):
        if len(dataset) != 1:
            remedy = remedy or "dataset[split]"
            raise DataError(
                f"{what}: holds {len(dataset)} splits ({quoted(dataset)}); give one of them: {remedy}"
            )
        dataset = next(iter(dataset.values()))
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(
            f"{what}: is a {type(dataset).__name__}, without length or index; an epoch is a permutation "
            "of all rows, so load it with streaming=False"
        )
    if not hasattr(dataset, "features") or dataset.format["type"] == "custom":
        return dataset  # not of the library, or with_transform makes its rows: they are as they are
    return _EncodedRows(dataset, columns, what)


@contextmanager
def _reading(path: Path, kind: str) -> Iterator[None]:
    """Turn the library's errors, which share no base, into one of `path`; those of the disk go up."""
    try:
        yield
    except Exception as error:
        if (
            isinstance(error, OSError)
            and error.errno is not None
            and not isinstance(error, FileNotFoundError)
        ):
            raise
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"{path}: cannot be read as {kind} ({type(error).__name__}: {reason}); write it again"
        ) from None


def open_parquet(path: Path, columns: Mapping[str, str]) -> Any:
    """The rows of a Parquet file, mapped from a copy as Arrow in the cache of the datasets library.

    Rows are used in any order, and Parquet is read in blocks of thousands. The library's own conversion holds several
    such blocks in memory at once (some 500 MB); this one writes 256 rows at a time.
    """
    with path.open("rb") as file:
        if file.read(4) != b"PAR1":
            raise DataError(f"{path}: is not a Parquet file (it does not begin with PAR1); write it again")
    import datasets

    state = path.stat()
    key = f"{path.resolve()}\0{state.st_size}\0{state.st_mtime_ns}\0{state.st_ino}"
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "mm_grpo_parquet"
    copied = folder / f"{hashlib.sha256(key.encode(errors='surrogateescape')).hexdigest()[:32]}.arrow"
    if not copied.exists():
        unfinished = copied.with_name(f"{copied.name}.{os.getpid()}.tmp")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _convert_parquet(path, unfinished)
            os.replace(unfinished, copied)
        except OSError as error:
            raise DataError(
                f"{path}: its copy as Arrow cannot be written to {folder} ({error.strerror or error}); make room "
                "there, or set HF_DATASETS_CACHE to another folder"
            ) from None
        finally:
            with suppress(OSError):
                unfinished.unlink()
    with _reading(path, "Parquet"):
        dataset = datasets.Dataset.from_file(str(copied))
    return library_rows(dataset, columns, str(path))


def _convert_parquet(path: Path, target: Path) -> None:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    with (
        _reading(path, "Parquet"),
        ParquetFile(str(path), pre_buffer=False, buffer_size=2**20) as source,
        pyarrow.OSFile(str(target), "wb") as file,
        pyarrow.ipc.new_stream(file, source.schema_arrow) as writer,
    ):
        for batch in source.iter_batches(batch_size=256, use_threads=False):
            writer.write_batch(batch)
    pyarrow.default_memory_pool().release_unused()


def open_arrow(path: Path, columns: Mapping[str, str]) -> Any:
    """The rows of an Arrow file, a stream (as the datasets library writes) or a file with an index (Feather)."""
    with path.open("rb") as file:
        indexed = file.read(6) == b"ARROW1"
    import pyarrow
    from datasets import Dataset
    from datasets.table import InMemoryTable

    with _reading(path, "Arrow"):
        if indexed:
            table = pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()
            dataset = Dataset(InMemoryTable(table))
        else:
            dataset = Dataset.from_file(str(path))
    return library_rows(dataset, columns, str(path))


def open_saved(path: Path, split: str | None, columns: Mapping[str, str]) -> Any:
    """Load what save_to_disk wrote: a datasets.Dataset, or one split of a DatasetDict."""
    from datasets import load_from_disk

    with _reading(path, "a saved dataset"):
        dataset = load_from_disk(str(path))
    if split is not None:
        splits = list(dataset) if isinstance(dataset, Mapping) else []
        if split not in splits:
            raise DataError(f"{path}: has no split {split!r}; it has: {quoted(splits)}")
        dataset = dataset[split]
    return library_rows(dataset, columns, str(path), f"{path}:SPLIT, or dataset[split] in Python")


def open_hub(given: str, name: str, columns: Mapping[str, str]) -> Any:
    """A dataset of the hub, by `owner/name[:config][:split]`; without a network, what the library's cache holds of it.

    Raises:
        DataError: the hub cannot be reached or has no such dataset, or config or split are not among its own; within
            PATIENCE seconds where there is no network. What was given may be a mistyped path, so the message says both.
    """
    here = str(missing(Path(given), name))
    repository, *rest = given.split(":")
    reason = _unreachable(repository)
    import datasets

    try:
        if reason is None:
            config, split = _config_and_split(repository, rest, name)
            dataset = datasets.load_dataset(repository, config, split=split)
        else:
            with _offline():
                dataset = _cached(repository, rest)
    except DataError:
        raise
    except Exception as error:  # the library's and the hub's, which share no base
        reason = reason or f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise DataError(
            f"{name}: {given!r} is no path here, and as a dataset of the hub it cannot be read ({reason}). If it is "
            "one, mend the connection, log in (`hf auth login`) where it is private, or download it and give the "
            f"folder. If it is a path: {here.removeprefix(f'{name}: ')}"
        ) from None
    return library_rows(dataset, columns, given, f"{given}:SPLIT")


def _unreachable(repository: str) -> str | None:
    """Why the hub does not answer for a dataset, None when it does. A request of our own, which is tried once."""
    from huggingface_hub import HfApi

    outcome: list[Exception | None] = []

    def ask() -> None:
        try:
            HfApi().dataset_info(repository, timeout=PATIENCE)
            outcome.append(None)
        except Exception as error:
            outcome.append(error)

    # A name server that does not answer is waited for past any time-out of a request.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if not outcome:
        return f"no answer in {PATIENCE:g} s"
    error = outcome[0]
    return None if error is None else f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _config_and_split(repository: str, rest: list[str], name: str) -> tuple[str | None, str | None]:
    """Config and split of `owner/name[:config][:split]`, where each is one of the dataset's own."""
    from datasets import get_dataset_config_names, get_dataset_split_names

    configs = get_dataset_config_names(repository)
    config, split = (rest[0], rest[1]) if len(rest) == 2 else (None, rest[0] if rest else None)
    if len(rest) == 1 and split in configs:
        config, split = split, None
    if config is not None and config not in configs:
        raise DataError(f"{name}: {repository} has no config {config!r}; it has: {quoted(configs)}")
    if config is None and len(configs) > 1:
        inner = "" if split is None else f":{split}"
        raise DataError(
            f"{name}: {repository} has the configs {quoted(configs)}; give {repository}:CONFIG{inner}"
        )
    splits = get_dataset_split_names(repository, config or configs[0])
    if split is None and len(splits) > 1:
        inner = "" if config is None else f":{config}"
        raise DataError(
            f"{name}: {repository} has the splits {quoted(splits)}; give {repository}{inner}:SPLIT"
        )
    if split is not None and split not in splits:
        known = f"{quoted(splits)}" + (f", and the configs {quoted(configs)}" if len(rest) == 1 else "")
        raise DataError(f"{name}: {repository} has no split {split!r}; it has: {known}")
    return config, split or splits[0]


def _cached(repository: str, rest: list[str]) -> Any:
    """The dataset out of the library's cache; one word behind the name is a split, or else a config."""
    import datasets

    tries: list[Callable[[], Any]]
    if len(rest) == 2:
        tries = [lambda: datasets.load_dataset(repository, rest[0], split=rest[1])]
    elif rest:
        tries = [
            lambda: datasets.load_dataset(repository, split=rest[0]),
            lambda: datasets.load_dataset(repository, rest[0]),
        ]
    else:
        tries = [lambda: datasets.load_dataset(repository)]
    for attempt in tries[:-1]:
        try:
            return attempt()
        except Exception:  # the last attempt's error is the one that is reported
            continue
    return tries[-1]()


@contextmanager
def _offline() -> Iterator[None]:
    """The libraries look into their caches alone: they would try each file of an unreachable hub for half a minute."""
    import datasets
    import huggingface_hub

    before = datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE = before


class _EncodedRows:
    """Rows of a datasets.Dataset in which the images of the prompt are still encoded."""

    def __init__(self, dataset: Any, columns: Mapping[str, str], what: str) -> None:
        self._what = what
        self.column_names: list[str] = list(dataset.format["columns"] or dataset.column_names)
        self._table = dataset.with_format("arrow", columns=self.column_names)
        self._features, self._encoded = copy.deepcopy(dataset.features), copy.deepcopy(dataset.features)
        for field in PROMPT_FIELDS:
            _keep_encoded(_feature(self._features, columns.get(field, field)))
        _keep_encoded(self._encoded)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int, /) -> Any:
        return self._features.decode_example(self._row(index))

    def encoded_row(self, index: int) -> Any:
        """The row with the images of every column still encoded."""
        return self._encoded.decode_example(self._row(index))

    def _row(self, index: int) -> Any:
        try:
            return self._table[index].to_pylist()[0]
        except (OverflowError, ValueError) as error:  # a year past 9999, a text that is not UTF-8
            raise DataError(
                f"{self._what} row {index}: cannot be read out of Arrow ({error}); mend it or leave the row out"
            ) from None


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
