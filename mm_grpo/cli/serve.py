"""`mm-grpo serve CONFIG`: start vLLM servers on this machine; `mm-grpo train CONFIG --serve N`: start them for a run.

Servers get the settings with which the run itself would start vLLM (model, dtype, limits of the rows, pixel limits).
They end with this process. With `rollout.server.share_gpus` they have the GPUs of the learner.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mm_grpo.cli.configs import Config, Overrides, load_config, refuse_missing_data
from mm_grpo.config.engine_facts import ENGINE_FACTS
from mm_grpo.errors import ConfigError
from mm_grpo.run.stop_signals import RunInterrupted
from mm_grpo.terminal import print_phase

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig
    from mm_grpo.rollout.served.launch import ServerProcess, ServerSettings

GPU_SHARE = 0.9
"""Share of a GPU of its own that a server takes if rollout.vllm.gpu_memory_utilization is not set."""

TensorParallel = Annotated[int, typer.Option(min=1, help="GPUs of each server.")]
ShareGPUs = Annotated[bool, typer.Option("--share-gpus", help="Set rollout.server.share_gpus.")]
SHARE_GPUS = "rollout.server.share_gpus=true"


def serve(
    config: Config,
    overrides: Overrides = None,
    servers: Annotated[int, typer.Option("--servers", min=1, help="Servers to start.")] = 1,
    host: Annotated[str | None, typer.Option(help="Address instead of Unix sockets; needs a key.")] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the first server; the next ones follow.")
    ] = None,
    tensor_parallel: TensorParallel = 1,
    share_gpus: ShareGPUs = False,
    logs: Annotated[str | None, typer.Option(help="Folder for logs. Default: a temporary one.")] = None,
) -> None:
    """Start vLLM servers for a config on this machine, and keep them running until Ctrl-C."""
    overrides = [*(overrides or []), *[SHARE_GPUS] * share_gpus]
    loaded = load_config(config, overrides or [])
    refuse_missing_data(loaded, config)
    from mm_grpo.rollout.served import launch

    if port is not None:
        host = host or "127.0.0.1"
    if host is not None:
        launch.require_key(host)
    first = port or launch.ServerSettings.port
    for number in range(servers if host else 0):
        launch.require_free(str(host), first + number)
    print_phase("importing torch and transformers")
    settings = [
        replace(server, host=host, port=first + number)
        for number, server in enumerate(server_settings(loaded, servers, tensor_parallel=tensor_parallel))
    ]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    print_phase(f"starting {servers} server(s)")
    folder = None if logs is None else Path(logs)
    with launch.serve(settings, log_folder=folder, report=print_phase) as processes:
        _describe(processes, config, f"{SHARE_GPUS} " * loaded.rollout.server.share_gpus)
        threading.Event().wait()


def server_settings(
    config: GRPOConfig, count: int, *, tensor_parallel: int = 1, processes: int = 0
) -> list[ServerSettings]:
    """Return settings of `count` servers for `config`, without addresses; each has `tensor_parallel` GPUs.

    On a GPU machine the first `processes` GPUs are the trainer's alone, unless it shares them. The rows are read for
    vLLM's limits.
    """
    from mm_grpo.build import processor_of, vllm_settings
    from mm_grpo.data.sources import load_eval, load_train
    from mm_grpo.environments.toolbox import toolbox_of
    from mm_grpo.learner.model import resolve_device, resolve_dtype
    from mm_grpo.processors.model_folder import read_config
    from mm_grpo.rollout.engine_limits import engine_limits
    from mm_grpo.rollout.prompts import context_of
    from mm_grpo.rollout.served.launch import ServerSettings
    from mm_grpo.rollout.served.transfer import kind_of

    config.check()
    device, options = resolve_device(config.model.device), config.rollout.server
    sharing = options.share_gpus
    if device.type == "cuda":
        gpus = gpus_of(count, tensor_parallel, 0 if sharing else processes)
    elif tensor_parallel > 1:
        raise ConfigError(f"--tensor-parallel {tensor_parallel}: there is no GPU here; leave it out")
    else:
        gpus = [None] * count
    print_phase("reading the rows")
    processor = processor_of(config)
    rows = [load_train(config, verify=False), *load_eval(config, verify=False).values()]
    context = context_of(read_config(config.model.path, trust_remote_code=config.model.trust_remote_code))
    limits = engine_limits(config, processor, rows, context, toolbox_of(config, None, None))
    dtype = str(resolve_dtype(config.model.dtype, device)).removeprefix("torch.")
    engine = vllm_settings(limits.in_config(config), processor, dtype, context)
    if not sharing and "gpu_memory_utilization" not in config.rollout.vllm.model_fields_set:
        engine = replace(engine, gpu_memory_utilization=GPU_SHARE)
    transfer = kind_of(options.transfer, device.type, options.folder, sharing)
    return [ServerSettings(engine, transfer, tensor_parallel, sharing, server_gpus) for server_gpus in gpus]


def gpus_of(
    count: int, tensor_parallel: int, processes: int, environment: Mapping[str, str] = os.environ
) -> list[tuple[str, ...] | None]:
    """Return the GPUs of each server, behind the trainer's. Raises ConfigError if there are not enough."""
    import torch

    variable = environment.get("CUDA_VISIBLE_DEVICES")
    if variable is None:
        visible = [str(number) for number in range(torch.cuda.device_count())]
    else:
        visible = [name.strip() for name in variable.split(",") if name.strip()]
    required = processes + count * tensor_parallel
    if required > len(visible):
        trainer = f" and {processes} of the trainer" if processes else ""
        raise ConfigError(
            f"{count} server(s) with {tensor_parallel} GPU(s) each (--tensor-parallel){trainer} need {required} GPUs, "
            f"and {len(visible)} are visible here"
        )
    gpus = visible[processes:required]
    return [tuple(gpus[i : i + tensor_parallel]) for i in range(0, len(gpus), tensor_parallel)]


