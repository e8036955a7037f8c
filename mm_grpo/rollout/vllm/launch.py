"""Starting vLLM in this process, and leaving the process as it was.

One vLLM engine lives in a process per `EngineSettings`, from its first use to the end of the process:
its finalizer destroys the default process group, which the learner shares. `launch` therefore keeps a
registry, and leaves the process as it found it: random states, environment, threads, precision.
"""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module, Parameter

from mm_grpo.errors import ConfigError, EngineError
from mm_grpo.processors.model_folder import read_config
from mm_grpo.rollout.vllm import adapters, four_bits
from mm_grpo.rollout.vllm.read_back import ReadBack
from mm_grpo.rollout.vllm.weight_names import teach_names

OURS: Mapping[str, str] = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "seed": "run.seed",
    "max_model_len": "rollout.vllm.max_model_len",
    "gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    "tensor_parallel_size": "one engine in each process",
    "enable_sleep_mode": "rollout.vllm.sleep_level",
    "mm_processor_kwargs": "data.min_pixels and data.max_pixels",
    "limit_mm_per_prompt": "the data",
    "logprobs_mode": "the learner",
    "generation_config": "rollout",
    "distributed_executor_backend": "the process group",
}
"""Arguments that mm_grpo sets itself, and where each comes from: `engine_kwargs` may not set them."""

BESIDE_A_LEARNER = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
"""Limits of an engine that has a share of a GPU. vLLM's own on a large card, 1,024 and 16,384, take several GB of it
for logits and images of a forward."""
CPU_KV_BYTES = (64 << 20, 4 << 30)
"""Least and most memory for keys and values that is taken on a CPU without being asked."""


@dataclass(frozen=True)
class EngineSettings:
    """Arguments of one vLLM engine.

    `max_model_len` bounds prompt and completion together, in tokens; `mm_processor_kwargs` tell vLLM's processor the
    limits of one image, `max_images` bounds those of one prompt. On a GPU `gpu_memory_utilization` is the share of its
    memory that vLLM may hold, and `sleep_level` what it frees while the learner works: 0 nothing, 1 keys and values
    (weights move to host memory), 2 the weights too. `lora_rank` is that of adapters beside the language model, with
    `lora_vision` beside the tower too; 0 for an engine without. `four_bits` are the learner's layers that run its own
    weights in four bits (`four_bits.py`). `engine_kwargs` are further arguments of `vllm.LLM`; both kwargs are (name,
    value) pairs.
    """

    model: str
    dtype: str
    max_model_len: int
    mm_processor_kwargs: tuple[tuple[str, Any], ...] = ()
    max_images: int = 1
    gpu_memory_utilization: float = 0.4
    sleep_level: int = 0
    trust_remote_code: bool = False
    lora_rank: int = 0
    lora_vision: bool = False
    four_bits: tuple[str, ...] = ()
    engine_kwargs: tuple[tuple[str, Any], ...] = ()


@dataclass
class Handle:
    """A running engine.

    `owner` is the last trainer's engine that used it, `fault` says why it is unusable, and `asleep` names the
    parts of its memory that are given back (`weights`, `kv_cache`). `lent` are parameters of a learner's whose tensors
    are the engine's own, which then have to stay where they are; `four_bits` are its layers that the engine runs as
    they are, by name. `read_back` finds the weights that it was given in its layers. `adapters` says whether it has
    LoRA layers, and `adapter` is what requests carry once factors are in them.
    """

    llm: Any
    settings: EngineSettings
    owner: object | None = None
    fault: str | None = None
    asleep: set[str] = field(default_factory=set)
    lent: list[Parameter] = field(default_factory=list)
    four_bits: dict[str, Module] = field(default_factory=dict)
    read_back: ReadBack = field(default_factory=ReadBack)
    adapters: bool = False
    adapter: Any = None


_RUNNING: dict[str, Handle] = {}  # by the settings' repr: engine_kwargs may hold mappings


