"""`mm-grpo estimate`: what a config will hold of a GPU's memory, from the model's config.json alone.

The model is built without weights (torch's meta device), so that every count of weights is exact; the arithmetic is
that of memory.py, which the run prints at its start. A card of N GB has N * 10^9 bytes. What does not fit is tried
again with one setting more, in the order of what costs least.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoModelForImageTextToText

from mm_grpo.build import processor_of
from mm_grpo.config import GRPOConfig
from mm_grpo.config.messages import yaml_repr
from mm_grpo.errors import ConfigError
from mm_grpo.learner.lora import add_adapters
from mm_grpo.preflight.memory import (
    FORWARD,
    GB,
    TEXT,
    ModelSizes,
    Phases,
    in_gb,
    largest_pack,
    longest,
    memory_of_run,
    prompt_tokens,
    with_prompt_length,
)
from mm_grpo.processors.base import processor_class
from mm_grpo.processors.model_folder import quoted
from mm_grpo.processors.qwen_vl import IMAGE_TOKENS, QwenVLFamily
from mm_grpo.run.environment import memory_limit
from mm_grpo.terminal import print_line

PROCESSES = "--processes"
CARDS = (24, 48, 80)
"""Sizes of GPUs [GB] that are shown beside what is asked for."""
FEWEST = 512
"""Fewest tokens of a pack that are tried."""


@dataclass(frozen=True)
class Image:
    """The largest image that `data.max_pixels` allows."""

    pixels: int
    tokens: int


def build_on_meta(config: GRPOConfig) -> tuple[Any, Any]:
    """The model of a config without weights, trained parts marked, and its family. ConfigError for what is unknown."""
    options = {"trust_remote_code": config.model.trust_remote_code}
    cls, found = processor_class(config.model.path, named=config.model.processor, **options)
    family = cls.family
    dtype = torch.float32 if config.model.dtype == "float32" else torch.bfloat16
    try:
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(found, dtype=dtype, **options)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        where = f"model.path = '{config.model.path}'"
        raise ConfigError(f"{where}: no model can be built by its config.json ({quoted(error)})") from None
    family.check(model)
    if config.model.freeze_vision:
        family.tower(model).requires_grad_(False)
    if config.model.lora is not None:
        add_adapters(model, config.model.lora, family)
    return model, family


def sizes_of(config: GRPOConfig) -> tuple[ModelSizes, Image]:
    """Counts and axes of a config's model, and its largest image. ConfigError where its config does not tell them."""
    model, family = build_on_meta(config)
    try:
        sizes = ModelSizes.of(model, _reference(config, model))
        if config.model.quantization is not None:
            text = family.language_model(model).named_modules()
            frozen = [m for n, m in text if isinstance(m, nn.Linear) and ".lora_" not in n]
            sizes = replace(sizes, quantised=sum(m.weight.numel() for m in frozen))
    except (AttributeError, TypeError) as error:
        where = f"model.path = '{config.model.path}'"
        raise ConfigError(
            f"{where}: its text config names its axes unlike Llama's ({quoted(error)})"
        ) from None
    return sizes, _image(config, model, family)


def phases(sizes: ModelSizes, image: Image, config: GRPOConfig, card: int, *, processes: int) -> Phases:
    """What one process of a run holds of a GPU of `card` bytes, with gradient checkpointing unless the config says
    otherwise."""
    config = with_prompt_length(config, image.tokens)
    checkpointing = config.optim.gradient_checkpointing is not False
    return memory_of_run(
        sizes, config, card, processes=processes, checkpointing=checkpointing, max_pixels=image.pixels
    )


def checkpoint_note(config: GRPOConfig) -> str:
    """What is to be said before a run whose state in the host's memory is more than there is; "" where it fits."""
    limit = memory_limit()
    if limit is None or not (config.run.save_every or config.optim.offload_optimizer):
        return ""
    trained = sizes_of(config)[0].trained
    copy, offloaded = (
        12 * trained if config.run.save_every else 0,
        16 * trained * config.optim.offload_optimizer,
    )
    if copy + offloaded <= limit:
        return ""
    return (
        f"run.save_every, optim.offload_optimizer: a copy for a checkpoint ({in_gb(copy)}) and an optimizer in the "
        f"host's memory ({in_gb(offloaded)}) are more than its {in_gb(limit)}; checkpoints will be written while the "
        "run waits"
    )


