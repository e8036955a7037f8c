"""`mm-grpo check` (rows, rewards), `mm-grpo doctor` (engine, learner) and `mm-grpo estimate` (memory)."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from mm_grpo.cli.configs import (
    Config,
    Overrides,
    Processes,
    Smoke,
    load_config,
    refuse_missing_data,
    to_smoke,
)
from mm_grpo.cli.imports import heavy_imports
from mm_grpo.cli.serve import GPU_SHARE, SHARE_GPUS, ShareGPUs, TensorParallel
from mm_grpo.distributed.launch import check_processes, launch
from mm_grpo.errors import ConfigError
from mm_grpo.files import OutputFile, temporary_folder
from mm_grpo.terminal import printable


def check(
    config: Config,
    overrides: Overrides = None,
    smoke: Smoke = False,
    call_judges: Annotated[
        bool, typer.Option("--call-judges", help="Also call rewards that may use a network.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 2 if there is a warning.")] = False,
    rows: Annotated[int | None, typer.Option(min=1, help="Check this many rows of each set.")] = None,
    page: Annotated[
        str | None, typer.Option(metavar="FILE.html", help="Also write a page of what the model sees.")
    ] = None,
    pass_rate: Annotated[
        int | None, typer.Option(min=1, help="Also answer training rows this many times with the model.")
    ] = None,
    pass_rate_rows: Annotated[int, typer.Option(min=1, help="Rows to answer, evenly spaced.")] = 100,
    pass_rate_bounds: Annotated[
        tuple[float, float], typer.Option(metavar="LOW HIGH", help="Pass rates of the rows to keep.")
    ] = (0.1, 0.9),
    pass_rate_file: Annotated[
        str | None, typer.Option(metavar="FILE.jsonl", help="Write the rows to keep, for data.train.")
    ] = None,
) -> None:
    """Load every row, make every prompt and try every reward on right and wrong answers; train nothing."""
    loaded = load_config(config, overrides or [])
    if not smoke:
        refuse_missing_data(loaded, config)
    if pass_rate_file is not None and pass_rate is None:
        raise ConfigError("--pass-rate-file: needs --pass-rate N, the number of answers to each row")
    file = None if pass_rate_file is None else OutputFile("--pass-rate-file", pass_rate_file, mark=None)
    with heavy_imports():
        from mm_grpo.preflight.check import check_config
        from mm_grpo.trained.warm_mark import changes_of_form, read_mark

    with temporary_folder("check") as work:
        if smoke:
            loaded = to_smoke(loaded, config, overrides or [], work, loaded.run.dir)
        known = changes_of_form(loaded, read_mark(loaded.model.path))
        passed = check_config(
            loaded, call_judges=call_judges, rows=rows, page=page, strict=strict, known=known, smoke=smoke
        )
        if passed and pass_rate is not None:
            from mm_grpo.preflight.pass_rates import measure
            from mm_grpo.run.progress import Progress

            measure(loaded, pass_rate, pass_rate_rows, pass_rate_bounds, file, Progress(0).evaluating)
    if not passed:
        raise typer.Exit(2)


def doctor(
    config: Config,
    overrides: Overrides = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts to compare on.")] = 4,
    processes: Processes = None,
    step: Annotated[
        int | None,
        typer.Option("--replay", min=1, metavar="STEP", help="Take this step of a run folder CONFIG again."),
    ] = None,
) -> None:
    """Compare engine and learner before and after an update, or with --replay a step of a run with its log."""
    loaded = load_config(config, overrides or [])
    refuse_missing_data(loaded, config)
    if processes is not None and processes > 1:
        check_processes(processes, loaded, smoke=False)
        option = ("--prompts", prompts) if step is None else ("--replay", step)
        arguments = [config, *(overrides or []), *map(str, option)]
        raise typer.Exit(launch(processes, ["-m", "mm_grpo.cli", "doctor", *arguments]))
    with heavy_imports():
        from mm_grpo.preflight.doctor import examine, show
        from mm_grpo.replay import replay

    if step is not None:
        result = replay(config, step, loaded)
        if os.environ.get("RANK", "0") == "0":
            typer.echo(printable("\n".join(result.lines())))
        raise typer.Exit(0 if result.difference is None else 3)
    report = examine(loaded, prompts)
    if os.environ.get("RANK", "0") == "0":
        show(report)
    if not report.ok:
        raise typer.Exit(3)


def estimate(
    config: Config,
    overrides: Overrides = None,
    gpu: Annotated[
        list[float] | None,
        typer.Option(min=1, max=1e6, help="Memory of a GPU, in GB; may be repeated. Default: 80."),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes that train together.")] = 1,
    tensor_parallel: TensorParallel = 1,
    share_gpus: ShareGPUs = False,
) -> None:
    """Estimate the GPU memory of a config, from the model's config.json alone, and find settings that fit."""
    loaded = load_config(config, [*(overrides or []), *[SHARE_GPUS] * share_gpus])
    rollout, field = loaded.rollout, "gpu_memory_utilization"
    share_gpus = rollout.server.share_gpus
    if rollout.engine != "vllm_server" and (share_gpus or tensor_parallel > 1):
        raise ConfigError("--tensor-parallel, --share-gpus: need rollout.engine=vllm_server")
    with heavy_imports():
        from transformers.utils import logging as transformers_logging

        from mm_grpo.preflight.estimate import show
        from mm_grpo.preflight.memory import Servers

    if rollout.engine == "vllm_server" and not share_gpus and field not in rollout.vllm.model_fields_set:
        loaded = loaded.with_values({f"rollout.vllm.{field}": GPU_SHARE})
    transformers_logging.set_verbosity_error()
    show(loaded, gpu or [80.0], processes=processes, servers=Servers(tensor_parallel, share_gpus))
