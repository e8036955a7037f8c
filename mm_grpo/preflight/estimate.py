"""`mm-grpo estimate`: estimate the GPU memory of a run from the model's config.json, without its weights.

The model is built on torch's meta device, so that every count of weights is exact; memory.py does the arithmetic.
A card of N GB has N * 10^9 bytes. For a config that does not fit, settings are added until it does, cheapest first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
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
from mm_grpo.learner.model import resolve_dtype
from mm_grpo.learner.quantization import quantised_layers
from mm_grpo.preflight.memory import (
    FORWARD,
    GB,
    TEXT,
    Largest,
    Lengths,
    ModelSizes,
    Phases,
    Servers,
    in_gb,
    largest_of,
    memory_of_run,
    moved_bytes,
)
from mm_grpo.processors.base import processor_class
from mm_grpo.processors.model_folder import quoted
from mm_grpo.processors.qwen_vl import FRAME_TOKENS, IMAGE_TOKENS, QwenVLFamily
from mm_grpo.terminal import print_line

CARDS = (24.0, 48.0, 80.0)  # sizes of GPUs [GB] that are always shown
MIN_PACK_TOKENS = 512  # fewest tokens of a pack that are tried
Knobs = Iterator[dict[str, Any]]


def build_on_meta(config: GRPOConfig) -> tuple[Any, Any]:
    """Return a config's model, without weights but with `requires_grad` set, and its family.

    Raises ConfigError if the model is of no known family or cannot be built.
    """
    options = {"trust_remote_code": config.model.trust_remote_code}
    cls, model_config = processor_class(config.model.path, processor=config.model.processor, **options)
    family = cls.family
    dtype = resolve_dtype(config.model.dtype, torch.device("cuda"))
    try:
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(model_config, dtype=dtype, **options)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ConfigError(
            f"model.path = '{config.model.path}': no model can be built from its config.json ({quoted(error)})"
        ) from None
    family.check(model)
    if config.model.freeze_vision:
        family.tower(model).requires_grad_(False)
    if config.model.lora is not None:
        add_adapters(model, config.model.lora, family)
    return model, family


_SIZES: dict[tuple[str, str, bool], tuple[ModelSizes, Largest]] = {}
"""Cache of `sizes_of`, because the search for settings that fit asks for the same model many times."""


def sizes_of(config: GRPOConfig) -> tuple[ModelSizes, Largest]:
    """Return the sizes of a config's model and its largest media; ConfigError if its config does not tell them."""
    limits = {"max_pixels", "min_pixels", "video_max_pixels", "video_max_frames"}
    pixels, algorithm = config.data.model_dump_json(include=limits), config.algorithm
    second_model = algorithm.beta > 0 and (algorithm.reference_path is not None or config.model.lora is None)
    key = (config.model.model_dump_json(), pixels, second_model)
    if key not in _SIZES:
        model, family = build_on_meta(config)
        try:
            # a reference model is counted as large as the model
            sizes = ModelSizes.of(model, model if second_model else None)
        except (AttributeError, TypeError) as error:
            raise ConfigError(
                f"model.path = '{config.model.path}': its text config names its axes unlike Llama's ({quoted(error)})"
            ) from None
        if config.model.quantization is not None:
            layers = quantised_layers(model, family)
            sizes = replace(sizes, quantised=sum(layer.weight.numel() for layer in layers))
        _SIZES[key] = sizes, _largest(config, model, family)
    return _SIZES[key]


def phases(config: GRPOConfig, card: int, *, processes: int, servers: Servers | None = None) -> Phases:
    """Estimate the memory of one process of a run, and of a server, on a GPU of `card` bytes."""
    return memory_of_run(*sizes_of(config), config, card, processes=processes, servers=servers)


@dataclass(frozen=True)
class Remedy:
    """Settings to change so that a run fits its GPU."""

    settings: tuple[str, ...]  # overrides, `a.b=value`; empty if the run fits already
    peak: int  # bytes of the larger phase with these settings


