"""`mm-grpo train CONFIG`: a run in this process, in those of a launcher, or in `--processes` of this machine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from mm_grpo.cli.configs import Config, Overrides, Smoke, find_config, load_config, to_smoke
from mm_grpo.distributed.launch import check_processes, launch
from mm_grpo.errors import ConfigError
from mm_grpo.files import temporary_folder
from mm_grpo.terminal import printable


def train(
    config: Config,
    overrides: Overrides = None,
    smoke: Smoke = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in run.dir, if there is one.")
    ] = False,
    processes: Annotated[
        int | None, typer.Option("--processes", help="Processes of this machine that train together.")
    ] = None,
) -> None:
    """Train a model by a config or a recipe; fields can be changed with a.b=value."""
    loaded = load_config(config, overrides or [])
    refuse_own_folder(loaded.run.dir, find_config(config), resume=resume)
    if smoke and resume:
        raise ConfigError(
            "--smoke and --resume: a smoke run has a model of its own and goes on from nothing; leave one out"
        )
    if processes is not None:
        check_processes(processes, loaded, smoke=smoke)
        if processes > 1:
            command = ["-m", "mm_grpo.cli", "train", config, *(overrides or []), *["--resume"] * resume]
            raise typer.Exit(launch(processes, command))
    from transformers.utils import logging as transformers_logging

    from mm_grpo.trainer import GRPOTrainer

    transformers_logging.disable_progress_bar()  # theirs would break ours
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    kept = True
    if smoke:
        from mm_grpo.preflight.smoke import smoke_sets

        with temporary_folder("smoke") as work:
            kept = any(override.startswith("run.dir=") for override in overrides or [])
            run_dir = loaded.run.dir if kept else str(work / "run")
            loaded = to_smoke(loaded, config, overrides or [], work, run_dir)
            rows, evaluations = smoke_sets(loaded)
            summary = GRPOTrainer(loaded, train=rows, eval=evaluations or None).train()
    else:
        trainer = GRPOTrainer(loaded, resume=resume)
        summary = trainer.train()
        if not trainer.ranks.first:
            return
    where = f"results in {loaded.run.dir}" if kept else "results are not kept; set run.dir=... to keep them"
    typer.echo(printable(f"done: {summary['steps']} steps in {summary['seconds']:.0f} s, {where}"))
    for name, result in summary["eval"].items():
        typer.echo(
            f"  {name}: {summary['headline']} {result['before']:.3f} -> {result['after']:.3f} ({result['rows']} rows)"
        )


def refuse_own_folder(run_dir: str, config: Path, *, resume: bool) -> None:
    """ConfigError for a config file in the run folder, but for the run's own copy, by which a run may be resumed."""
    from mm_grpo.run.claim import MARK
    from mm_grpo.run.inputs import refuse_inputs
    from mm_grpo.run.paths import RunPaths

    own = RunPaths(Path(run_dir)).config
    if not (resume and (own.parent / MARK).exists() and own.exists() and own.samefile(config)):
        refuse_inputs(run_dir, [("the config file", config)])
