"""`mm_grpo_warm.json` in a model folder: what `mm-grpo warm` taught the model, and in which form of prompts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from mm_grpo.config import GRPOConfig
from mm_grpo.config.messages import shown
from mm_grpo.errors import ConfigError
from mm_grpo.files import atomic_write, read_json

MARK = "mm_grpo_warm.json"
FORM = {"gold_template", "system_prompt", "chat_template_kwargs", "min_pixels", "max_pixels"}
"""Fields of the section `data` that give prompts and answers their form."""


def write_mark(folder: Path, config: GRPOConfig, *, base: str, answer: str, steps: int, nll: float) -> None:
    """Write the mark: the base model's path, the column that was taught, and the last steps' `nll` in nats a token."""
    mark = {"base": base, "answer": answer, **_form(config), "steps": steps, "nll": nll}
    atomic_write(folder / MARK, json.dumps(mark, indent=2) + "\n")


def read_mark(path: str | Path) -> dict[str, Any] | None:
    """Return the mark of the model at `path`; None if that is no folder or has none. ConfigError if it is broken."""
    file = Path(path) / MARK
    try:
        return dict(read_json(file, dict)) if os.path.isfile(file) else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: '{file}' is broken ({error}); remove it, or warm again") from None


def changes_of_form(config: GRPOConfig, mark: dict[str, Any] | None) -> list[str]:
    """Return a sentence for each setting in which the config's form is not the one that was taught."""
    taught = {**_form(config), **(mark or {})}
    return [
        f"model.path was warmed with {name} = {shown(taught[name])}, and this run, with {shown(now)}, has another form"
        for name, now in _form(config).items()
        if now != taught[name]
    ]


def _form(config: GRPOConfig) -> dict[str, Any]:
    return {f"data.{n}": value for n, value in config.data.model_dump(mode="json", include=FORM).items()}