def find_remedy(
    config: GRPOConfig, card: int, *, processes: int, servers: Servers | None = None
) -> Remedy | None:
    """Return the cheapest settings with which a run fits a GPU of `card` bytes; None if none do.

    Settings are added, cheapest first, until the run fits; then unneeded ones are removed, dearest first.
    """

    def estimate(knobs: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], Phases]:
        settings = {name: value for knob in knobs for name, value in knob.items()}
        return settings, phases(config.with_values(settings), card, processes=processes, servers=servers)

    def fits(knobs: Sequence[dict[str, Any]]) -> bool:
        memory = estimate(knobs)[1]
        return not memory.fault and memory.peak <= card

    chosen: list[dict[str, Any]] = []
    remaining = _knobs(config, card, processes, servers)
    while not fits(chosen):
        if (knob := next(remaining, None)) is None:
            return None
        chosen.append(knob)
    for knob in chosen[::-1]:
        fewer = [k for k in chosen if k is not knob]
        if fits(fewer):
            chosen = fewer
    settings, memory = estimate(chosen)
    changed = {name: value for name, value in settings.items() if value != attrgetter(name)(config)}
    overrides = (f"{name}={yaml_repr(value)}".replace("'", "") for name, value in changed.items())
    return Remedy(tuple(overrides), memory.peak)


def _knobs(config: GRPOConfig, card: int, processes: int, servers: Servers | None) -> Knobs:
    """Yield settings to try, cheapest first: they cost seconds of a step, then more time, then quality."""
    (sizes, largest), optim, vllm = sizes_of(config), config.optim, config.rollout.vllm
    lengths, engine = Lengths.of(config, largest, processes), ENGINE_FACTS[config.rollout.engine]
    sharded = min(max(optim.zero_stage, 1), 2)
    if engine.colocated or (servers and servers.share_gpus):
        if vllm.sleep_level == 0:
            yield {"rollout.vllm.sleep_level": 2}
        yield from _share(config, card, processes, servers)
    if optim.gradient_checkpointing is False:
        yield {"optim.gradient_checkpointing": True}
    tokens = lengths.pack // 2
    while tokens >= max(MIN_PACK_TOKENS, lengths.sequence):
        yield {"optim.max_tokens_per_pack": tokens}
        tokens //= 2
    if engine.remote and processes > 1 and config.model.quantization is None:
        yield {"optim.zero_stage": 3, "optim.offload_optimizer": False}
    if not optim.offload_optimizer:
        yield {"optim.zero_stage": sharded, "optim.offload_optimizer": True}
    # the default names are not in a mixture of experts
    targets = {"target_modules": "all-linear"} if sizes.experts else {}
    lora = {} if config.model.lora is not None else {"model.lora": {"rank": 16, **targets}}
    if lora and not config.model.freeze_vision:
        yield {"model.freeze_vision": True}
    if lora:
        yield lora
    four_bits = {**lora, "model.quantization": "nf4"} if config.model.quantization is None else {}
    yield {**four_bits, "optim.zero_stage": sharded}
    if engine.colocated and not vllm.in_four_bits:  # vLLM then runs the learner's weights
        four_bits = {**four_bits, "rollout.vllm.engine_kwargs": {**vllm.engine_kwargs, "quantization": "nf4"}}
        yield four_bits | next(_share(config.with_values(four_bits), card, processes, None), {})


