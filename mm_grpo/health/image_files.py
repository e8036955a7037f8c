"""Rows whose images cannot be read, found before a model is loaded: missing files, and files that hold no picture.

The first bytes of every file are looked at, in threads, shared out over the processes; of datasets that are not in
memory those of `LOOKED_AT` rows, evenly spaced. What shows in decoding alone is found when the row is reached.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain

from mm_grpo.data.dataset import Dataset
from mm_grpo.data.image_check import rows_to_look_at
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.errors import DataError, by_cause

log = logging.getLogger(__name__)
THREADS = 2
MOST = 0.1
"""Most of a source's rows, as a share, that `data.on_bad_image: drop` leaves out."""
_AT_ONCE = 64
"""Rows that a thread looks at before it is given more."""


def readable(dataset: Dataset, on_bad_image: str, ranks: Ranks) -> Dataset:
    """The rows whose images can be read, the same on every process, which all call it.

    DataError where one cannot and `on_bad_image` is not drop, or where more than the share MOST of a source cannot.
    """
    return dataset.with_parts([_readable(part, on_bad_image == "drop", ranks) for part in dataset.parts])


def _readable(part: Dataset, drop: bool, ranks: Ranks) -> Dataset:
    indices = rows_to_look_at(part)
    own = list(_bad(part, ranks.shard(indices)))
    bad = dict(sorted(one for rank in ranks.all_gather(own, "looking at images") for one in rank))
    if not bad:
        return part
    causes = "; ".join(by_cause(bad.values(), len(indices))[:3])
    if not drop or len(bad) > MOST * len(indices):
        raise DataError(f"{causes}. Mend them; data.on_bad_image=drop leaves out a tenth of the rows at most")
    if ranks.first:
        log.warning("%s: %d rows are left out (data.on_bad_image = drop): %s", part.name, len(bad), causes)
    return part.without(bad)


def _bad(part: Dataset, indices: Sequence[int]) -> Iterator[tuple[int, str]]:
    """The rows with an image that cannot be read, and why. A row that is wrong itself is passed."""
    with ThreadPoolExecutor(THREADS) as threads:
        for start in range(0, len(indices), THREADS * _AT_ONCE):
            looks = []
            for index in indices[start : start + THREADS * _AT_ONCE]:
                with suppress(DataError):  # read in this thread: a user's dataset may belong to it
                    looks.append((index, part.look_at_images(index)))
            shares = [looks[at : at + _AT_ONCE] for at in range(0, len(looks), _AT_ONCE)]
            yield from chain.from_iterable(threads.map(_faults, shares))


def _faults(looks: Iterable[tuple[int, Callable[[], None]]]) -> list[tuple[int, str]]:
    found = []
    for index, look in looks:
        try:
            look()
        except DataError as error:
            found.append((index, str(error)))
    return found
