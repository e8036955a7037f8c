"""Command line and environment of a vLLM server on this machine.

The engine's part is that of the engine in the trainer's process (`vllm/launch.py`), so a server samples as that does.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from mm_grpo.errors import ConfigError
from mm_grpo.rollout.served import server_key
from mm_grpo.rollout.served.plugin import BACKENDS, EXTENSION
from mm_grpo.rollout.vllm.launch import EngineSettings, engine_arguments

ENTRY = "vllm.entrypoints.launchers.api_server.entry"
ADAPTERS = "mm_grpo.rollout.served.with_adapters"
"""Modules that become a server: vLLM's own, and the one before it that adds LoRA layers."""
ONLY_ON = ("disable_log_stats", "data_parallel_hybrid_lb", "data_parallel_external_lb")
"""Options that vLLM's command line knows no `--no-` of."""
NOT_FOR_SERVERS = ("use_tqdm_on_load", "distributed_executor_backend", "enable_sleep_mode")
OF_THE_TRAINER = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "PYTHONDONTWRITEBYTECODE",
)
"""Variables by which a launcher describes this process's group, which a server is not in."""


@dataclass(frozen=True)
class ServerSettings:
    """One server. `engine` is what an in-process engine would be started with, `transfer` file, gloo or nccl.

    `gpus` are its GPUs as CUDA_VISIBLE_DEVICES names them, as many as `tensor_parallel`, None where it has all. It
    listens on `socket`, or at `host` and `port` (0: on a socket that `launch.serve` makes); `key` is one that was made
    for it, where nobody set one.
    """

    engine: EngineSettings
    transfer: str = "file"
    tensor_parallel: int = 1
    gpus: tuple[str, ...] | None = None
    socket: Path | None = None
    host: str = "127.0.0.1"
    port: int = 0
    key: str | None = field(default=None, repr=False)


def require_vllm() -> None:
    """ConfigError where no vLLM is installed that can be a server; it is not imported, for that takes seconds."""
    place = find_spec("vllm")
    if place is None or place.origin is None:
        raise ConfigError(
            "rollout.engine = 'vllm_server': vLLM is not installed where the server is to run; install mm_grpo[vllm] "
            "on a GPU machine, mm_grpo[cpu] on a CPU"
        )
    if not Path(place.origin).parent.joinpath("entrypoints/launchers/api_server/entry.py").exists():
        raise ConfigError(
            "rollout.engine = 'vllm_server': the vLLM that is installed here is too old to be a server; install 0.32 "
            "or newer, or take rollout.engine=vllm"
        )


def server_command(settings: ServerSettings) -> list[str]:
    """The command of a server, without its key: everybody on this machine can read it."""
    require_vllm()
    given = engine_arguments(settings.engine, alone=True)
    arguments = {k: v for k, v in given.items() if k not in NOT_FOR_SERVERS}
    arguments.setdefault("scheduling_policy", "priority")  # for the checks of updates
    arguments |= {
        "tensor_parallel_size": settings.tensor_parallel,
        "weight_transfer_config": {"backend": BACKENDS[settings.transfer]},
        "worker_extension_cls": EXTENSION,
        "enable_scale_out": True,  # /inference/v1/generate
    }
    if settings.socket is not None:
        arguments["uds"] = str(settings.socket)
    else:
        arguments |= {"host": settings.host, "port": settings.port}
    arguments["middleware"] = server_key.MIDDLEWARE
    # -P: it imports nothing from the working folder, where a json.py may stand
    start = [ADAPTERS, json.dumps(asdict(settings.engine))] if settings.engine.lora_rank else [ENTRY]
    return [sys.executable, "-P", "-m", *start, *flags(arguments)]


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments of vLLM's classes as it takes them on the command line.

    >>> flags({"max_num_seqs": 8, "enforce_eager": True, "enable_chunked_prefill": False, "limit": {"image": 1}})
    ['--max-num-seqs', '8', '--enforce-eager', '--no-enable-chunked-prefill', '--limit', '{"image": 1}']
    >>> flags({"disable_log_stats": False})
    []
    """
    found: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            if value or name not in ONLY_ON:
                found.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, Mapping):
            if value:
                found += [f"--{option}", json.dumps(dict(value))]
        elif isinstance(value, (list, tuple)):
            found += [f"--{option}", *map(str, value)]
        else:
            found += [f"--{option}", str(value)]
    return found


def server_environment(settings: ServerSettings) -> dict[str, str]:
    """The environment of a server: ours, with vLLM's switches where the user has not set them."""
    environment = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",  # longer than clients keep a connection that they do not use
        **(
            {}
            if torch.cuda.is_available()
            else {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
        ),
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",  # the endpoints of weights, pauses and caches
    }
    if settings.key is not None:
        environment[server_key.VARIABLE] = settings.key
    elif settings.socket is not None:
        environment[server_key.OPEN_VARIABLE] = "1"
    if settings.gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(settings.gpus)
    for name in OF_THE_TRAINER:
        environment.pop(name, None)
    if environment.get("PYTORCH_CUDA_ALLOC_CONF") == "expandable_segments:True":  # of mm_grpo's command
        del environment["PYTORCH_CUDA_ALLOC_CONF"]  # GPUs of one server cannot map each other's
    folder = str(Path(__file__).parents[3])  # the worker imports this package, wherever it was imported from
    paths = [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p and p != folder]
    environment["PYTHONPATH"] = os.pathsep.join([folder, *paths])
    return environment
