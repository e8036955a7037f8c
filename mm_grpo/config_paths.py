"""Relative paths in a config file, which may mean a place beside that file.

A recipe is a folder that works wherever it lies: `model: {path: base}` names the folder `base` beside
its config.yaml. So a relative path of a config file is first looked for beside the file; what is not
there is left as it stands, to be found from the working folder or as a hub name. Overrides and configs
made in Python always start from the working folder.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FIELDS = (("model", "path"), ("data", "train"), ("data", "image_dir"))


def beside(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A copy of a config file's mapping whose paths that exist in `folder` lead there."""
    found = copy.deepcopy(dict(values))
    for section, field in FIELDS:
        inner = found.get(section)
        if isinstance(inner, dict) and field in inner:
            inner[field] = _there(inner[field], folder)
    data = found.get("data")
    if isinstance(data, dict) and "eval" in data:
        sources = data["eval"]
        if isinstance(sources, dict) and "task" not in sources:
            data["eval"] = {name: _there(source, folder) for name, source in sources.items()}
        else:
            data["eval"] = _there(sources, folder)
    if isinstance(found.get("rewards"), list):
        found["rewards"] = [_reward(entry, folder) for entry in found["rewards"]]
    return found


def _there(value: Any, folder: Path) -> Any:
    if not isinstance(value, str) or Path(value).is_absolute() or not value:
        return value
    path = folder / value
    return str(path) if path.exists() else value


def _reward(entry: Any, folder: Path) -> Any:
    """A reward `file.py:fn`, alone or as the name in a mapping."""
    if isinstance(entry, dict) and isinstance(entry.get("name"), str):
        return {**entry, "name": _reward(entry["name"], folder)}
    if isinstance(entry, str) and ".py:" in entry:
        file, _, function = entry.rpartition(":")
        return f"{_there(file, folder)}:{function}"
    return entry
