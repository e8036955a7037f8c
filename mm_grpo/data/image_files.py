"""Rows whose images cannot be used, found before a model is loaded: missing files, files that hold no picture, and
pictures of a size that the model's resize rule refuses.

The first bytes of every file are looked at, shared out over the processes; of datasets that are not in memory the files
of `SAMPLED_ROWS` rows. A fault that only decoding shows is found when the row is reached.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from mm_grpo.data.base import Rows
from mm_grpo.data.images import Refusal
from mm_grpo.data.media_check import rows_to_look_at
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.errors import DataError, by_cause

log = logging.getLogger(__name__)
MAX_DROPPED = 0.1
"""Largest share of a source's rows that `data.on_bad_media: drop` leaves out."""


def readable(
    rows: Rows,
    on_bad_media: str,
    ranks: Ranks,
    processor: Any = None,
    before: Mapping[str, Sequence[int]] | None = None,
) -> Rows:
    """Return the rows with images that can be used. Every process calls it, and each gets the same.

    `processor` may have a `refusal` of sizes (`HFProcessor`). `before` are the rows that a resumed run left out of each
    source at its start: they stay left out, and no others are, because the order of rows would change.
    DataError if an image cannot be used and `on_bad_media` is not drop, or if more than MAX_DROPPED of a source cannot.
    """
    refusal = getattr(processor, "refusal", None)
    refusal = refusal and lru_cache(2**16)(refusal)  # many images have the same size

    def usable(source: Rows) -> Rows:
        old = [] if before is None else before.get(source.name, [])
        source = source.without(old) if old else source
        indices = rows_to_look_at(source)
        shards = ranks.all_gather(list(_faults(source, ranks.shard(indices), refusal)), "looking at images")
        bad = dict(sorted(fault for shard in shards for fault in shard))
        causes = "; ".join(by_cause(bad.values(), len(indices))[:3])
        dropped, looked = len(bad) + len(old), len(indices) + len(old)
        if bad and (on_bad_media != "drop" or dropped > MAX_DROPPED * looked):
            raise DataError(f"{causes}. Repair them; data.on_bad_media=drop leaves out a tenth at most")
        if ranks.first and old:
            log.warning("%s: %d rows stay left out, as at the start of the run", source.name, len(old))
        if ranks.first and bad:
            what = "are left out" if before is None else "leave their places in the steps empty"
            log.warning("%s: %d rows %s (data.on_bad_media = drop): %s", source.name, len(bad), what, causes)
        return source if before is not None or not bad else source.without(bad)

    return rows.map_sources(usable)


def _faults(source: Rows, indices: Sequence[int], refusal: Refusal | None) -> Iterator[tuple[int, str]]:
    """Yield rows with an image that cannot be read, and why. A row that is wrong itself is skipped."""
    for index in indices:
        try:
            look = source.look_at_images(index, refusal)
        except DataError:
            continue
        try:
            look()
        except DataError as error:
            yield index, str(error)
