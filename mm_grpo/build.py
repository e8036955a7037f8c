"""What a run is made of, from its config: the plan of its steps, and processor, model, learner, engine and sync.

`mm-grpo train`, `check` and `doctor` all come through here, so what is found sound before a run is what the run
uses. torch and the engines are imported when they are built, for `check` needs the plan alone.

A new engine is one function here, in `ENGINES` under its name in `rollout.engine`. The function imports the
engine itself, so that no run pays for one that it does not use.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from os import PathLike
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mm_grpo.data.mixture import MixedDataset
from mm_grpo.data.mixture_order import MixtureOrder
from mm_grpo.data.order import PromptOrder
from mm_grpo.data.pass_rate_order import PassRateOrder
from mm_grpo.errors import ConfigError
from mm_grpo.rollout.engine_limits import engine_limits
from mm_grpo.rollout.prompts import PromptBuilder, context_of
from mm_grpo.rollout.seeds import SeedPlan

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig
    from mm_grpo.data.dataset import Dataset
    from mm_grpo.distributed.ranks import Ranks
    from mm_grpo.environments.toolbox import Toolbox
    from mm_grpo.learner.learner import Learner
    from mm_grpo.parity.sync import VerifiedSync
    from mm_grpo.processors.base import Processor
    from mm_grpo.rewards.scorer import Scorer
    from mm_grpo.rollout.collect import Collector
    from mm_grpo.rollout.engine import RolloutEngine
    from mm_grpo.rollout.pipeline import Synchronous
    from mm_grpo.rollout.turns import Sampler
    from mm_grpo.rollout.vllm.launch import EngineSettings
    from mm_grpo.rollout.weights import WeightLedger

# the plan ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunPlan:
    """How many steps and updates a run makes, the seeds of its generations, the order of its rows; and all in words."""

    max_steps: int
    updates: int
    seeds: SeedPlan
    order: PromptOrder
    sentences: tuple[str, ...]


def plan_run(
    config: GRPOConfig, rows: Sized, *, at_least_an_epoch: bool = False, several_turns: bool = False
) -> RunPlan:
    """The plan of a run over `rows`: `run.max_steps` steps, by default one epoch.

    `at_least_an_epoch` lengthens a shorter run to as many prompts as there are rows, so that each has its seeds
    (`PromptBuilder.first`); those of the run stay the same. With `several_turns` conversations have up to
    `rollout.max_turns`. Raises ConfigError when there are not seeds enough.
    """
    rollout, run = config.rollout, config.run
    if rollout.max_staleness and rollout.engine not in REMOTE:
        raise ConfigError(
            f"rollout.max_staleness = {rollout.max_staleness}: must be 0 with rollout.engine = '{rollout.engine}',"
            " which samples in the trainer's process; only an engine with processes of its own (vllm_server) samples"
            " while the learner works"
        )
    how = (rollout.prompts_per_step, run.seed, config.data.shuffle)
    order: PromptOrder = (
        MixtureOrder(rows.sizes, rows.weights, rows.names, *how)
        if isinstance(rows, MixedDataset)
        else PromptOrder(len(rows), *how)
    )
    steps = run.max_steps or order.steps_per_epoch
    if config.data.pass_rate is not None:
        by_rate = _pass_rate_order(config, rows, steps)
        if not at_least_an_epoch:  # without learning there is the first pass alone
            order = by_rate
    updates, warmup = config.updates_in(steps), config.optim.warmup_steps
    cut = [f"optim.warmup_steps = {warmup} is cut to the {updates} update(s) of the run"] * (warmup > updates)
    idle = rollout.engine == "transformers" and rollout.vllm != type(rollout.vllm)()
    unread = [
        "rollout.vllm changes nothing: rollout.engine = 'transformers', and vllm or vllm_server read it"
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


def _pass_rate_order(config: GRPOConfig, rows: Sized, steps: int) -> PassRateOrder:
    """The order of `data.pass_rate`. ConfigError where it would change nothing, or where weights say what is drawn."""
    factor, rollout = config.data.pass_rate or 0.0, config.rollout
    how = (rollout.prompts_per_step, config.run.seed, factor, rollout.max_staleness)
    order, why = PassRateOrder(len(rows), *how), ""
    if isinstance(rows, MixedDataset):
        why = "data.train is a mixture, whose weights say how often rows come; name one source by its path alone"
    elif not order.draws_in(steps):
        why = f"the run of {steps} steps ends before rows are drawn by it, in the second pass; raise run.max_steps"
    if why:
        raise ConfigError(f"data.pass_rate = {factor}: {why}, or leave it out")
    return order


# the parts -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """What learns and what samples; `sync` has sent the learner's weights once.

    `sentences` say which limits were chosen because the config sets none.
    """

    processor: Processor
    model: Any
    prompt_builder: PromptBuilder
    engine: RolloutEngine
    sentences: tuple[str, ...]
    learner: Learner
    sync: VerifiedSync


def check_features(config: GRPOConfig, train: Dataset, *, several_turns: bool) -> None:
    """Raise ConfigError if a loss feature cannot be imported, or the rows do not have what it needs."""
    from mm_grpo.learner.features.table import feature_classes

    for feature in feature_classes(config.algorithm):
        feature.check_rows(config, train, several_turns=several_turns)


def build_parts(
    config: GRPOConfig,
    updates: int,
    datasets: Iterable[Dataset],
    *,
    model: Any = None,
    processor: Processor | None = None,
    ranks: Ranks | None = None,
    toolbox: Toolbox | None = None,
    phase: Callable[[str], None] = lambda text: None,
) -> Parts:
    """Load what `config` names, in place of which a `model` and a `processor` can be given.

    `updates` is the length of the learning-rate schedule, `datasets` are all whose rows will be asked about,
    `ranks` the processes that train together, `toolbox` what the model may call; `phase` is told what begins. Raises
    ConfigError for what cannot be loaded and GuardStop when the weights did not reach the engine.
    """
    from mm_grpo.distributed.accelerate_env import check_launcher
    from mm_grpo.learner.learner import Learner
    from mm_grpo.learner.model import (
        adopt_model,
        check_saveable,
        load_model,
        resolve_device,
        resolve_dtype,
    )
    from mm_grpo.parity.sync import VerifiedSync
    from mm_grpo.rollout.weights import WeightLedger

    for name, given in (("model", model), ("processor", processor)):
        if isinstance(given, str | PathLike):
            raise ConfigError(f"{name} = {str(given)!r}: must be a loaded one; a path is set in model.path")
    datasets = list(datasets)
    twin = config.algorithm.twin_view
    if datasets:  # the training set comes first
        check_features(config, datasets[0], several_turns=toolbox is not None)
    device = resolve_device(config.model.device)
    check_launcher(config, device, getattr(model, "dtype", None) or resolve_dtype(config.model.dtype, device))
    from_path = "processor" if processor is None else None
    if processor is None:
        processor = processor_of(config)
    else:
        asked, own = config.data.chat_template_kwargs, getattr(processor, "chat_template_kwargs", {})
        if asked != own:
            raise ConfigError(
                f"data.chat_template_kwargs = {asked}: the processor that was passed in has {own}; give "
                "load_processor(...) the same"
            )
        if twin is not None and twin.view == "high_resolution":
            raise ConfigError(
                "algorithm.twin_view: high_resolution makes a processor with other limits from model.path; pass none"
            )
    # four bits are not what the engine has, which can then sleep whole, unless it runs the learner's
    may_lend = (
        config.rollout.engine == "vllm"
        and config.model.lora is not None
        and (config.model.quantization is None or config.rollout.vllm.in_four_bits)
    )
    if model is None:
        phase(f"loading the weights of {config.model.path}")
        # a base that vLLM will lend is on the device once, and not twice until then
        host = {"dtype": _dtype_name(config), "device": "cpu"} if may_lend else {}
        model = load_model(config.model.model_copy(update=host), processor.family)
    else:
        several = ranks is not None and ranks.world > 1
        from_path = "engine" if config.rollout.engine != "transformers" else from_path
        model = adopt_model(model, config.model, processor.family, from_path=from_path, several=several)
        device = model.device  # with model.device: auto it is trained where it is
    check_saveable(model, processor)
    prompt_builder, limited, limits = _prompts(config, model, processor, datasets, toolbox)
    if config.rollout.engine != "transformers":
        phase(f"starting {config.rollout.engine}")
    engine = build_engine(limited, model, processor, ranks)
    ledger = WeightLedger()
    lent = _share_base(engine, model, ledger) if may_lend else None
    learner = Learner(model.to(device), processor, config, updates, ranks)
    sync = VerifiedSync(engine, learner, config, ledger)
    sync.start()
    pixels = f"images: resized to at most {processor.max_pixels:,} pixels (data.max_pixels)"
    unshared = (
        "layout: unshared: sharing a prompt between its completions is not exact for this model, so the learner runs "
        "each completion after a prompt of its own; images are still encoded once"
    )
    sentences = (
        pixels if config.data.max_pixels is None else "",
        limits,
        engine.sentence,
        unshared if processor.layout == "unshared" else "",
        "" if config.rollout.engine == "transformers" else adapters_sentence(learner, lent),
    )
    return Parts(processor, model, prompt_builder, engine, tuple(filter(None, sentences)), learner, sync)


@contextmanager
def open_sampler(
    config: GRPOConfig,
    datasets: Iterable[Dataset],
    scorer: Scorer,
    toolbox: Toolbox | None,
    *,
    put_in: Callable[[Any], None] | None = None,
    phase: Callable[[str], None] = lambda text: None,
) -> Iterator[tuple[PromptBuilder, Sampler]]:
    """What `build_parts` makes without a learner, for answers as in evaluation: a prompt builder, and the engine, with
    a `toolbox` a loop of turns over it. After the block all is closed, `scorer` and `toolbox` too.

    `put_in` may replace the weights of the model once it is loaded. An engine with weights of its own reads those at
    `model.path`; it is sent the others where they were replaced or quantised, and servers always, and what arrived is
    compared with what was sent. The model is then held in the host's memory.
    """
    from mm_grpo.learner.lora import merged_tensors
    from mm_grpo.learner.model import load_model
    from mm_grpo.rollout.turns import sampler_of
    from mm_grpo.rollout.weights import WeightLedger

    embedded = config.rollout.engine == "transformers"
    held = {"dtype": _dtype_name(config)} | ({} if embedded else {"device": "cpu"})
    processor = processor_of(config)
    phase(f"loading the weights of {config.model.path}")
    model = load_model(config.model.model_copy(update=held), processor.family)
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
        yield prompt_builder, sampler_of(config, processor, engine, toolbox, seeds, lambda: 0)
    finally:
        prompt_builder.close()
        scorer.close()
        if toolbox is not None:
            toolbox.close()
        engine.close()


def _dtype_name(config: GRPOConfig) -> str:
    """The dtype of weights on the run's device, wherever they are held."""
    from mm_grpo.learner.model import resolve_device, resolve_dtype

    return str(resolve_dtype(config.model.dtype, resolve_device(config.model.device))).removeprefix("torch.")


