"""`mm-grpo train CONFIG`: a run in this process, in those of a launcher, or in `--processes` of this machine.

With `--serve N` vLLM servers run beside it (serve.py).
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mm_grpo.cli.configs import (
    Config,
    Overrides,
    Smoke,
    config_files,
    load_config,
    refuse_missing_data,
    to_smoke,
)
from mm_grpo.cli.imports import heavy_imports
from mm_grpo.cli.serve import check_serve, servers_beside
from mm_grpo.cli.unexpected import keep_traceback
from mm_grpo.distributed.launch import check_processes, launch
from mm_grpo.errors import ConfigError
from mm_grpo.files import temporary_folder
from mm_grpo.terminal import print_phase, printable

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig


def train(
    config: Config,
    overrides: Overrides = None,
    smoke: Smoke = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in run.dir.")
    ] = False,
    processes: Annotated[
        int | None, typer.Option("--processes", help="Processes of this machine that train together.")
    ] = None,
    servers: Annotated[
        int | None, typer.Option("--serve", min=1, help="vLLM servers of this machine to sample from.")
    ] = None,
) -> None:
    """Train a model by a config or a recipe; layers and a.b=value change it."""
    loaded = load_config(config, overrides or [])
    files = config_files(config, overrides or [])
    for file in (files.config, *files.layers):
        refuse_own_folder(loaded.run.dir, file, resume=resume)
    if not smoke:
        refuse_missing_data(loaded, config)
        refuse_former_run(loaded, resume=resume)
    if smoke and resume:
        raise ConfigError("--smoke and --resume: a smoke run goes on from nothing; leave one out")
    if processes is not None:
        check_processes(processes, loaded, smoke=smoke)
    if servers is not None:
        check_serve(servers, loaded, smoke=smoke)
    with ExitStack() as held:
        fields: dict[str, Any] = {}
        if servers is not None:
            fields = held.enter_context(servers_beside(loaded, servers, processes or 1))
        if processes is not None and processes > 1:
            own = [f"{path}={json.dumps(value)}" for path, value in fields.items()]
            command = ["-m", "mm_grpo.cli", "train", config, *(overrides or []), *own, *["--resume"] * resume]
            raise typer.Exit(launch(processes, command))
        _train(config, overrides or [], loaded.with_values(fields) if fields else loaded, smoke, resume)


def _train(config: str, overrides: list[str], loaded: GRPOConfig, smoke: bool, resume: bool) -> None:
    """Train in this process, and print what came of it."""
    if os.environ.get("RANK", "0") == "0":
        print_phase("importing torch and transformers")
    with heavy_imports():
        from mm_grpo.trainer import GRPOTrainer

    kept = True
    if smoke:
        from mm_grpo.preflight.smoke import smoke_sets

        with temporary_folder("smoke") as work:
            kept = any(override.startswith("run.dir=") for override in overrides)
            run_dir = loaded.run.dir if kept else str(work / "run")
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
    where = f"results in {loaded.run.dir}" if kept else "results are not kept; set run.dir=... to keep them"
    from mm_grpo.run.summary import summary_lines

    steps = summary["steps"]
    took = ", nothing was left" if trainer.resumed_at == steps else f" in {summary['seconds']:.0f} s"
    lines = [f"done: {steps} steps{took}, {where}"]
    lines += [f"  {line}" for line in summary_lines(summary)]
    lines += [next_command(config, loaded, summary)] if kept else []
    typer.echo(printable("\n".join(lines)))


def next_command(config: str, loaded: GRPOConfig, summary: Mapping[str, Any]) -> str:
    """What to look at, and what to run next."""
    folder = Path(loaded.run.dir)
    seen = folder / "report.html" if loaded.run.report else folder / "metrics.jsonl"
    kept = any((folder / "checkpoints").glob("step-*"))
    steps, best = summary["steps"], summary["best_step"]
    other = kept and (summary["model"] or {}).get("step") not in (None, steps)
    if summary["warned"]:  # the last weights may be dead
        other = kept and best not in (None, 0, steps)
    repeats = Path(config).resolve() in (folder.resolve(), (folder / "config.yaml").resolve())
    useful = other or not (repeats or summary["warned"])
    if useful and summary["eval"] and (kept or loaded.run.save_model):
        model = shlex.quote(str(folder if kept else folder / "model")) + " --checkpoint best" * other
        return f"see {seen}; next: mm-grpo eval {shlex.quote(config)} --model {model}"
    return f"see {seen}"


def refuse_former_run(loaded: GRPOConfig, *, resume: bool) -> None:
    """Check the run folder before torch is imported, on the first process; the trainer does so again, with the rows."""
    from mm_grpo.run.folder import RunFolder
    from mm_grpo.run.paths import dated

    if os.environ.get("RANK", "0") == "0":
        folder = dated(loaded.run.dir, newest=resume)
        RunFolder(folder, overwrite=loaded.run.overwrite, resume=resume, writes=()).check()


def refuse_own_folder(run_dir: str, config: Path, *, resume: bool) -> None:
    """ConfigError for a config file in the run folder, but for the run's own copy, by which a run may be resumed."""
    from mm_grpo.files import RUN_MARK
    from mm_grpo.run.inputs import refuse_inputs
    from mm_grpo.run.paths import RunPaths

    own = RunPaths(Path(run_dir)).config
    if not (resume and (own.parent / RUN_MARK).exists() and own.exists() and own.samefile(config)):
        refuse_inputs(run_dir, [("the config file", config)])