def _share(config: GRPOConfig, card: int, processes: int, servers: Servers | None) -> Knobs:
    """Yield the GPU share with room for vLLM's weights and all completions of a prompt, if it is legal and new."""
    sizes, largest = sizes_of(config)
    length = Lengths.of(config, largest, processes).sequence
    sequences = sizes.cache_token * length * config.rollout.num_generations
    held = (sizes.sent(config) + sequences) // (servers.tensor_parallel if servers else 1)
    share = -(-100 * (held + FORWARD) // card) / 100
    if share <= 1 and share != config.rollout.vllm.gpu_memory_utilization:
        yield {"rollout.vllm.gpu_memory_utilization": share}


def show(
    config: GRPOConfig,
    cards: Sequence[float],
    *,
    processes: int,
    servers: Servers,
    console: Console | None = None,
) -> None:
    """Print a table for each GPU size of `cards` [GB], and the settings that fit on these sizes and on CARDS."""
    console = console or Console(highlight=False)
    sizes, largest = sizes_of(config)
    lengths, engine = Lengths.of(config, largest, processes), ENGINE_FACTS[config.rollout.engine]
    basis = "data.max_prompt_length"
    if config.data.max_prompt_length is None:
        basis = f"{basis} is null: these and {TEXT} of text"
    images, videos = config.rollout.vllm.max_images or 1, config.rollout.vllm.max_videos or 0
    video, count = f", a video {largest.video_tokens:,} tokens" if videos else "", f"{images} image(s)"
    count += f" and {videos} video(s)" if videos else ""
    with_or_without = "without" if config.optim.gradient_checkpointing is False else "with"
    print_line(
        f"{config.model.path}: {sizes.weights:,} weights, {sizes.trained:,} of them trained, {8 * sizes.numbers}-bit, "
        f"{sizes.active:,} active for a token; {processes} process(es), packs of at most {lengths.pack:,} tokens "
        f"{with_or_without} gradient checkpointing\nan image has at most {largest.pixels:,} pixels and "
        f"{largest.tokens:,} tokens{video}; {count} to a prompt, prompts of {lengths.prompt:,} tokens ({basis})",
        console,
    )
    moved = moved_bytes(sizes, config, lengths, processes, servers)
    passes = (4 if config.model.lora else 6) + 2 * (config.optim.gradient_checkpointing is not False)
    print_line(
        f"{lengths.packs} pack(s) a step in each process, of {passes * sizes.active * lengths.pack:.1e} FLOPs without "
        f"attention and tower; moved a step: {', '.join(f'{in_gb(size)} {name}' for name, size in moved.items())}",
        console,
    )
    estimates = [phases(config, round(card * GB), processes=processes, servers=servers) for card in cards]
    for index, memory in enumerate(estimates):
        if memory in estimates[:index]:  # printed already, in the table of an equal estimate
            continue
        equal = [f"{card:g}" for card, estimate in zip(cards, estimates, strict=True) if estimate == memory]
        console.print(_table(memory, " or ".join(dict.fromkeys(equal))))
        sequences = f"{memory.cache // lengths.sequence:,} sequences of {lengths.sequence:,}"
        note = memory.fault
        if not note and not engine.embedded:
            note = f"vLLM's cache: {memory.cache:,} tokens, {sequences}"
        if note:
            print_line(note, console)
    for card in sorted({*cards, *CARDS}):
        remedy = find_remedy(config, round(card * GB), processes=processes, servers=servers)
        print_line(fit_sentence(remedy, card), console)


def fit_sentence(remedy: Remedy | None, card: float) -> str:
    """
    >>> fit_sentence(Remedy((), 21 * 10**9), 24)
    'fits on 24 GB (21.0 GB)'
    """
    if remedy is None:
        return f"does not fit on {card:g} GB, whatever is set: take a smaller model"
    settings = f" with {', '.join(remedy.settings)}" if remedy.settings else ""
    return f"fits on {card:g} GB{settings} ({remedy.peak / GB:.1f} GB)"


def _table(memory: Phases, cards: str) -> Table:
    table = Table("", title=f"GB of one process on a GPU of {cards} GB")
    table.add_column("while it learns", justify="right")
    table.add_column("while it samples", justify="right")
    parts = [memory.learner, memory.rollout]
    if memory.server:
        table.add_column("a server", justify="right")
        parts.append(memory.server)
    for name in dict.fromkeys(name for part in parts for name in part):
        sizes = [part.get(name, 0) for part in parts]
        if any(sizes):
            table.add_row(name, *(f"{size / GB:.2f}" if size else "-" for size in sizes))
    table.add_section()
    table.add_row("sum", *(f"{sum(part.values()) / GB:.2f}" for part in parts))
    return table


def _largest(config: GRPOConfig, model: Any, family: Any) -> Largest:
    """Return the largest image and video by the processor's files, or a Qwen-VL config without them."""
    folder = Path(config.model.path)
    files = ("preprocessor_config.json", "processor_config.json")
    if not folder.is_dir() or any((folder / name).is_file() for name in files):
        return largest_of(processor_of(config), config)
    if not isinstance(family, QwenVLFamily):
        raise ConfigError(
            f"model.path = '{folder}': has no preprocessor_config.json, which bounds images; copy it there too"
        )
    vision = model.config.vision_config
    area = (vision.patch_size * vision.spatial_merge_size) ** 2
    pixels = config.data.max_pixels or IMAGE_TOKENS * area
    pairs, pair = -(-config.data.video_max_frames // 2), config.data.video_max_pixels or FRAME_TOKENS * area
    return Largest(pixels, pixels // area, pairs * (pair // area))