def _share_base(engine: RolloutEngine, model: Any, ledger: WeightLedger) -> int:
    """Let the engine, which is sent the model's weights for it, lend its own in place of a base that nothing changes.

    Returns the bytes that became free: none where the engine runs not all adapters as factors.
    """
    from mm_grpo.learner.lora import adapted_layers, frozen_base, merged_tensors, sent_factors

    layers = frozenset(adapted_layers(model))
    if not layers or engine.adapter_layers(layers) != layers:
        return 0
    ledger.send(engine, chain(merged_tensors(model, layers), sent_factors(model, layers)), 0)
    return engine.share(frozen_base(model))


def adapters_sentence(learner: Learner, lent: int | None) -> str:
    """How an engine of its own is given the learner's adapters, and how many bytes of the base it lends the learner
    (None where it cannot); "" without adapters."""
    layers = learner.adapted_layers
    merged = [layer for layer in layers if layer not in learner.factored]
    if merged:
        return (
            f"adapters: those of {len(merged)} of {len(layers)} layers ({merged[0]}, ...) are merged for the engine, "
            "which has no LoRA layers for them; what rounding takes from them is lora/merge_lost"
        )
    lends = "" if lent is None else f", which lends it {lent / 1e9:.2f} GB of the base"
    return f"adapters: sent as factors to the engine{lends}" if layers else ""


