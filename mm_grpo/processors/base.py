"""The class Processor, and `load_processor`, which loads the processor of a model.

The registry is a dict from the `model_type` of a model's config to a class. `load_processor` imports the family's file
on first use, or the file that `model.processor` names.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from mm_grpo.errors import ConfigError, DataError
from mm_grpo.import_path import load_named
from mm_grpo.messages import pixel_limits
from mm_grpo.processors.model_folder import read_config, warn_of_unread_code

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig
    from mm_grpo.processors.family import Family
    from mm_grpo.types import Medium, Picture, Prompt, Sample

Layout = Literal["shared_prefix", "unshared"]
"""Layout of completions for the learner: after one shared prompt, or each after a prompt of its own."""
_FAMILIES = {
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_vl_moe", "qwen3_5_moe"), "qwen_vl"
    ),
    "internvl": "internvl",
    **dict.fromkeys(("smolvlm", "idefics3"), "smolvlm"),
    "llava_onevision": "llava_onevision",
    "gemma3": "gemma3",
}
_REGISTRY: dict[str, type] = {}
_C = TypeVar("_C", bound=type)


class Processor(Protocol):
    """Processor of a model: samples in, prompts out."""

    family: Family
    """How the models of its family are built."""
    media_token_ids: frozenset[int]
    """Ids of images, videos and vision boundaries: never sampled, never normalised over."""
    stop_token_ids: frozenset[int]
    """Ids that end a completion."""
    min_pixels: int
    max_pixels: int
    """Limits of an image's area after the resize; an engine gets them too."""
    layout: Layout
    """`shared_prefix` if a group's prompt can be run once for all completions, exactly; else `unshared`."""

    def prompt(self, sample: Sample) -> Prompt:
        """Process one sample. DataError, naming the row, when it cannot be used."""

    def max_prompt_tokens(self, sample: Sample, images: int) -> int:
        """Return a bound on the tokens that `prompt` makes of a sample with so many images of any size, and no video.

        A processor that takes videos has `max_video_tokens(frames)`, the bound for a video of so many frames.
        """

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a completion, without special tokens."""

    def save(self, path: str | Path) -> None:
        """Write tokenizer, image processor and chat template into a model's folder."""


class ConversationProcessor(Processor, Protocol):
    """Processor of conversations that go on for several turns."""

    def picture(self, medium: Medium, *, row: str) -> Picture:
        """Process an image or a video of an observation.

        BadMedia, naming the row, when this one cannot be used; DataError when none of its kind can.
        """

    def extended(self, prompt: Prompt, token_ids: Sequence[int], pictures: Sequence[Picture]) -> Prompt:
        """Append collapsed ids, with one placeholder for each of `pictures`, to a prompt. Its ids stay the same."""

    def observation(self, answers: Sequence[Sequence[str | Medium]], sample: Sample) -> list[int]:
        """Return the collapsed ids between two turns of the model with these answers to its calls, by the template."""


_MEMBERS = (*Processor.__annotations__, "prompt", "max_prompt_tokens", "decode", "save")


def register(*model_types: str) -> Callable[[_C], _C]:
    """Decorate the class of the processor for these `model_type`s."""

    def add(cls: _C) -> _C:
        for name in model_types:
            _REGISTRY[name] = cls
        return cls

    return add


def load_processor(
    path: str,
    *,
    processor: str | None = None,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    video_max_pixels: int | None = None,
    trust_remote_code: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Processor:
    """Load the processor for the model at `path`.

    `min_pixels` and `max_pixels` limit an image's area, `video_max_pixels` a video frame's; None leaves the model's own
    limit. `processor` is the config's `model.processor`: a user's class, as `file.py:Class` or `module:Class`. Raises
    ConfigError when the folder holds no model, the family is unknown, the class is no processor, or an argument cannot
    be applied.
    """
    cls, config = processor_class(path, processor=processor, trust_remote_code=trust_remote_code)
    # a user's class need not take arguments that most configs leave out
    options: dict[str, Any] = {"trust_remote_code": True} if trust_remote_code else {}
    if video_max_pixels is not None:
        options["video_max_pixels"] = video_max_pixels
    if chat_template_kwargs:
        options["chat_template_kwargs"] = chat_template_kwargs
    loaded: Processor = cls(path, config, min_pixels=min_pixels, max_pixels=max_pixels, **options)
    template_kwargs = dict(chat_template_kwargs or {})
    if template_kwargs and getattr(loaded, "chat_template_kwargs", {}) != template_kwargs:
        raise ConfigError(
            f"data.chat_template_kwargs = {template_kwargs}: {processor or cls.__qualname__} does not take "
            "chat_template_kwargs, so they would change nothing; give its objects that attribute, or leave them out"
        )
    if missing := [name for name in _MEMBERS if not hasattr(loaded, name)]:
        raise ConfigError(
            f"{processor or cls.__qualname__} is no processor: its objects have no {', '.join(missing)}; they need "
            "what mm_grpo.processors.base.Processor lists (model.processor)"
        )
    return loaded


def processor_of(config: GRPOConfig, **changes: Any) -> Processor:
    """Load the processor that a config names, with its pixel limits and template arguments, or `changes` to them."""
    options: dict[str, Any] = {
        "processor": config.model.processor,
        "min_pixels": config.data.min_pixels,
        "max_pixels": config.data.max_pixels,
        "video_max_pixels": config.data.video_max_pixels,
        "trust_remote_code": config.model.trust_remote_code,
        "chat_template_kwargs": config.data.chat_template_kwargs,
    }
    return load_processor(config.model.path, **{**options, **changes})


def processor_class(
    path: str, *, processor: str | None = None, trust_remote_code: bool = False
) -> tuple[Any, Any]:
    """Return the class of the processor for the model at `path`, and the model's config; nothing else is read there."""
    # before the config is read: the user's file may register its model's classes with transformers
    cls = None if processor is None else load_named(processor, "model.processor", ConfigError)
    config = read_config(path, trust_remote_code=trust_remote_code)
    if not trust_remote_code:
        warn_of_unread_code(path, config)
    return cls or _class_for(config.model_type, path), config


def check_followed(processor: Processor, sample: Sample) -> None:
    """Raise DataError for a row with settings of its own and a user's processor without `follows_rows`."""
    settings = sample.chat_template_kwargs or any(pixel_limits(sample.messages))
    if settings and not getattr(processor, "follows_rows", False):
        raise DataError(
            f"{sample.uid}: chat_template_kwargs, or pixel limits of an image part or of a source: "
            f"{type(processor).__qualname__} (model.processor) does not say that it follows them; leave them out, or "
            "let it follow them and set its attribute follows_rows = True"
        )


def mm_processor_kwargs(processor: Processor) -> Mapping[str, Any]:
    """Return vLLM's arguments for images: the processor's, or if it has none, the limits by Qwen's names."""
    size = {"shortest_edge": processor.min_pixels, "longest_edge": processor.max_pixels}
    kwargs: Mapping[str, Any] = getattr(processor, "mm_processor_kwargs", {"size": size})
    return kwargs


def _class_for(model_type: str, path: str) -> Any:
    if model_type not in _REGISTRY and model_type in _FAMILIES:
        importlib.import_module(f"mm_grpo.processors.{_FAMILIES[model_type]}")
    if model_type not in _REGISTRY:
        legal = ", ".join(sorted({*_FAMILIES, *_REGISTRY}))
        raise ConfigError(
            f"model.path = '{path}': no processor for model type '{model_type}'; known types are {legal}; write one of "
            "your own and name it in model.processor, as path/to/file.py:Class"
        )
    return _REGISTRY[model_type]
