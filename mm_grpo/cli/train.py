"""`mm-grpo train CONFIG`: run in this process, in a launcher's, or in `--processes N` of this machine or a Ray cluster.

With `--serve N` vLLM servers run next to it (serve.py). `mm-grpo warm CONFIG --answer COLUMN` teaches the gold answers
of rows before a run.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mm_grpo.cli.configs import (
    Config,
    Overrides,
    Processes,
    Smoke,
    config_files,
    load_config,
    refuse_missing_data,
    to_smoke,
)
from mm_grpo.cli.imports import heavy_imports
from mm_grpo.cli.serve import SHARE_GPUS, ShareGPUs, TensorParallel, check_serve, servers_for_run
from mm_grpo.cli.unexpected import keep_traceback
from mm_grpo.distributed.launch import check_processes, launch
from mm_grpo.distributed.ray_launch import RayLaunch, check_ray
from mm_grpo.errors import ConfigError
from mm_grpo.files import RUN_MARK, temporary_folder
from mm_grpo.rollout.served.server_key import VARIABLE
from mm_grpo.run.paths import RunPaths, dated
from mm_grpo.terminal import print_phase, printable

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig


def train(
    config: Config,
    overrides: Overrides = None,
    smoke: Smoke = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint in run.dir.")
    ] = False,
    processes: Processes = None,
    servers: Annotated[
        int | None, typer.Option("--serve", min=1, help="vLLM servers of this machine to sample from.")
    ] = None,
    tensor_parallel: TensorParallel = 1,
    share_gpus: ShareGPUs = False,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run on a Ray cluster: HOST:PORT of its head, or auto."),
    ] = None,
    retries: Annotated[int, typer.Option(min=0, help="Times that --ray goes on when a process is lost.")] = 0,
) -> None:
    """Train a model by a config or a recipe; layers and a.b=value change the config."""
    overrides = [*(overrides or []), *[SHARE_GPUS] * share_gpus]
    loaded = load_config(config, overrides or [])
    files = config_files(config, overrides or [])
    for file in (files.config, *files.layers):
        refuse_own_folder(loaded.run.dir, file, resume=resume)
    if not smoke:
        refuse_missing_data(loaded, config)
        refuse_former_run(loaded, resume=resume)
    if smoke and resume:
        raise ConfigError("--smoke and --resume: a smoke run has no checkpoint; leave one out")
    if processes is not None or ray is not None:
        check_processes(1 if processes is None else processes, loaded, smoke=smoke, here=ray is None)
    if servers is None and tensor_parallel > 1:
        raise ConfigError(f"--tensor-parallel {tensor_parallel}: is for servers; add --serve 1")
    if servers is None and share_gpus and loaded.rollout.engine != "vllm_server":
        raise ConfigError("--share-gpus: is for servers; add --serve 1, or set rollout.engine=vllm_server")
    if servers is not None:
        check_serve(servers, loaded, smoke=smoke)
    check_ray(ray, loaded, retries=retries, smoke=smoke)
    if ray is not None:
        folder = dated(loaded.run.dir, newest=resume)  # a retry has to go on in the same one
        same = [config, *overrides, f"run.dir={json.dumps(folder)}"]
        key = {VARIABLE: os.environ.get(VARIABLE) or secrets.token_hex()}
        device = loaded.model.device
        run = RayLaunch(ray, processes or 1, same, resume, device, servers or 0, tensor_parallel, key)
        raise typer.Exit(run.start(RunPaths(Path(folder)).config, retries))
    serving = None if servers is None else servers_for_run(loaded, servers, tensor_parallel, processes or 1)
    with serving or nullcontext(dict[str, Any]()) as fields:
        if processes is not None and processes > 1:
            urls = [f"{path}={json.dumps(value)}" for path, value in fields.items()]
            arguments = [config, *(overrides or []), *urls, *["--resume"] * resume]
            raise typer.Exit(launch(processes, ["-m", "mm_grpo.cli", "train", *arguments]))
        _train(config, overrides or [], loaded.with_values(fields) if fields else loaded, smoke, resume)


def _train(config: str, overrides: list[str], loaded: GRPOConfig, smoke: bool, resume: bool) -> None:
    """Train in this process and print the results."""
    if os.environ.get("RANK", "0") == "0":
        print_phase("importing torch and transformers")
    with heavy_imports():
        from mm_grpo.trainer import GRPOTrainer

    folder_stays = True
    if smoke:
        from mm_grpo.preflight.smoke import smoke_sets

        with temporary_folder("smoke") as work:
            folder_stays = any(override.startswith("run.dir=") for override in overrides)
            run_dir = loaded.run.dir if folder_stays else str(work / "run")
            loaded = to_smoke(loaded, config, overrides, work, run_dir)
            rows, evaluations = smoke_sets(loaded)
            trainer = GRPOTrainer(loaded, train=rows, eval=evaluations or None)
            summary = trainer.train()
    else:
        trainer = GRPOTrainer(loaded, resume=resume)
        with keep_traceback(trainer.folder.paths.root) if trainer.ranks.first else nullcontext():
            summary = trainer.train()
        if not trainer.ranks.first:
            return
    loaded = trainer.config
    from mm_grpo.run.summary import summary_lines

    steps, results = summary["steps"], f"results in {loaded.run.dir}"
    if not folder_stays:
        results = "results are not kept; set run.dir=... to keep them"
        summary = {**summary, "model": None}
    time = ", nothing was left to do" if trainer.resumed_at == steps else f" in {summary['seconds']:.0f} s"
    lines = [f"done: {steps} steps{time}, {results}"]
    lines += [f"  {line}" for line in summary_lines(summary)]
    lines += [next_command(config, loaded, summary)] if folder_stays else []
    typer.echo(printable("\n".join(lines)))


def next_command(config: str, loaded: GRPOConfig, summary: Mapping[str, Any]) -> str:
    """Name the file to look at, and the command to run next if there is a useful one."""
    folder = Path(loaded.run.dir)
    page = folder / "report.html" if loaded.run.report else folder / "metrics.jsonl"
    has_checkpoints = any((folder / "checkpoints").glob("step-*"))
    steps, best = summary["steps"], summary["best_step"]
    use_best = has_checkpoints and (summary["model"] or {}).get("step") not in (None, steps)
    if summary["warned"]:  # the last weights may be useless
        use_best = has_checkpoints and best not in (None, 0, steps)
    same_config = Path(config).resolve() in (folder.resolve(), (folder / "config.yaml").resolve())
    is_useful = use_best or not (same_config or summary["warned"])
    if is_useful and summary["eval"] and (has_checkpoints or loaded.run.save_model):
        model = shlex.quote(str(folder if has_checkpoints else folder / "model"))
        best_option = " --checkpoint best" if use_best else ""
        return f"see {page}; next: mm-grpo eval {shlex.quote(config)} --model {model}{best_option}"
    return f"see {page}"


def refuse_former_run(loaded: GRPOConfig, *, resume: bool) -> None:
    """Check the run folder on the first process, before torch is imported; the trainer checks it again."""
    from mm_grpo.run.folder import RunFolder

    if os.environ.get("RANK", "0") == "0":
        folder = dated(loaded.run.dir, newest=resume)
        RunFolder(folder, overwrite=loaded.run.overwrite, resume=resume, writes=()).check()


def refuse_own_folder(run_dir: str, config: Path, *, resume: bool) -> None:
    """Raise ConfigError if a config file is in the run folder, except the run's own copy with `resume`."""
    from mm_grpo.run.inputs import refuse_inputs

    saved = RunPaths(Path(run_dir)).config
    if not (resume and (saved.parent / RUN_MARK).exists() and saved.exists() and saved.samefile(config)):
        refuse_inputs(run_dir, [("the config file", config)])


