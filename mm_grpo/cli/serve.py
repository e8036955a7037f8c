"""`mm-grpo serve CONFIG`: vLLM servers of this machine for a config; `mm-grpo train CONFIG --serve N`: beside a run.

Both start servers with what the run itself would start vLLM with (model, dtype, limits of the rows, pixel limits), so
that the two sides cannot differ by it. The servers end with this process.
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
"""Share of its GPU's memory that a server holds where rollout.vllm.gpu_memory_utilization is not set: it is alone."""


def serve(
    config: Config,
    overrides: Overrides = None,
    servers: Annotated[int, typer.Option("--servers", min=1, help="Servers to start.")] = 1,
    host: Annotated[
        str | None, typer.Option(help="Address in the place of Unix sockets; a key is needed.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the first; the others follow.")
    ] = None,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="GPUs of each server.")] = 1,
    logs: Annotated[
        str | None, typer.Option(help="Folder for what they print, else a temporary one.")
    ] = None,
) -> None:
    """Start vLLM servers for a config on this machine, and keep them running until Ctrl-C."""
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
    made = server_settings(loaded, servers, tensor_parallel=tensor_parallel)
    settings = [replace(each, host=host, port=first + number) for number, each in enumerate(made)]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    print_phase(f"starting {servers} server(s)")
    folder = None if logs is None else Path(logs)
    with launch.serve(settings, log_folder=folder, report=print_phase) as started:
        _describe(started, config)
        threading.Event().wait()


def server_settings(
    config: GRPOConfig, count: int, *, tensor_parallel: int = 1, processes: int = 0
) -> list[ServerSettings]:
    """Settings of `count` servers for `config`, as many GPUs each as `tensor_parallel`, without their addresses.

    On a GPU machine the first `processes` GPUs are the trainer's. Reads the rows, whose lengths vLLM is started for.
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
    device = resolve_device(config.model.device)
    gpus = gpus_of(count, tensor_parallel, processes) if device.type == "cuda" else [None] * count
    if device.type != "cuda" and tensor_parallel > 1:
        raise ConfigError(f"--tensor-parallel {tensor_parallel}: there is no GPU here; leave it out")
    given, server = config.rollout.vllm, config.rollout.server
    print_phase("reading the rows")
    processor = processor_of(config)
    rows = [load_train(config, verify=False), *load_eval(config, verify=False).values()]
    own = read_config(config.model.path, trust_remote_code=config.model.trust_remote_code)
    limits = engine_limits(config, processor, rows, context_of(own), toolbox_of(config, None, None))
    dtype = str(resolve_dtype(config.model.dtype, device)).removeprefix("torch.")
    engine = vllm_settings(limits.in_config(config), processor, dtype, context_of(own))
    if "gpu_memory_utilization" not in given.model_fields_set:
        engine = replace(engine, gpu_memory_utilization=GPU_SHARE)
    kind = kind_of(server.transfer, device.type, server.folder)
    return [ServerSettings(engine, kind, tensor_parallel, each) for each in gpus]


def gpus_of(
    count: int, tensor_parallel: int, processes: int, environment: Mapping[str, str] = os.environ
) -> list[tuple[str, ...] | None]:
    """The GPUs of each server, after those of the trainer's processes. ConfigError where there are not enough."""
    import torch

    named = environment.get("CUDA_VISIBLE_DEVICES")
    visible = [n.strip() for n in named.split(",") if n.strip()] if named is not None else None
    if visible is None:
        visible = [str(number) for number in range(torch.cuda.device_count())]
    needed = processes + count * tensor_parallel
    if needed > len(visible):
        trainer = f" and {processes} of the trainer" if processes else ""
        raise ConfigError(
            f"{count} server(s) with {tensor_parallel} GPU(s) each (--tensor-parallel){trainer} need {needed} GPUs, "
            f"and {len(visible)} are visible here"
        )
    own = visible[processes:needed]
    return [tuple(own[i : i + tensor_parallel]) for i in range(0, len(own), tensor_parallel)]


@contextmanager
def servers_beside(config: GRPOConfig, count: int, processes: int) -> Iterator[dict[str, Any]]:
    """`count` servers of this machine for a run; yields the fields of its config that name them. They end with it."""
    from mm_grpo.rollout.served.launch import serve as serve_processes

    print_phase("importing torch and transformers")
    settings = server_settings(config, count, processes=processes)
    print_phase(f"starting {count} server(s)")
    with serve_processes(settings, report=print_phase) as started:
        yield {"rollout.engine": "vllm_server", "rollout.server.urls": [server.url for server in started]}


def check_serve(count: int, config: GRPOConfig, *, smoke: bool) -> None:
    """ConfigError where `--serve` cannot be had with the rest."""
    rollout = config.rollout
    in_process = not ENGINE_FACTS[rollout.engine].remote and "engine" in rollout.model_fields_set
    launched = "each process of a launcher would start servers; use --processes, or `mm-grpo serve`"
    for wrong, why in (
        (smoke, "--smoke samples in its own process; leave one out"),
        ("WORLD_SIZE" in os.environ, launched),
        (rollout.server.urls, "rollout.server.urls names servers already; leave one out"),
        (in_process, f"rollout.engine = '{rollout.engine}' samples in the trainer's process; leave one out"),
    ):
        if wrong:
            raise ConfigError(f"--serve {count}: {why}")


def _end(number: int, frame: FrameType | None) -> None:
    raise RunInterrupted(f"ended by {signal.Signals(number).name}, and the servers with it", number)


def _describe(started: list[ServerProcess], config: str) -> None:
    for number, server in enumerate(started):
        print_phase(f"server {number}: {server.url} is ready (process {server.pid}, log {server.log})")
    urls = ",".join(server.url for server in started)
    fields = f"rollout.engine=vllm_server 'rollout.server.urls=[{urls}]'"
    print_phase(f"train with: mm-grpo train {config} {fields}")
    print_phase("Ctrl-C ends them")
