"""Rows whose images cannot be read, found before a model is loaded: missing files, and files that hold no picture.

The first bytes of every file are looked at, shared out over the processes; of datasets that are not in memory the files
of `SAMPLED_ROWS` rows. A fault that only decoding shows is found when the row is reached.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from mm_grpo.data.base import Rows
from mm_grpo.data.image_check import rows_to_look_at
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.errors import DataError, by_cause

log = logging.getLogger(__name__)
MAX_DROPPED = 0.1
"""Largest share of a source's rows that `data.on_bad_image: drop` leaves out."""


def readable(rows: Rows, on_bad_image: str, ranks: Ranks) -> Rows:
    """Return the rows with images that can be read. Every process calls it, and each gets the same.

    DataError if an image cannot be read and `on_bad_image` is not drop, or if more than MAX_DROPPED of a source cannot.
    """
    return rows.map_sources(lambda source: _readable(source, on_bad_image == "drop", ranks))


def _readable(source: Rows, drop: bool, ranks: Ranks) -> Rows:
    indices = rows_to_look_at(source)
    shards = ranks.all_gather(list(_faults(source, ranks.shard(indices))), "looking at images")
    bad = dict(sorted(fault for shard in shards for fault in shard))
    if not bad:
        return source
    causes = "; ".join(by_cause(bad.values(), len(indices))[:3])
    if not drop or len(bad) > MAX_DROPPED * len(indices):
        raise DataError(f"{causes}. Repair them; data.on_bad_image=drop leaves out a tenth at most")
    if ranks.first:
        log.warning("%s: %d rows are left out (data.on_bad_image = drop): %s", source.name, len(bad), causes)
    return source.without(bad)


def _faults(source: Rows, indices: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Yield rows with an image that cannot be read, and why. A row that is wrong itself is skipped."""
    for index in indices:
        try:
            look = source.look_at_images(index)
        except DataError:
            continue
        try:
            look()
        except DataError as error:
            yield index, str(error)
