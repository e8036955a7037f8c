"""Helpers of recipes' prepare.py: read a split of a dataset of the hub, and write rows as JSONL.

`published` reads a split with its pictures still encoded, so that nothing is compressed twice. `prepare` writes files
with progress, and skips files that a former run has finished.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mm_grpo.data.jsonl import write_jsonl
from mm_grpo.errors import DataError, shorten

PROGRESS_SECONDS = 5.0
"""Time between two lines about the progress."""


def published(hub: str, split: str, config: str | None = None) -> Any:
    """Load a split of a dataset of the hub, as datasets.Dataset with {bytes, path} in its columns of pictures.

    Downloads that stopped are resumed, and kept in the cache of the datasets library.

    Raises:
        DataError: the hub cannot be reached or refuses, or the datasets library cannot read it.
    """
    import datasets

    arguments = (hub,) if config is None else (hub, config)
    try:
        dataset = datasets.load_dataset(*arguments, split=split)
    except Exception as error:  # errors of the library, the hub and the network share no base class
        reason = f"{type(error).__name__}: {shorten(error, 300)}"
        raise DataError(
            f"{hub}, split {split}: cannot be read from the hub ({reason}); this needs a network, once: run it again "
            "with one (a download goes on where it stopped), log in (`hf auth login`) if the dataset asks for it, or "
            " copy the written folder from another machine"
        ) from None
    for name, feature in dataset.features.items():
        if isinstance(feature, datasets.Image):
            dataset = dataset.cast_column(name, datasets.Image(decode=False))
        elif isinstance(feature, datasets.List) and isinstance(feature.feature, datasets.Image):
            dataset = dataset.cast_column(name, datasets.List(datasets.Image(decode=False)))
    return dataset


def prepare(path: Path, rows: Callable[[], Iterable[Mapping[str, Any]]], *, again: bool = False) -> None:
    """Write `rows()` to `path`, with progress; a file that exists stays, unless `again`.

    A file appears when it is complete, so a file that exists needs nothing. Pictures that were written always stay.
    """
    if path.exists() and not again:
        print(f"{path}: is there already; --again makes it again", flush=True)
        return
    started = time.perf_counter()
    count = write_jsonl(_with_progress(rows(), path), path)
    print(f"{path}: {count} rows in {time.perf_counter() - started:.0f} s", flush=True)


def exits(main: Callable[[], None]) -> None:
    """Run a script's `main`; a DataError becomes one message and exit code 2."""
    try:
        main()
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _with_progress(rows: Iterable[Mapping[str, Any]], path: Path) -> Iterator[Mapping[str, Any]]:
    last_line = time.perf_counter()
    for count, row in enumerate(rows, start=1):
        yield row
        if time.perf_counter() - last_line >= PROGRESS_SECONDS:
            last_line = time.perf_counter()
            print(f"{path}: {count} rows so far", flush=True)