# what helps ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Remedy:
    """Settings that fit a config on a card, with the bytes that it holds then; empty where it fits as it is."""

    settings: tuple[str, ...]
    peak: int


def what_fits(config: GRPOConfig, card: int, *, processes: int) -> Remedy | None:
    """Settings, in the order of what costs least, with which a config fits; None where none do.

    One after another is added while it helps, and once all fits those that it does not need are taken back, the
    dearest first.
    """
    known: dict[str, tuple[ModelSizes, Image]] = {}

    def tried(settings: Mapping[str, Any]) -> Phases:
        changed = config.with_values({n: v for n, v in settings.items() if n != PROCESSES})
        model = changed.model.model_dump_json()
        if model not in known:
            known[model] = sizes_of(changed)
        return phases(*known[model], changed, card, processes=int(settings.get(PROCESSES, processes)))

    def legal(settings: Mapping[str, Any]) -> bool:
        return "model.quantization" not in settings or bool(config.model.lora or settings.get("model.lora"))

    taken: dict[str, Any] = {}
    current = tried(taken)
    sizes, image = known[config.model.model_dump_json()]
    for name, value in _knobs(with_prompt_length(config, image.tokens), sizes, card, processes):
        if _fits(current, card):
            break
        if not legal({**taken, name: value}):
            continue
        found = tried({**taken, name: value})
        if _excess(found, card) < _excess(current, card) or (current.fault and not found.fault):
            taken[name], current = value, found
    if not _fits(current, card):
        return None
    for name in reversed(list(taken)):
        fewer = {n: v for n, v in taken.items() if n != name}
        if legal(fewer) and _fits(found := tried(fewer), card):
            taken, current = fewer, found
    shown = (
        f"{n} {v}" if n == PROCESSES else f"{n}={yaml_repr(v)}".replace("'", "") for n, v in taken.items()
    )
    return Remedy(tuple(shown), current.peak)


