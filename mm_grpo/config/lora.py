"""The section `model.lora`."""

from __future__ import annotations

import re
from typing import ClassVar

from pydantic import Field, field_validator

from mm_grpo.config.messages import FieldError, Section
from mm_grpo.config.values import Number


class LoRAConfig(Section):
    """Low-rank adapters in place of training every weight (`model.lora: {rank: 16}`)."""

    where: ClassVar[str] = "model.lora"
    rank: int = Field(default=16, ge=1, le=16384)
    """Rank of the factors, >= 1 and <= 16384. Default: 16."""
    alpha: Number = Field(default=32.0, gt=0)
    """Scale of the factors' product, times 1 / rank, > 0. Default: 32.0."""
    target_modules: list[str] = Field(
        default=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    """Layers of the language model that get adapters, by the last part of their names. Default: ['q_proj', 'k_proj',
    'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj']."""
    vision: bool = False
    """Put adapters on every linear layer of the vision tower and its projector too; needs model.freeze_vision = false.
    Default: false."""

    @field_validator("target_modules")
    @classmethod
    def _names(cls, value: list[str]) -> list[str]:
        if not value or not all(re.fullmatch(r"[\w.]+", name) for name in value):
            raise FieldError(
                "must be the last parts of layers' names, at least one, such as [q_proj, v_proj]"
            )
        return value