@contextmanager
def servers_for_run(
    config: GRPOConfig, count: int, tensor_parallel: int, processes: int
) -> Iterator[dict[str, Any]]:
    """Run `count` servers within the context; yield the config fields that name them."""
    from mm_grpo.rollout.served.launch import serve as serve_processes

    print_phase("importing torch and transformers")
    settings = server_settings(config, count, tensor_parallel=tensor_parallel, processes=processes)
    print_phase(f"starting {count} server(s)")
    with serve_processes(settings, report=print_phase) as servers:
        yield {"rollout.engine": "vllm_server", "rollout.server.urls": [server.url for server in servers]}


def check_serve(count: int, config: GRPOConfig, *, smoke: bool) -> None:
    """Raise ConfigError if `--serve` contradicts another option or the config."""
    rollout = config.rollout
    in_process = not ENGINE_FACTS[rollout.engine].remote and "engine" in rollout.model_fields_set
    launched = "each process of a launcher would start servers; use --processes, or `mm-grpo serve`"
    for is_conflict, reason in (
        (smoke, "--smoke samples in its own process; leave one out"),
        ("WORLD_SIZE" in os.environ, launched),
        (rollout.server.urls, "rollout.server.urls names servers already; leave one out"),
        (in_process, f"rollout.engine = '{rollout.engine}' samples in the trainer's process; leave one out"),
    ):
        if is_conflict:
            raise ConfigError(f"--serve {count}: {reason}")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise RunInterrupted(f"ended by {signal.Signals(number).name}, and the servers with it", number)


def _describe(servers: list[ServerProcess], config: str, setting: str) -> None:
    for number, server in enumerate(servers):
        print_phase(f"server {number}: {server.url} is ready (process {server.pid}, log {server.log})")
    urls = ",".join(server.url for server in servers)
    fields = f"rollout.engine=vllm_server {setting}'rollout.server.urls=[{urls}]'"
    print_phase(f"train with: mm-grpo train {config} {fields}")
    print_phase("Ctrl-C ends them")