def _prompts(
    config: GRPOConfig, model: Any, processor: Processor, datasets: Iterable[Dataset], toolbox: Toolbox | None
) -> tuple[PromptBuilder, GRPOConfig, str]:
    """The prompt builder, the config with the limits of an engine that has its own, and what is to be said of them."""
    context = context_of(model.config)
    if config.rollout.engine == "transformers":
        return PromptBuilder(processor, config, context, None, toolbox=toolbox), config, ""
    limits = engine_limits(config, processor, datasets, context, toolbox)
    builder = PromptBuilder(processor, config, context, limits.max_model_len, toolbox=toolbox)
    return builder, limits.in_config(config), limits.sentence


def processor_of(config: GRPOConfig) -> Processor:
    """The processor that a config names, with its pixel limits and template arguments."""
    from mm_grpo.processors.base import load_processor

    return load_processor(
        config.model.path,
        named=config.model.processor,
        min_pixels=config.data.min_pixels,
        max_pixels=config.data.max_pixels,
        trust_remote_code=config.model.trust_remote_code,
        chat_template_kwargs=config.data.chat_template_kwargs,
    )


def pipeline_of(collector: Collector, engine: RolloutEngine, ranks: Ranks) -> Synchronous:
    """What `rollout.max_staleness` asks for. `ranks` are those of the main thread."""
    from mm_grpo.rollout.pipeline import Lockstep, Synchronous

    if collector.config.rollout.max_staleness == 0:
        return Synchronous(collector, engine)
    return Lockstep(collector, engine, ranks)


# the engine ----------------------------------------------------------------------------------


