"""Rows of a resumed run that are not what they were: refused, or with `run.allow_changed_rows` taken in their places.

A row keeps its index and with it its slots and seeds, so what the run computes of all other rows stays the same. Hence
nothing else may change: rows that are added, removed or moved, and a mixture's sources and weights, change the order.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mm_grpo.data.base import Rows
from mm_grpo.data.media_check import rows_to_look_at
from mm_grpo.data.order import PromptOrder
from mm_grpo.errors import ConfigError
from mm_grpo.run.manifest import Checkpoint, checkpoints_in, read_checkpoint

logger = logging.getLogger("mm_grpo")
Fingerprint = Mapping[str, Any]
"""Result of `Rows.fingerprint`."""


def left_out_before(checkpoints: Path) -> dict[str, list[int]] | None:
    """Return the rows that a run left out of each source at its start; None without a checkpoint."""
    for path in reversed(checkpoints_in(checkpoints).values()):
        with suppress(ConfigError):  # it is damaged
            sets = read_checkpoint(path, files=False).extra["rows"].values()
            return {source["name"]: source["left_out"] for rows in sets for source in _sources(rows)}
    return None


def check_rows(
    checkpoint: Checkpoint,
    fingerprints: Mapping[str, Fingerprint],
    sets: Mapping[str, Rows],
    order: PromptOrder,
    *,
    allowed: bool,
) -> Sequence[int]:
    """Compare the rows of `sets` with a checkpoint's; return the indices of training rows that changed.

    Raises ConfigError if rows changed and that is not `allowed`, or if their order changed; warns if it is allowed.
    """
    train_rows: Sequence[int] = ()
    for field, old in checkpoint.extra["rows"].items():
        rows, new, step = sets[field], fingerprints[field], checkpoint.step
        text = f"data.{field}: the checkpoint '{checkpoint.path}' was made with other rows"
        changed = _changed(old, new, rows)
        if changed is None:
            raise ConfigError(
                f"{text} ({old['rows']} then, {new['rows']} now), in other places, or a mixture with other weights, "
                "so each step would have others; put them back in their places, or start a new run"
            )
        if not changed:
            continue
        note = "; evaluations before and after will not compare"
        if field == "train":
            train_rows, drawn = changed, order.drawn(step)
            note = f"; drawn in steps 1 to {step}: {len(drawn.intersection(changed))}"
        text += f": {len(changed)} of {len(rows)} changed, the first {rows.row_name(changed[0])}{note}"
        if not allowed:
            raise ConfigError(f"{text}. Put them back, or go on with run.allow_changed_rows=true")
        logger.warning("%s. They are used as they are now, because run.allow_changed_rows is true", text)
    return train_rows


def _changed(old: Fingerprint, new: Fingerprint, rows: Rows) -> list[int] | None:
    """Return the indices of rows that changed in their places; None if the order of rows changed."""
    changed: list[tuple[int, bytes, bytes]] = []
    first, old_sources, sources = 0, _sources(old), _sources(new)
    if len(old_sources) != len(sources):
        return None
    for a, b, source in zip(old_sources, sources, rows.sources, strict=True):
        if any(a.get(key) != b.get(key) for key in ("name", "weight", "rows", "left_out")):
            return None
        then, now = _digests(a), _digests(b)
        if len(then) != len(now):  # rows in memory, and not any more: any may have changed
            then = [b""] * len(now)
        places = zip(rows_to_look_at(source), then, now, strict=True)
        changed += [(first + index, x, y) for index, x, y in places if x != y]
        first += len(source)
    moved = {then for _, then, _ in changed} & {now for _, _, now in changed}
    return None if 2 * len(moved) > len(changed) else [index for index, _, _ in changed]


def _digests(source: Fingerprint) -> list[bytes]:
    data = base64.b64decode(source.get("digests", ""))
    return [data[at : at + 8] for at in range(0, len(data), 8)]


def _sources(rows: Fingerprint) -> Sequence[Fingerprint]:
    sources: Sequence[Fingerprint] = rows.get("sources", [rows])
    return sources
