"""Parts of a run from its config: the plan of its steps, and processor, model, learner, engine and sync.

`mm-grpo train`, `check` and `doctor` all build here, so `check` and `doctor` check what a run uses. torch and the
engines are imported when they are built, because `check` needs the plan alone.

A new engine is one function here, in `ENGINES` under its name in `rollout.engine`. The function imports the
engine itself, so that no run pays for one that it does not use.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from os import PathLike
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mm_grpo.config.engine_facts import ENGINE_FACTS
from mm_grpo.data.dataset import FIRST_ROWS
from mm_grpo.data.order import PromptOrder
from mm_grpo.data.pass_rate_order import PassRateOrder
from mm_grpo.errors import ConfigError, DataError
from mm_grpo.processors.base import Processor, mm_processor_kwargs
from mm_grpo.processors.base import processor_of as processor_of
from mm_grpo.rollout.engine_limits import engine_limits
from mm_grpo.rollout.prompts import PromptBuilder, context_of
from mm_grpo.rollout.seeds import SeedPlan

if TYPE_CHECKING:
    import torch

    from mm_grpo.config import GRPOConfig
    from mm_grpo.data.base import Rows
    from mm_grpo.distributed.ranks import Ranks
    from mm_grpo.environments.toolbox import Toolbox
    from mm_grpo.learner.learner import Learner
    from mm_grpo.parity.sync import VerifiedSync
    from mm_grpo.rewards.scorer import Scorer
    from mm_grpo.rollout.collect import Collector
    from mm_grpo.rollout.engine import RolloutEngine
    from mm_grpo.rollout.pipeline import Synchronous
    from mm_grpo.rollout.runner import RolloutRunner
    from mm_grpo.rollout.vllm.launch import EngineSettings
    from mm_grpo.rollout.weights import WeightLedger

# the plan ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunPlan:
    """Numbers of steps and of optimizer updates, seeds of the generations, and order of the rows."""

    max_steps: int
    updates: int
    seeds: SeedPlan
    order: PromptOrder
    sentences: tuple[str, ...]
    """The plan in words, with settings that it cuts or ignores."""


def plan_run(
    config: GRPOConfig, rows: Rows, *, at_least_an_epoch: bool = False, several_turns: bool = False
) -> RunPlan:
    """Plan a run over `rows`: `run.max_steps` steps, by default one epoch.

    `at_least_an_epoch` gives every row its seeds, also in a shorter run (`PromptBuilder.first`); the seeds of the run
    stay the same. With `several_turns` conversations have up to `rollout.max_turns`. Raises ConfigError when there are
    not enough seeds.
    """
    rollout, run = config.rollout, config.run
    if rollout.max_staleness and not ENGINE_FACTS[rollout.engine].remote:
        raise ConfigError(
            f"rollout.max_staleness = {rollout.max_staleness}: must be 0 with rollout.engine = '{rollout.engine}',"
            " which samples in the trainer's process; only an engine with processes of its own (vllm_server) samples"
            " while the learner works"
        )
    if config.optim.zero_stage == 3 and not ENGINE_FACTS[rollout.engine].remote:
        raise ConfigError(
            f"optim.zero_stage = 3: rollout.engine = '{rollout.engine}' samples in the trainer's processes, none of "
            "which holds the model whole; set rollout.engine=vllm_server and start servers (train --serve, or "
            "mm-grpo serve), with --share-gpus on the learner's own GPUs"
        )
    order = rows.order(rollout.prompts_per_step, run.seed, config.data.shuffle)
    steps = run.max_steps or order.steps_per_epoch
    if config.data.pass_rate is not None:
        by_rate = _pass_rate_order(config, rows, steps)
        if not at_least_an_epoch:  # without learning there is only the first pass
            order = by_rate
    updates, warmup = config.updates_in(steps), config.optim.warmup_steps
    cut = [f"optim.warmup_steps = {warmup} is cut to the {updates} update(s) of the run"] * (warmup > updates)
    idle = ENGINE_FACTS[rollout.engine].embedded and rollout.vllm != type(rollout.vllm)()
    unread = [
        f"rollout.vllm changes nothing: rollout.engine = '{rollout.engine}', and vllm or vllm_server read it"
    ]
    seeds = SeedPlan(
        run_seed=run.seed,
        prompts=rollout.prompts_per_step,
        generations=rollout.num_generations,
        attempts=rollout.max_attempts,
        max_steps=max(steps, -(-order.n_rows // order.prompts_per_step)) if at_least_an_epoch else steps,
        max_turns=rollout.max_turns if several_turns else 1,
    )
    return RunPlan(steps, updates, seeds, order, (order.sentence(steps), *cut, *unread * idle))


def _pass_rate_order(config: GRPOConfig, rows: Rows, steps: int) -> PassRateOrder:
    """Return the order of `data.pass_rate`. ConfigError if it changes nothing, or contradicts a mixture's weights."""
    factor, prompts, why = config.data.pass_rate or 0.0, config.rollout.prompts_per_step, ""
    order = PassRateOrder(len(rows), prompts, config.run.seed, factor, config.rollout.max_staleness)
    if rows.weights:
        why = "data.train is a mixture, whose weights say how often rows come; name one source by its path alone"
    elif not order.draws_in(steps):
        why = f"the run of {steps} steps ends before rows are drawn by it, in the second pass; raise run.max_steps"
    if why:
        raise ConfigError(f"data.pass_rate = {factor}: {why}, or leave it out")
    return order


