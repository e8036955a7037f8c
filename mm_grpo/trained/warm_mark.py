"""`mm_grpo_warm.json` in a model folder: what `mm-grpo warm` taught the model, and in which form of prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_grpo.config.messages import shown
from mm_grpo.errors import ConfigError
from mm_grpo.files import atomic_write, read_json

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig

MARK = "mm_grpo_warm.json"
FORM = ("gold_template", "system_prompt", "chat_template_kwargs", "min_pixels", "max_pixels")
"""Fields of the section `data` that give prompts and answers their form."""


def write_mark(
    folder: str | Path, config: GRPOConfig, *, base: str, answer: str, steps: int, nll: float
) -> None:
    """Write the mark into a model's folder: the path of its base model, the column that was taught, and the form.

    `nll` is the mean of the last of the `steps`, in nats per token.
    """
    mark = {"base": base, "answer": answer, **_form(config), "steps": steps, "nll": nll}
    atomic_write(Path(folder) / MARK, json.dumps(mark, indent=2) + "\n")


def read_mark(path: str | Path) -> dict[str, Any] | None:
    """Return the mark of the model at `path`; None if that is no folder or has none. ConfigError if it is broken."""
    file = Path(path) / MARK
    try:
        mark: dict[str, Any] = read_json(file, dict)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path: '{file}' is broken ({error}); remove it, or make the model again with `mm-grpo warm`"
        ) from None
    return mark


def changes_of_form(config: GRPOConfig, mark: Mapping[str, Any] | None) -> list[str]:
    """Return a sentence for each setting in which the config's form is not the one that was taught."""
    return [
        f"model.path was warmed with {name} = {shown((mark or {})[name])} ({MARK}), and this run has {shown(now)}: "
        "it begins in another form"
        for name, now in _form(config).items()
        if (mark or {}).get(name, now) != now
    ]


def _form(config: GRPOConfig) -> dict[str, Any]:
    """Return the fields of FORM by dotted path, as JSON holds them."""
    values = config.data.model_dump(include={*FORM})
    return {f"data.{name}": json.loads(json.dumps(values[name], default=str)) for name in FORM}
