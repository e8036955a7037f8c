"""`mm-grpo estimate`: what a config will hold of a GPU's memory, from the model's config.json alone.

The model is built without weights (torch's meta device), so that every count of weights is exact; the arithmetic is
that of memory.py, which the run prints at its start. A card of N GB has N * 10^9 bytes. What does not fit is tried
again with one setting more, in the order of what costs least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForImageTextToText

from mm_grpo.build import processor_of
from mm_grpo.config import GRPOConfig
from mm_grpo.config.engine_facts import ENGINE_FACTS
from mm_grpo.config.messages import yaml_repr
from mm_grpo.errors import ConfigError
from mm_grpo.learner.lora import add_adapters
from mm_grpo.learner.quantization import quantised_layers
from mm_grpo.preflight.memory import (
    FORWARD,
    GB,
    TEXT,
    Image,
    Lengths,
    ModelSizes,
    Phases,
    image_of,
    memory_of_run,
)
from mm_grpo.processors.base import processor_class
from mm_grpo.processors.model_folder import quoted
from mm_grpo.processors.qwen_vl import IMAGE_TOKENS, QwenVLFamily
from mm_grpo.terminal import print_line

CARDS = (24.0, 48.0, 80.0)
"""Sizes of GPUs [GB] that are shown beside what is asked for."""
FEWEST = 512
"""Fewest tokens of a pack that are tried."""


def build_on_meta(config: GRPOConfig) -> tuple[Any, Any]:
    """The model of a config without weights, trained parts marked, and its family. ConfigError for what is unknown."""
    options = {"trust_remote_code": config.model.trust_remote_code}
    cls, found = processor_class(config.model.path, processor=config.model.processor, **options)
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


_KNOWN: dict[tuple[str, str, bool], tuple[ModelSizes, Image]] = {}
"""By what decides them: a model is built again for each card and each setting that is tried."""


def sizes_of(config: GRPOConfig) -> tuple[ModelSizes, Image]:
    """Counts and axes of a config's model, and its largest image. ConfigError where its config does not tell them."""
    pixels, policy = config.data.model_dump_json(include={"max_pixels", "min_pixels"}), config.algorithm
    own = policy.beta > 0 and (policy.reference_path is not None or config.model.lora is None)
    key = (config.model.model_dump_json(), pixels, own)
    if key not in _KNOWN:
        model, family = build_on_meta(config)
        try:
            # a reference of its own is taken for as large
            sizes = ModelSizes.of(model, model if own else None)
        except (AttributeError, TypeError) as error:
            where = f"model.path = '{config.model.path}'"
            raise ConfigError(
                f"{where}: its text config names its axes unlike Llama's ({quoted(error)})"
            ) from None
        if config.model.quantization is not None:
            held = quantised_layers(model, family)
            sizes = replace(sizes, quantised=sum(layer.weight.numel() for layer in held))
        _KNOWN[key] = sizes, _image(config, model, family)
    return _KNOWN[key]


def phases(config: GRPOConfig, card: int, *, processes: int) -> Phases:
    """What one process of a run holds of a GPU of `card` bytes."""
    return memory_of_run(*sizes_of(config), config, card, processes=processes)


# what helps ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Remedy:
    """Settings that fit a config on a card, with the bytes that it holds then; empty where it fits as it is."""

    settings: tuple[str, ...]
    peak: int


def what_fits(config: GRPOConfig, card: int, *, processes: int) -> Remedy | None:
    """Settings, in the order of what costs least, with which a config fits; None where none do.

    One after another is added until all fits; then those that it does not need are taken back, the dearest first.
    """

    def tried(knobs: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], Phases]:
        settings = {name: value for knob in knobs for name, value in knob.items()}
        return settings, phases(config.with_values(settings), card, processes=processes)

    def fits(knobs: Sequence[dict[str, Any]]) -> bool:
        found = tried(knobs)[1]
        return not found.fault and found.peak <= card

    taken: list[dict[str, Any]] = []
    more = _knobs(config, card, processes)
    while not fits(taken):
        if (knob := next(more, None)) is None:
            return None
        taken.append(knob)
    for knob in taken[::-1]:
        fewer = [one for one in taken if one is not knob]
        if fits(fewer):
            taken = fewer
    settings, found = tried(taken)
    shown = (f"{name}={yaml_repr(value)}".replace("'", "") for name, value in settings.items())
    return Remedy(tuple(shown), found.peak)