def launch(settings: EngineSettings) -> Handle:
    """The process's engine for these settings: started, or the one that is running already.

    Collective: every rank must call it together. Raises ConfigError for arguments that vLLM refuses.
    """
    handle = _RUNNING.get(repr(settings))
    if handle is not None:
        if handle.fault is not None:  # its layers share parts with a new engine's, so none would be sound
            raise EngineError(f"the vLLM engine of this process is lost: {handle.fault}; start a new process")
        return handle
    if torch.cuda.is_available() and _RUNNING:
        other = next(iter(_RUNNING.values())).settings
        raise ConfigError(
            f"rollout.engine = 'vllm': this process already runs a vLLM engine for {_name(other)}, and one "
            f"for {_name(settings)} does not fit beside it on the GPU (an engine lives to the end of its "
            "process); start a new process"
        )
    with _process_kept():
        _prepare_environment()
        _import_vllm()
        teach_names(read_config(settings.model, trust_remote_code=settings.trust_remote_code))
        _ensure_process_group()
        lora = lora_arguments(settings)
        layers: dict[str, Module] = {}
        started = four_bits.register(settings.four_bits, layers) if settings.four_bits else set()
        handle = Handle(_construct(settings, lora), settings, adapters=bool(lora), four_bits=layers)
        four_bits.require_all({*settings.four_bits}, started, "layer")
    _RUNNING[repr(settings)] = handle
    return handle


# starting ------------------------------------------------------------------------------------


def _name(settings: EngineSettings) -> str:
    return f"'{settings.model}' ({settings.dtype}, max_model_len {settings.max_model_len})"


def _import_vllm() -> None:
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"rollout.engine = 'vllm': vLLM cannot be imported ({error}); install the extra 'vllm' on a GPU machine "
            "or 'cpu' on a CPU, or use rollout.engine=transformers"
        ) from error


def vllm_version() -> str:
    import vllm

    return str(vllm.__version__)


def can_free_cache_alone() -> bool:
    """True for a vLLM that gives keys and values back and leaves its weights in place, as newer ones than 0.25 do.

    Read from its source, which is imported in seconds; True where none is installed.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return True
    source = Path(found.origin).parent / "v1" / "engine" / "llm_engine.py"
    return "def release_kv_cache_memory(" in source.read_text(encoding="utf-8")


def engine_arguments(settings: EngineSettings, *, alone: bool = False) -> dict[str, Any]:
    """The arguments of `vllm.LLM`: the user's, then ours by device, then those that keep the laws.

    An engine that is `alone` on its GPUs, a server, keeps vLLM's own limits there.
    """
    given = dict(settings.engine_kwargs)
    for name in given:
        if name in OURS:
            raise ConfigError(
                f"rollout.vllm.engine_kwargs.{name} = {given[name]!r}: mm_grpo sets this argument itself, from "
                f"{OURS[name]}; remove it"
            )
    arguments: dict[str, Any] = {"disable_log_stats": True, "use_tqdm_on_load": False}
    if torch.cuda.is_available():
        arguments |= {
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "enable_sleep_mode": settings.sleep_level > 0,
            **({} if alone else BESIDE_A_LEARNER),
        }
    else:
        # A request with a seed of its own that is prefilled in pieces stops the CPU sampler, so a prompt
        # must fit in one step.
        arguments |= {
            "enforce_eager": True,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(settings.max_model_len, 8192),
            "max_num_seqs": 128,
        }
        if _has_linear_layers(settings):  # their prefixes are cached by way of prefills in pieces
            arguments["enable_prefix_caching"] = False
    arguments |= given
    if settings.four_bits:  # whose weights come after the start, so that no graph may hold their places
        arguments |= {"quantization": four_bits.NAME, "enforce_eager": True}
    if not torch.cuda.is_available() and "kv_cache_memory_bytes" not in arguments:
        arguments["kv_cache_memory_bytes"] = _cpu_kv_bytes(settings, arguments["max_num_seqs"])
    return arguments | {
        "model": settings.model,
        "dtype": settings.dtype,
        "trust_remote_code": settings.trust_remote_code,
        "max_model_len": settings.max_model_len,
        "tensor_parallel_size": 1,
        "distributed_executor_backend": "external_launcher",
        "seed": 0,  # requests carry their own
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        # 0 images would leave the vision tower out, and its weights could not be sent
        "limit_mm_per_prompt": {"image": max(1, settings.max_images), "video": 0},
        "mm_processor_kwargs": dict(settings.mm_processor_kwargs),
    }


def lora_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Arguments for LoRA layers; none where there are no adapters, or vLLM or `engine_kwargs` have no such layers."""
    given = dict(settings.engine_kwargs)
    if not settings.lora_rank or not given.get("enable_lora", True):
        return {}
    config = read_config(settings.model, trust_remote_code=settings.trust_remote_code)
    size = next((size for size in adapters.RANKS if size >= settings.lora_rank), None)
    if size is None or not adapters.supports(config):
        return {}
    tower = settings.lora_vision and adapters.supports(config, tower=True)
    wanted = {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": size,
        "enable_tower_connector_lora": tower,
    }
    return wanted | {name: given[name] for name in wanted if name in given}