# the parts -----------------------------------------------------------------------------------

UNSHARED = (
    "layout: unshared: sharing a prompt between its completions is not exact for this model, so the learner runs "
    "each completion after a prompt of its own; images are still encoded once"
)


@dataclass(frozen=True)
class Parts:
    """Learner and engine of a run, with the parts that they share."""

    processor: Processor
    model: Any
    prompt_builder: PromptBuilder
    engine: RolloutEngine
    sentences: tuple[str, ...]
    """Limits that were chosen because the config sets none, in words."""
    learner: Learner
    sync: VerifiedSync
    """It has sent the learner's weights once."""


def check_features(config: GRPOConfig, train: Rows, *, several_turns: bool) -> None:
    """Raise ConfigError if a loss feature cannot be imported, or the rows do not have what it needs."""
    from mm_grpo.learner.features.table import feature_classes

    for feature in feature_classes(config.algorithm):
        feature.check_rows(config, train, several_turns=several_turns)


def build_parts(
    config: GRPOConfig,
    updates: int,
    datasets: Iterable[Rows],
    *,
    model: Any = None,
    processor: Processor | None = None,
    loaded: Processor | None = None,
    ranks: Ranks | None = None,
    toolbox: Toolbox | None = None,
    phase: Callable[[str], None] = lambda text: None,
) -> Parts:
    """Load what `config` names, or take the `model` and the `processor` that are passed in.

    `updates` is the length of the learning-rate schedule, `datasets` are all rows that will be sampled, the
    training set first, `loaded` the processor of `config` if it was loaded before, `ranks` the processes that train
    together, `toolbox` what the model may call; `phase` is called with what begins. Raises ConfigError for what cannot
    be loaded and GuardStop when the weights did not reach the engine.
    """
    from mm_grpo.learner.learner import Learner
    from mm_grpo.learner.shards import shares_weights
    from mm_grpo.parity.sync import VerifiedSync
    from mm_grpo.rollout.weights import WeightLedger

    datasets = list(datasets)
    if datasets:
        check_features(config, datasets[0], several_turns=toolbox is not None)
    # an engine's 16-bit base cannot stand in for a base in four bits, unless it runs the learner's own
    may_lend = (
        ENGINE_FACTS[config.rollout.engine].colocated
        and config.model.lora is not None
        and (config.model.quantization is None or config.rollout.vllm.in_four_bits)
    )
    # a base that vLLM will lend stays off the device, which would hold it twice until then
    # and a sharded model moves to the devices a layer at a time
    shares = ranks is not None and shares_weights(config, ranks)
    passed_in = model is not None
    model, processor, device = load_policy(
        config, model, processor, loaded, ranks=ranks, on_host=may_lend or shares, phase=phase
    )
    prompt_builder, limited, limits = _prompts(config, model, processor, datasets, toolbox)
    if not ENGINE_FACTS[config.rollout.engine].embedded:
        phase(f"starting {config.rollout.engine}")
    engine = build_engine(limited, model, processor, ranks)
    ledger = WeightLedger()
    lent = _share_base(engine, model, ledger) if may_lend else None
    learner = Learner(model if shares else model.to(device), processor, config, updates, ranks)
    learner.base_replaced = passed_in  # it may differ from that of model.path, which servers have read
    sync = VerifiedSync(engine, learner, config, ledger)
    sync.start()
    pixels = f"images: resized to at most {processor.max_pixels:,} pixels (data.max_pixels)"
    area = getattr(processor, "video_max_pixels", processor.max_pixels)
    frames = (
        f"videos: {config.data.video_fps:g} frames a second (data.video_fps), {config.data.video_max_frames} at most "
        f"(data.video_max_frames), resized to at most {area:,} pixels (data.video_max_pixels)"
    )
    sentences = (
        pixels if config.data.max_pixels is None else "",
        frames if any(map(shows_videos, datasets)) else "",
        limits,
        engine.sentence,
        UNSHARED if processor.layout == "unshared" else "",
        "" if ENGINE_FACTS[config.rollout.engine].embedded else adapters_sentence(learner, lent),
        experts_sentence(learner),
    )
    return Parts(processor, model, prompt_builder, engine, tuple(filter(None, sentences)), learner, sync)