def _knobs(config: GRPOConfig, card: int, processes: int) -> Iterator[dict[str, Any]]:
    """Settings to try, from what costs least: seconds of a step, then time, then what is learned."""
    (_, image), optim, vllm = sizes_of(config), config.optim, config.rollout.vllm
    lengths = Lengths.of(config, image, processes)
    colocated = ENGINE_FACTS[config.rollout.engine].colocated
    if colocated:
        if vllm.sleep_level == 0:
            yield {"rollout.vllm.sleep_level": 2}
        yield from _share(config, card, processes)
    if optim.gradient_checkpointing is False:
        yield {"optim.gradient_checkpointing": True}
    tokens = lengths.pack // 2
    while tokens >= max(FEWEST, lengths.sequence):
        yield {"optim.max_tokens_per_pack": tokens}
        tokens //= 2
    if not optim.offload_optimizer:
        yield {"optim.offload_optimizer": True}
    lora = {} if config.model.lora is not None else {"model.lora": {"rank": 16}}
    if lora and not config.model.freeze_vision:
        yield {"model.freeze_vision": True}
    if lora:
        yield lora
    four_bits = {**lora, "model.quantization": "nf4"} if config.model.quantization is None else {}
    yield four_bits
    if colocated and not vllm.in_four_bits:  # which runs the learner's then
        four_bits = {**four_bits, "rollout.vllm.engine_kwargs": {**vllm.engine_kwargs, "quantization": "nf4"}}
        yield four_bits | next(_share(config.with_values(four_bits), card, processes), {})


def _share(config: GRPOConfig, card: int, processes: int) -> Iterator[dict[str, Any]]:
    """The share of a GPU with which vLLM has its weights and the completions of a prompt."""
    sizes, image = sizes_of(config)
    length = Lengths.of(config, image, processes).sequence
    sequences = sizes.cache_token * length * config.rollout.num_generations
    share = -(-100 * (sizes.sent(config) + FORWARD + sequences) // card) / 100
    if share <= 1 and share != config.rollout.vllm.gpu_memory_utilization:
        yield {"rollout.vllm.gpu_memory_utilization": share}


# what is shown -------------------------------------------------------------------------------


def show(
    config: GRPOConfig, cards: Sequence[float], *, processes: int, console: Console | None = None
) -> None:
    """Print the table for each GPU of `cards` [GB], and with which settings the config fits on these and CARDS."""
    console = console or Console(highlight=False)
    sizes, image = sizes_of(config)
    lengths, engine = Lengths.of(config, image, processes), ENGINE_FACTS[config.rollout.engine]
    counted = "data.max_prompt_length"
    if config.data.max_prompt_length is None:
        counted = f"{counted} is null: the image and {TEXT} of text"
    how = "without" if config.optim.gradient_checkpointing is False else "with"
    print_line(
        f"{config.model.path}: {sizes.weights:,} weights, {sizes.trained:,} of them trained, {8 * sizes.numbers}-bit; "
        f"{processes} process(es), packs of at most {lengths.pack:,} tokens {how} gradient checkpointing\n"
        f"an image has at most {image.pixels:,} pixels and {image.tokens:,} tokens; one image to a prompt, prompts of "
        f"{lengths.prompt:,} tokens ({counted})",
        console,
    )
    for card in cards:
        found = phases(config, round(card * GB), processes=processes)
        console.print(_table(found, card))
        sequences, note = (
            f"{found.cache // lengths.sequence:,} sequences of {lengths.sequence:,}",
            found.fault,
        )
        if not note and engine.remote:
            note = "vLLM servers have GPUs of their own, which are not counted"
        elif not note and engine.colocated:
            note = f"vLLM's cache: {found.cache:,} tokens, {sequences}"
        if note:
            print_line(note, console)
    for card in sorted({*cards, *CARDS}):
        print_line(fit_sentence(what_fits(config, round(card * GB), processes=processes), card), console)


def fit_sentence(found: Remedy | None, card: float) -> str:
    """
    >>> fit_sentence(Remedy((), 21 * 10**9), 24)
    'fits on 24 GB (21.0 GB)'
    """
    if found is None:
        return f"does not fit on {card:g} GB, whatever is set: take a smaller model"
    settings = f" with {', '.join(found.settings)}" if found.settings else ""
    return f"fits on {card:g} GB{settings} ({found.peak / GB:.1f} GB)"


def _table(found: Phases, card: float) -> Table:
    table = Table(title=f"GB of one process on a GPU of {card:g} GB")
    for title in ("", "while it learns", "while it samples"):
        table.add_column(title, justify="left" if not title else "right")
    columns = [found.learner, found.rollout]
    counts = {n: [phase.get(n, 0) for phase in columns] for n in dict.fromkeys([*columns[0], *columns[1]])}
    counts["sum"] = [sum(phase.values()) for phase in columns]
    for name, row in counts.items():
        if name == "sum":
            table.add_section()
        if any(row):
            table.add_row(name, *(f"{count / GB:.2f}" if count else "-" for count in row))
    return table


# parts ---------------------------------------------------------------------------------------


def _image(config: GRPOConfig, model: Any, family: Any) -> Image:
    """The largest image, by the processor's files, or for Qwen-VL by the model's config where they are not there."""
    folder = Path(config.model.path)
    files = ("preprocessor_config.json", "processor_config.json")
    if not folder.is_dir() or any((folder / name).is_file() for name in files):
        return image_of(processor_of(config))
    if not isinstance(family, QwenVLFamily):
        raise ConfigError(
            f"model.path = '{folder}': has no preprocessor_config.json, which bounds images; copy it beside config.json"
        )
    vision = model.config.vision_config
    area = (vision.patch_size * vision.spatial_merge_size) ** 2
    pixels = config.data.max_pixels or IMAGE_TOKENS * area
    return Image(pixels, pixels // area)
