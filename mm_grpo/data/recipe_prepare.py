"""For prepare.py of recipes: read a split of a dataset of the hub, and write rows of ours as JSONL.

`published` gives a split's rows with their pictures still encoded, so that nothing is compressed twice; `prepare`
writes files, says how far it is, and leaves alone what a former run has finished. What a row becomes is the recipe's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mm_grpo.data.jsonl import write_jsonl
from mm_grpo.errors import DataError, shorten

EVERY = 5.0
"""Seconds from one line about the progress to the next."""


def published(hub: str, split: str, config: str | None = None) -> Any:
    """A split of a dataset of the hub, as datasets.Dataset whose columns of pictures hold {bytes, path}.

    Downloads go on where they stopped, and are kept in the cache of the datasets library.

    Raises:
        DataError: the hub cannot be reached or refuses, or the datasets library cannot read it.
    """
    import datasets

    arguments = (hub,) if config is None else (hub, config)
    try:
        found = datasets.load_dataset(*arguments, split=split)
    except Exception as error:  # the library's, the hub's and the network's share no base
        reason = f"{type(error).__name__}: {shorten(error, 300)}"
        raise DataError(
            f"{hub}, split {split}: cannot be read from the hub ({reason}); this needs a network, once: run it again "
            "where there is one (a download goes on where it stopped), log in (`hf auth login`) where the dataset asks "
            "for it, or copy the written folder from another machine"
        ) from None
    for name, feature in found.features.items():
        if isinstance(feature, datasets.Image):
            found = found.cast_column(name, datasets.Image(decode=False))
        elif isinstance(feature, datasets.List) and isinstance(feature.feature, datasets.Image):
            found = found.cast_column(name, datasets.List(datasets.Image(decode=False)))
    return found


def prepare(path: Path, rows: Callable[[], Iterable[Mapping[str, Any]]], *, again: bool = False) -> None:
    """Write `rows()` to `path`, with progress; a file that is there stays, unless `again`.

    A file appears when it is whole, so one that is there needs nothing; pictures that were written stay in any case.
    """
    if path.exists() and not again:
        print(f"{path}: is there already; --again makes it anew", flush=True)
        return
    started = time.perf_counter()
    count = write_jsonl(_counted(rows(), path), path)
    print(f"{path}: {count} rows in {time.perf_counter() - started:.0f} s", flush=True)


def exits(main: Callable[[], None]) -> None:
    """Run a script's `main`; a DataError becomes one message and exit code 2."""
    try:
        main()
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _counted(rows: Iterable[Mapping[str, Any]], path: Path) -> Iterator[Mapping[str, Any]]:
    shown = time.perf_counter()
    for count, row in enumerate(rows, start=1):
        yield row
        if time.perf_counter() - shown >= EVERY:
            shown = time.perf_counter()
            print(f"{path}: {count} rows so far", flush=True)