def _knobs(config: GRPOConfig, sizes: ModelSizes, card: int, processes: int) -> Iterator[tuple[str, Any]]:
    """Settings to try, from what costs least: seconds of a step, then time, then machines, then what is learned."""
    optim, vllm = config.optim, config.rollout.vllm
    if config.rollout.engine == "vllm":
        if vllm.sleep_level == 0:
            yield "rollout.vllm.sleep_level", 2
        sequences = sizes.cache_token * longest(config) * config.rollout.num_generations
        share = -(-100 * (sizes.sent + FORWARD + sequences) // card) / 100
        if share <= 1 and share != vllm.gpu_memory_utilization:
            yield "rollout.vllm.gpu_memory_utilization", share
    if optim.gradient_checkpointing is False:
        yield "optim.gradient_checkpointing", True
    tokens = largest_pack(config, processes)
    while tokens // 2 >= FEWEST:
        tokens //= 2
        if tokens >= longest(config):
            yield "optim.max_tokens_per_pack", tokens
    if not optim.offload_optimizer:
        yield "optim.offload_optimizer", True
    for more in (2, 4, 8):
        if more > processes and config.rollout.prompts_per_step % more == 0:
            yield PROCESSES, more
    if config.model.lora is None:
        if not config.model.freeze_vision:
            yield "model.freeze_vision", True
        yield "model.lora", {"rank": 16}
    yield "model.quantization", "nf4"


def _fits(found: Phases, card: int) -> bool:
    return not found.fault and found.peak <= card


def _excess(found: Phases, card: int) -> int:
    """Bytes that both phases are past the card: what helps one of them counts though the other is larger."""
    return sum(max(0, sum(phase.values()) - card) for phase in (found.learner, found.rollout))


# what is shown -------------------------------------------------------------------------------


def show(
    config: GRPOConfig, cards: Sequence[float], *, processes: int, console: Console | None = None
) -> None:
    """Print the table for each GPU of `cards` [GB], and with which settings the config fits on these and CARDS."""
    console = console or Console(highlight=False)
    sizes, image = sizes_of(config)
    counted = "data.max_prompt_length"
    if config.data.max_prompt_length is None:
        counted = f"{counted} is null: the image and {TEXT} of text"
        config = with_prompt_length(config, image.tokens)
    how = "without" if config.optim.gradient_checkpointing is False else "with"
    length = longest(config)
    print_line(
        f"{config.model.path}: {sizes.weights:,} weights, {sizes.trained:,} of them trained, {8 * sizes.numbers}-bit; "
        f"{processes} process(es), packs of at most {largest_pack(config, processes):,} tokens {how} gradient "
        f"checkpointing\nan image has at most {image.pixels:,} pixels and {image.tokens:,} tokens; one image to a "
        f"prompt, prompts of {prompt_tokens(config):,} tokens ({counted})",
        console,
    )
    for card in cards:
        found = phases(sizes, image, config, round(card * GB), processes=processes)
        console.print(_table(found, card))
        notes = {
            "vllm_server": "vLLM servers have GPUs of their own, which are not counted",
            "vllm": f"vLLM's cache: {found.cache:,} tokens, {found.cache // length:,} sequences of {length:,}",
        }
        if note := found.fault or notes.get(config.rollout.engine):
            print_line(note, console)
    for card in sorted({*map(float, cards), *map(float, CARDS)}):
        print_line(fit_sentence(what_fits(config, round(card * GB), processes=processes), card), console)


def fit_sentence(found: Remedy | None, card: float) -> str:
    """
    >>> fit_sentence(Remedy((), 21 * 10**9), 24)
    'fits on 24 GB (21.0 GB)'
    """
    if found is None:
        return f"does not fit on {card:g} GB, whatever is set: take a smaller model"
    if not found.settings:
        return f"fits on {card:g} GB ({found.peak / GB:.1f} GB)"
    return f"fits on {card:g} GB with {', '.join(found.settings)} ({found.peak / GB:.1f} GB)"


def _table(found: Phases, card: float) -> Table:
    table = Table(title=f"GB of one process on a GPU of {card:g} GB")
    for title in ("", "while it learns", "while it samples"):
        table.add_column(title, justify="left" if not title else "right")
    columns = [found.learner, found.rollout]

    def add(name: str, counts: Sequence[int]) -> None:
        if any(counts):
            table.add_row(name, *(f"{count / GB:.2f}" if count else "-" for count in counts))

    for name in dict.fromkeys([*found.learner, *found.rollout]):
        add(name, [phase.get(name, 0) for phase in columns])
    table.add_section()
    add("sum", [sum(phase.values()) for phase in columns])
    return table


# parts ---------------------------------------------------------------------------------------


def _reference(config: GRPOConfig, model: Any) -> Any:
    """The model that the reference policy is a copy of, if it is one of its own."""
    if config.algorithm.beta == 0:
        return None
    if (path := config.algorithm.reference_path) is not None:
        return build_on_meta(config.with_values({"model.path": path, "model.lora": None}))[0]
    return model if config.model.lora is None else None


def _image(config: GRPOConfig, model: Any, family: Any) -> Image:
    """The largest image, by the processor's files, or for Qwen-VL by the model's config where they are not there."""
    folder = Path(config.model.path)
    files = ("preprocessor_config.json", "processor_config.json")
    has_files = any((folder / name).is_file() for name in files)
    if not folder.is_dir() or has_files:
        processor: Any = processor_of(config)
        tokens = processor.max_image_tokens() if hasattr(processor, "max_image_tokens") else 0
        return Image(processor.max_pixels, tokens)
    if not isinstance(family, QwenVLFamily):
        raise ConfigError(
            f"model.path = '{folder}': has no preprocessor_config.json, which bounds images; copy it beside config.json"
        )
    vision = model.config.vision_config
    area = (vision.patch_size * vision.spatial_merge_size) ** 2
    pixels = config.data.max_pixels or IMAGE_TOKENS * area
    return Image(pixels, pixels // area)