def load_policy(
    config: GRPOConfig,
    model: Any,
    processor: Processor | None,
    loaded: Processor | None,
    *,
    ranks: Ranks | None,
    on_host: bool = False,
    phase: Callable[[str], None],
) -> tuple[Any, Processor, torch.device]:
    """Return the model to train, its processor and the device that it is trained on; arguments as of `build_parts`.

    With `on_host` a model from `model.path` stays in the host's memory.
    """
    from mm_grpo.distributed.accelerate_env import check_launcher
    from mm_grpo.learner.model import adopt_model, check_saveable, resolve_device, resolve_dtype

    for name, passed in (("model", model), ("processor", processor)):
        if isinstance(passed, str | PathLike):
            raise ConfigError(f"{name} = {str(passed)!r}: must be a loaded one; a path is set in model.path")
    device = resolve_device(config.model.device)
    check_launcher(config, device, getattr(model, "dtype", None) or resolve_dtype(config.model.dtype, device))
    from_path = "processor" if processor is None else None
    if processor is None:
        processor = loaded or processor_of(config)
    else:
        _check_processor(processor, config)
    if model is None:
        model = _load_model(config, processor, on_host=on_host, phase=phase)
    else:
        several = ranks is not None and ranks.world > 1
        from_path = from_path if ENGINE_FACTS[config.rollout.engine].embedded else "engine"
        model = adopt_model(model, config.model, processor.family, from_path=from_path, several=several)
        device = model.device  # with model.device: auto it is trained where it is
    check_saveable(model, processor)
    return model, processor, device


def shows_videos(rows: Rows) -> bool:
    """Return True if one of FIRST_ROWS rows of a source, evenly spaced, has a video."""
    for source in rows.sources:
        for index in source.spaced(FIRST_ROWS):
            with suppress(DataError):  # a wrong row is named when it is reached
                if source.fields(index).videos:
                    return True
    return False


