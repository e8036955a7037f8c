"""Datasets of the datasets library as rows, read without decoding the images of the prompt.

Plain indexing would decode every image column, whatever its size. Here the columns that hold the prompt,
its images and its videos stay as they are stored, so that the limits of images.py hold; the others are
decoded as usual. The library itself is imported only to read a file.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mm_grpo.data.dataset import Rows
from mm_grpo.data.layouts import PROMPT_FIELDS, quoted
from mm_grpo.errors import DataError


def read_parquet(path: Path) -> Any:
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


def read_folder(path: Path) -> Any:
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
    except (DatasetsError, OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as a saved dataset ({error}); write it again") from error


def as_rows(dataset: Any, columns: Mapping[str, str], what: str) -> Rows:
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
        self._features = copy.deepcopy(dataset.features)
        for field in PROMPT_FIELDS:
            _keep_encoded(self._features.get(columns.get(field, field)))

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int, /) -> Any:
        return self._features.decode_example(self._table[index].to_pylist()[0])


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