def _construct(settings: EngineSettings, lora: Mapping[str, Any]) -> Any:
    from vllm import LLM

    try:
        return LLM(**engine_arguments(settings), **lora)
    except (TypeError, ValueError) as error:  # an argument that it does not know, or a value that it refuses
        raise ConfigError(
            f"rollout.vllm.engine_kwargs = {dict(settings.engine_kwargs)}: vLLM refuses to start {_name(settings)}: "
            f"{first_line(error)}; see vllm.EngineArgs"
        ) from error


def _has_linear_layers(settings: EngineSettings) -> bool:
    """True when the model has layers of linear attention, which vLLM on a CPU runs in bfloat16: ConfigError else."""
    text: Any = read_config(settings.model, trust_remote_code=settings.trust_remote_code).get_text_config()
    linear = "linear_attention" in (getattr(text, "layer_types", None) or ())
    if linear and settings.dtype != "bfloat16":
        raise ConfigError(
            f"rollout.engine = 'vllm': on a CPU vLLM runs the linear attention of a {text.model_type} in bfloat16 "
            f"alone, and the model is in {settings.dtype}; write model.dtype=bfloat16, or rollout.engine=transformers"
        )
    return linear


def _cpu_kv_bytes(settings: EngineSettings, sequences: int) -> int:
    """Room for `sequences` of full length, within bounds, but always for one."""
    text: Any = read_config(settings.model, trust_remote_code=settings.trust_remote_code).get_text_config()
    heads: int = text.num_key_value_heads or text.num_attention_heads
    width: int = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    item: int = torch.empty(0, dtype=getattr(torch, settings.dtype)).element_size()
    one = 2 * text.num_hidden_layers * heads * width * item * (settings.max_model_len + 256)
    least, most = CPU_KV_BYTES
    room: int = max(2 * one, min(max(least, one * sequences), most))
    return room


def _prepare_environment() -> None:
    """vLLM's own switches, each only where the user has not set it."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING" if torch.cuda.is_available() else "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def _ensure_process_group() -> None:
    """The default group, before vLLM makes one of another size; and the variables that it reads."""
    import torch.distributed as dist

    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise EngineError(
                "the vLLM engine must start after the process group: call torch.distributed.init_process_group (or "
                "let DeepSpeed do it) on every rank first"
            )
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        # a store in memory: a group of one needs neither port nor file
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    world = dist.get_world_size()
    device = torch.cuda.current_device() if torch.cuda.is_available() else 0
    os.environ.setdefault("RANK", str(dist.get_rank()))
    os.environ.setdefault("LOCAL_RANK", str(device))
    os.environ.setdefault("WORLD_SIZE", str(world))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")  # never opened: the group exists


@contextmanager
def _process_kept() -> Iterator[None]:
    """Random states, environment, threads and precision as they were, whatever happens inside.

    vLLM seeds Python, numpy and torch, writes variables that child processes would inherit (LD_PRELOAD,
    LOCAL_WORLD_SIZE) and, on a CPU, replaces `torch.set_num_threads`.
    """
    import numpy

    environment = dict(os.environ)
    states = (random.getstate(), numpy.random.get_state(), torch.get_rng_state())
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    precision = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_num_threads = set_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