@contextmanager
def open_runner(
    config: GRPOConfig,
    datasets: Iterable[Rows],
    scorer: Scorer,
    toolbox: Toolbox | None,
    processor: Processor,
    ranks: Ranks,
    *,
    conversational: bool,
    put_in: Callable[[Any], None] | None = None,
    phase: Callable[[str], None],
) -> Iterator[RolloutRunner]:
    """Make a runner without a learner, to answer rows as evaluation does, and start `scorer` (`Scorer.start`).

    With a `toolbox` the engine is a loop of turns over it. After the block all is closed, `scorer` and `toolbox` too.
    `put_in` may replace the weights of the model once it is loaded. An engine with weights of its own reads the ones at
    `model.path`. It is sent the model's if they were replaced or quantised, and servers always; what arrived is
    compared with what was sent. The model is then held in the host's memory.
    """
    from mm_grpo.learner.lora import merged_tensors
    from mm_grpo.rollout.runner import RolloutRunner
    from mm_grpo.rollout.turns import sampler_of
    from mm_grpo.rollout.weights import WeightLedger

    embedded = ENGINE_FACTS[config.rollout.engine].embedded
    model = _load_model(config, processor, on_host=not embedded, phase=phase)
    if put_in is not None:
        put_in(model)
    model.requires_grad_(False)
    prompt_builder, limited, _ = _prompts(config, model, processor, datasets, toolbox)
    if not embedded:
        phase(f"starting {config.rollout.engine}")
    engine = build_engine(limited, model, processor)
    replaced = (put_in is not None or config.model.quantization is not None) and not embedded
    if replaced or engine.remote:  # servers may hold any weights
        WeightLedger().send(engine, merged_tensors(model), 0)
    repeats = max(config.rollout.eval.num_generations, 2)
    turns = config.rollout.max_turns if toolbox is not None else 1
    seeds = SeedPlan(config.run.seed, 1, repeats, 1, 1, turns)
    try:
        if ranks.first:
            scorer.start(conversational=conversational)
        sampler = sampler_of(config, processor, engine, toolbox, seeds, lambda: 0)
        yield RolloutRunner(prompt_builder, sampler, scorer, ranks)
    finally:
        prompt_builder.close()
        scorer.close()
        if toolbox is not None:
            toolbox.close()
        engine.close()


def _check_processor(processor: Processor, config: GRPOConfig) -> None:
    """Raise ConfigError if a processor that was passed in contradicts the config."""
    config_kwargs, kwargs = config.data.chat_template_kwargs, getattr(processor, "chat_template_kwargs", {})
    if config_kwargs != kwargs:
        raise ConfigError(
            f"data.chat_template_kwargs = {config_kwargs}: the processor that was passed in has {kwargs}; give "
            "load_processor(...) the same"
        )
    twin = config.algorithm.twin_view
    if twin is not None and twin.view == "high_resolution":
        raise ConfigError(
            "algorithm.twin_view: high_resolution makes a processor with other limits from model.path; pass none"
        )


def _load_model(
    config: GRPOConfig, processor: Processor, *, on_host: bool, phase: Callable[[str], None]
) -> Any:
    """Load the weights at `model.path`; with `on_host` into the host's memory, at the dtype of the run's device."""
    from mm_grpo.learner.model import load_model, resolve_device, resolve_dtype

    phase(f"loading the weights of {config.model.path}")
    dtype = resolve_dtype(config.model.dtype, resolve_device(config.model.device))
    changes = {"dtype": str(dtype).removeprefix("torch."), "device": "cpu"} if on_host else {}
    return load_model(config.model.model_copy(update=changes), processor.family)


