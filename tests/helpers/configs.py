"""The one builder of small configs: `small_config(path, folder, run={"max_steps": 1})`, and what it lays over what."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mm_grpo.config import GRPOConfig

Values = dict[str, Any]
SMALL: Mapping[str, Any] = {
    "rollout": {"prompts_per_step": 4, "num_generations": 3, "max_completion_length": 6},
    "optim": {"learning_rate": 1e-3},
    "run": {"max_steps": 3, "save_every": 0, "eval_every": 0, "keep": "last"},
}
"""Three steps of four prompts, no checkpoint, evaluated at the ends alone, and saved as the last step leaves it."""


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> Values:
    """`changes` laid over `values`: a mapping is laid over its section's fields, anything else replaces it."""
    found = dict(values)
    for section, fields in changes.items():
        both = isinstance(fields, Mapping) and isinstance(found.get(section), Mapping)
        found[section] = {**found[section], **fields} if both else fields
    return found


def small_config(path: Any, folder: Path | None = None, /, **changes: Any) -> GRPOConfig:
    """SMALL for the model in `path`, with `changes` laid over it; the run goes to `folder`."""
    values = merged(SMALL, {"model": {"path": str(path)}})
    if folder is not None:
        values = merged(values, {"run": {"dir": str(folder)}})
    return GRPOConfig.from_dict(merged(values, changes))