def warm(
    config: Config,
    overrides: Overrides = None,
    answer: Annotated[
        str, typer.Option("--answer", help="Column of the rows with the right answer.", show_default=False)
    ] = ...,  # type: ignore[assignment]
    steps: Annotated[int | None, typer.Option(min=1, help="Steps. Default: one pass over the rows.")] = None,
    lists: Annotated[
        Literal["first", "each"] | None,
        typer.Option(help="Of several right answers: the first, or each in turn from pass to pass."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint of this warm start.")
    ] = False,
    processes: Processes = None,
) -> None:
    """Teach the model right answers before a run, with the run's own config; write a model for model.path."""
    loaded = load_config(config, overrides or [])
    refuse_missing_data(loaded, config)
    if processes is not None and processes > 1:
        check_processes(processes, loaded, smoke=False)
        options = [f"--answer={answer}", *[f"--steps={steps}"] * (steps is not None)]
        options += [*[f"--lists={lists}"] * (lists is not None), *["--resume"] * resume]
        arguments = ["-m", "mm_grpo.cli", "warm", config, *(overrides or []), *options]
        raise typer.Exit(launch(processes, arguments))
    with heavy_imports():
        from mm_grpo.warm_start import warm as warm_model

    result = warm_model(loaded, answer=answer, steps=steps, lists=lists, resume=resume)
    if os.environ.get("RANK", "0") != "0":
        return
    first, last = result["nll"]
    lines = [
        f"done: {result['steps']} steps in {result['seconds']:.0f} s, NLL {first:.3f} -> {last:.3f} nats per token",
        f"next: mm-grpo train {shlex.quote(config)} {shlex.quote('model.path=' + result['model'])}",
    ]
    typer.echo(printable("\n".join(lines)))