def _share_base(engine: RolloutEngine, model: Any, ledger: WeightLedger) -> int:
    """Send the engine the model's weights and put its frozen base in the place of the model's; return the bytes freed.

    0 if the engine does not apply all adapters as factors: their layers' base would be sent merged.
    """
    from mm_grpo.learner.lora import adapted_layers, frozen_base, merged_tensors, sent_factors

    layers = frozenset(adapted_layers(model))
    if not layers or engine.adapter_layers(layers) != layers:
        return 0
    ledger.send(engine, chain(merged_tensors(model, layers), sent_factors(model, layers)), 0)
    return engine.share(frozen_base(model))


def adapters_sentence(learner: Learner, lent: int | None) -> str:
    """Say how the engine gets the learner's adapters; "" without adapters.

    `lent` are the bytes of the base that the engine lends the learner, None if it cannot.
    """
    layers = learner.adapted_layers
    merged = [layer for layer in layers if layer not in learner.factored]
    if merged:
        return (
            f"adapters: {len(merged)} of {len(layers)} layers ({merged[0]}, ...) are merged for the engine, "
            "which has no LoRA layers for them; what rounding takes from them is lora/merge_lost"
        )
    lends = "" if lent is None else f", which lends it {lent / 1e9:.2f} GB of the base"
    return f"adapters: sent as factors to the engine{lends}" if layers else ""


def experts_sentence(learner: Learner) -> str:
    """Say which mismatch correction a mixture of experts has, and that adapters leave experts out; "" for others."""
    if not learner.processor.family.routers(learner.model):
        return ""
    mode = learner.config.algorithm.importance_sampling_mode
    frozen = "; adapters leave its experts as they are" * bool(learner.adapted_layers)
    return f"mixture of experts: algorithm.importance_sampling_mode is {mode}{frozen}"


def _prompts(
    config: GRPOConfig, model: Any, processor: Processor, datasets: Iterable[Rows], toolbox: Toolbox | None
) -> tuple[PromptBuilder, GRPOConfig, str]:
    """Return the prompt builder, the config with the engine's limits, and those limits in words."""
    context = context_of(model.config)
    if ENGINE_FACTS[config.rollout.engine].embedded:
        return PromptBuilder(processor, config, context, None, preparer=toolbox), config, ""
    limits = engine_limits(config, processor, datasets, context, toolbox)
    builder = PromptBuilder(processor, config, context, limits.max_model_len, preparer=toolbox)
    return builder, limits.in_config(config), limits.sentence


def pipeline_of(collector: Collector, engine: RolloutEngine, ranks: Ranks) -> Synchronous:
    """Return the pipeline of `rollout.max_staleness`. `ranks` are the main thread's."""
    from mm_grpo.rollout.pipeline import Lockstep, Synchronous

    if collector.config.rollout.max_staleness == 0:
        return Synchronous(collector, engine)
    return Lockstep(collector, engine, ranks)


# the engine ----------------------------------------------------------------------------------


def build_engine(
    config: GRPOConfig, model: Any, processor: Processor, ranks: Ranks | None = None
) -> RolloutEngine:
    """Make the engine of `rollout.engine`. `model` is the learner's; an embedded engine samples from it.

    An engine with weights of its own has to be sent the learner's before it samples. Each process of `ranks` makes its
    own engine.
    """
    return ENGINES[config.rollout.engine](config, model, processor, ranks)


def _transformers(config: GRPOConfig, model: Any, processor: Processor, ranks: Ranks | None) -> RolloutEngine:
    from mm_grpo.rollout.transformers_engine import TransformersEngine

    return TransformersEngine(model, processor)