def build_engine(
    config: GRPOConfig, model: Any, processor: Processor, ranks: Ranks | None = None
) -> RolloutEngine:
    """The engine of `rollout.engine`. `model` is the learner's, which an embedded engine samples from.

    An engine with weights of its own has to be sent the learner's before it samples. `ranks` are the processes that
    train together, of which each makes its own.
    """
    name: str = config.rollout.engine
    if name not in ENGINES:
        raise ConfigError(f"rollout.engine = '{name}': must be one of {', '.join(sorted(ENGINES))}")
    maker = ENGINES[name]
    if maker is _vllm_server:  # the one that processes share
        return _vllm_server(config, model, processor, ranks)
    return maker(config, model, processor)


def _transformers(config: GRPOConfig, model: Any, processor: Processor) -> RolloutEngine:
    from mm_grpo.rollout.transformers_engine import TransformersEngine

    return TransformersEngine(model, processor)


def vllm_settings(
    config: GRPOConfig, processor: Processor, dtype: str, context: int | None
) -> EngineSettings:
    """What vLLM is started with for `model.path`, in this process or as a server; limits that are null in the config
    are those of a model of this `context`."""
    from mm_grpo.processors.base import mm_processor_kwargs
    from mm_grpo.rollout.vllm.launch import EngineSettings

    given, lora = config.rollout.vllm, config.model.lora
    kwargs = dict(given.engine_kwargs)
    if given.in_four_bits:
        del kwargs["quantization"]  # which the learner's layers bring
    limits = engine_limits(config, processor, (), context)  # those of rows stand in the config
    return EngineSettings(
        model=config.model.path,
        dtype=dtype,
        max_model_len=limits.max_model_len,
        mm_processor_kwargs=tuple(mm_processor_kwargs(processor).items()),
        max_images=limits.max_images,
        gpu_memory_utilization=given.gpu_memory_utilization,
        sleep_level=given.sleep_level,
        trust_remote_code=config.model.trust_remote_code,
        lora_rank=0 if lora is None else lora.rank,
        lora_vision=lora is not None and lora.vision,
        engine_kwargs=tuple(kwargs.items()),
    )


def _vllm(config: GRPOConfig, model: Any, processor: Processor) -> RolloutEngine:
    """vLLM in this process, at the learner's dtype and under the processor's pixel limits."""
    from mm_grpo.learner.quantization import four_bit_layers
    from mm_grpo.rollout.vllm.engine import VLLMEngine

    dtype, in_four_bits = str(model.dtype).removeprefix("torch."), config.rollout.vllm.in_four_bits
    settings = vllm_settings(config, processor, dtype, context_of(model.config))
    # without a learner vLLM is sent all weights, merged
    learns = any(p.requires_grad for p in model.parameters())
    layers = four_bit_layers(model) if learns and in_four_bits else {}
    return VLLMEngine(replace(settings, four_bits=tuple(layers)), processor, layers)


def _vllm_server(
    config: GRPOConfig, model: Any, processor: Processor, ranks: Ranks | None = None
) -> RolloutEngine:
    """The vLLM servers of `rollout.server`; the first process alone sends them weights."""
    from mm_grpo.rollout.served.broadcast import own_address
    from mm_grpo.rollout.served.client import ServerClient
    from mm_grpo.rollout.served.engine import ServedEngine
    from mm_grpo.rollout.served.protocol import Limits, model_sizes
    from mm_grpo.rollout.served.server_key import VARIABLE
    from mm_grpo.rollout.served.transfer import transfer_of

    given = config.rollout.server
    if not given.urls:
        raise ConfigError(
            "rollout.server.urls = []: rollout.engine=vllm_server needs servers; start them with `mm-grpo serve` and "
            "write their urls here, or let `mm-grpo train --serve 1` start one"
        )
    limits = engine_limits(config, processor, (), context_of(model.config))
    transfer = None
    if ranks is None or ranks.first:
        transfer = transfer_of(
            given.transfer,
            device=str(model.device),
            folder=given.folder,
            host=own_address(urlsplit(given.urls[0]).hostname),
            timeout=min(300.0, given.timeout),
        )
    key = os.environ.get(VARIABLE)
    clients = [ServerClient(url, key=key, timeout=given.timeout) for url in given.urls]
    return ServedEngine(
        clients,
        transfer,
        processor,
        limits=Limits(
            timeout=given.timeout,
            probe_timeout=min(30.0, given.timeout / 3),
            wait_timeout=given.wait_timeout,
            max_model_len=limits.max_model_len,
            lora_rank=config.model.lora.rank if config.model.lora is not None else 0,
            sizes=model_sizes(model.config),
        ),
        max_images=limits.max_images,
        ranks=ranks,
    )


REMOTE = frozenset({"vllm_server"})
"""Engines that hold their weights outside this process, and can sample while the learner works."""
ENGINES: dict[str, Callable[[GRPOConfig, Any, Processor], RolloutEngine]] = {
    "transformers": _transformers,
    "vllm": _vllm,
    "vllm_server": _vllm_server,
}
