"""What tells one dataset from another: a run that is resumed must go on with the rows it began with.

Looked at are the number of rows, and of up to 1,000 of them, evenly spread, the conversation, the columns and
where the images come from. Images are not opened: one that was exchanged behind its path is not noticed.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from PIL import Image

from mm_grpo.data.dataset import Dataset

LOOKED_AT = 1000


def fingerprint(dataset: Dataset) -> dict[str, Any]:
    """`rows`, how many there are, and `sha256` of what was looked at; made of what JSON holds."""
    state = hashlib.sha256()
    for index in range(0, len(dataset), -(-len(dataset) // LOOKED_AT)):
        fields = dataset.fields(index)
        text = json.dumps([fields.messages, fields.images, fields.columns], sort_keys=True, default=_plain)
        state.update(text.encode() + b"\0")
    return {"rows": len(dataset), "sha256": state.hexdigest()}


def _plain(value: Any) -> str:
    """Anything that JSON does not hold, without what differs between two readings of the same row."""
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, Image.Image):
        return f"{value.mode} {value.size}"
    if hasattr(value, "tolist"):  # arrays
        return str(value.tolist())
    text = str(value)
    return type(value).__name__ if " at 0x" in text else text