def vllm_settings(
    config: GRPOConfig, processor: Processor, dtype: str, context: int | None
) -> EngineSettings:
    """Return the settings to start vLLM with for `model.path`, in this process or as a server.

    Limits that are null in the config are derived from `context`, the model's longest sequence in tokens.
    """
    from mm_grpo.rollout.vllm.launch import EngineSettings

    options, lora = config.rollout.vllm, config.model.lora
    kwargs = dict(options.engine_kwargs)
    if options.in_four_bits:
        del kwargs["quantization"]  # the learner's layers bring it
    limits = engine_limits(config, processor, (), context)  # those that follow from rows are in the config
    return EngineSettings(
        model=config.model.path,
        dtype=dtype,
        max_model_len=limits.max_model_len,
        mm_processor_kwargs=tuple(mm_processor_kwargs(processor).items()),
        max_images=limits.max_images,
        max_videos=limits.max_videos,
        gpu_memory_utilization=options.gpu_memory_utilization,
        sleep_level=options.sleep_level,
        trust_remote_code=config.model.trust_remote_code,
        lora_rank=0 if lora is None else lora.rank,
        lora_vision=lora is not None and lora.vision,
        engine_kwargs=tuple(kwargs.items()),
    )


def _vllm(config: GRPOConfig, model: Any, processor: Processor, ranks: Ranks | None) -> RolloutEngine:
    """vLLM in this process, at the learner's dtype and under the processor's pixel limits."""
    from mm_grpo.learner.quantization import four_bit_layers
    from mm_grpo.rollout.vllm.engine import VLLMEngine

    dtype, in_four_bits = str(model.dtype).removeprefix("torch."), config.rollout.vllm.in_four_bits
    settings = vllm_settings(config, processor, dtype, context_of(model.config))
    # without a learner vLLM is sent all weights, merged
    learns = any(p.requires_grad for p in model.parameters())
    layers = four_bit_layers(model) if learns and in_four_bits else {}
    return VLLMEngine(replace(settings, four_bits=tuple(layers)), processor, layers)


def _vllm_server(config: GRPOConfig, model: Any, processor: Processor, ranks: Ranks | None) -> RolloutEngine:
    """The vLLM servers of `rollout.server`; the first process alone sends them weights."""
    from mm_grpo.rollout.served.broadcast import own_address
    from mm_grpo.rollout.served.client import ServerClient
    from mm_grpo.rollout.served.engine import ServedEngine
    from mm_grpo.rollout.served.protocol import ServerLimits, model_sizes
    from mm_grpo.rollout.served.server_key import VARIABLE
    from mm_grpo.rollout.served.transfer import transfer_of

    options, lora = config.rollout.server, config.model.lora
    if not options.urls:
        raise ConfigError(
            "rollout.server.urls = []: rollout.engine=vllm_server needs servers; start them with `mm-grpo serve` and "
            "write their urls here, or let `mm-grpo train --serve 1` start one"
        )
    limits = engine_limits(config, processor, (), context_of(model.config))
    transfer = None
    if ranks is None or ranks.first:
        transfer = transfer_of(
            options.transfer,
            device=str(model.device),
            folder=options.folder,
            host=own_address(urlsplit(options.urls[0]).hostname),
            timeout=min(300.0, options.timeout),
            shared=options.share_gpus,
        )
    key = os.environ.get(VARIABLE)
    clients = [ServerClient(url, key=key, timeout=options.timeout) for url in options.urls]
    return ServedEngine(
        clients,
        transfer,
        processor,
        limits=ServerLimits(
            timeout=options.timeout,
            probe_timeout=min(30.0, options.timeout / 3),
            wait_timeout=options.wait_timeout,
            max_model_len=limits.max_model_len,
            lora_rank=0 if lora is None else lora.rank,
            # a base that is frozen stays: it would be sent again, with ZeRO-3 gathered from all processes
            sleep_level=(config.rollout.vllm.sleep_level if lora is None else 1) if options.share_gpus else 0,
            sizes=model_sizes(model.config),
        ),
        max_media={"image": max(1, limits.max_images), "video": limits.max_videos},
        ranks=ranks,
    )


ENGINES: dict[str, Callable[[GRPOConfig, Any, Processor, Ranks | None], RolloutEngine]] = {
    "transformers": _transformers,
    "vllm": _vllm,
    "vllm_server": _vllm_server,
}
