"""Rows whose images cannot be read, found before a model is loaded: missing files, and files that hold no picture.

The first bytes of every file are looked at, shared out over the processes; of datasets that are not in
memory those of `LOOKED_AT` rows, evenly spaced. What shows in decoding alone is found when the row is reached.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from mm_grpo.data.base import Rows
from mm_grpo.data.dataset import Dataset
from mm_grpo.data.image_check import rows_to_look_at
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.errors import DataError, by_cause

log = logging.getLogger(__name__)
MOST = 0.1
"""Most of a source's rows, as a share, that `data.on_bad_image: drop` leaves out."""


def readable(rows: Rows, on_bad_image: str, ranks: Ranks) -> Rows:
    """The rows whose images can be read, the same on every process, which all call it.

    DataError where one cannot and `on_bad_image` is not drop, or where more than the share MOST of a source cannot.
    """
    return rows.map_sources(lambda source: _readable(source, on_bad_image == "drop", ranks))


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
    for index in indices:
        try:
            look = part.look_at_images(index)
        except DataError:
            continue
        try:
            look()
        except DataError as error:
            yield index, str(error)
