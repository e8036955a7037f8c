"""What a processor is, and how one is found for a model.

The registry is a dict from the `model_type` of a model's config to a class; `load_processor` imports
the family's file when it is first asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from mm_grpo.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from mm_grpo.types import Prompt, Sample

_FAMILIES = {"qwen2_vl": "qwen_vl", "qwen2_5_vl": "qwen_vl", "qwen3_vl": "qwen_vl"}
_REGISTRY: dict[str, type] = {}
_C = TypeVar("_C", bound=type)


class Processor(Protocol):
    """One family of vision-language models, seen from the data side."""

    media_token_ids: frozenset[int]
    """Ids of images, videos and vision boundaries: never sampled, never normalised over."""
    stop_token_ids: frozenset[int]
    """Ids that end a completion."""
    min_pixels: int
    max_pixels: int
    """Least and largest area of an image after the resize, which an engine is given too."""
    layout: Literal["shared_prefix", "padded"]
    """`shared_prefix` where a group's prompt can be run once for all completions, exactly."""

    def prompt(self, sample: Sample) -> Prompt:
        """Process one sample. DataError names the row when it cannot be used."""
        ...

    def blank(self) -> Mapping[str, Tensor]:
        """The vision tensors of the smallest blank image, for batches without one."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a completion, without special tokens."""
        ...

    def save(self, path: str | Path) -> None:
        """Write tokenizer, image processor and chat template beside a model's weights."""
        ...


def register(*model_types: str) -> Callable[[_C], _C]:
    """Class decorator: this processor serves these `model_type`s."""

    def add(cls: _C) -> _C:
        for name in model_types:
            _REGISTRY[name] = cls
        return cls

    return add


def load_processor(path: str, *, min_pixels: int | None = None, max_pixels: int | None = None) -> Processor:
    """The processor for the model at `path`, with our pixel limits or the model's own (pixels of an image).

    Raises ConfigError when the folder holds no model or the family is unknown.
    """
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path = '{path}': no model config can be read there ({_first_line(error)}); "
            "give a folder that save_pretrained wrote, or a hub name that this machine can reach"
        ) from error
    if config.model_type not in _REGISTRY and config.model_type in _FAMILIES:
        importlib.import_module(f"mm_grpo.processors.{_FAMILIES[config.model_type]}")
    if config.model_type not in _REGISTRY:
        known = ", ".join(sorted({*_FAMILIES, *_REGISTRY}))
        raise ConfigError(
            f"model.path = '{path}': no processor for model type '{config.model_type}'; known types are {known}; "
            "mm_grpo.processors.base.register adds one"
        )
    loaded: Processor = _REGISTRY[config.model_type](
        path, config, min_pixels=min_pixels, max_pixels=max_pixels
    )
    return loaded


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
