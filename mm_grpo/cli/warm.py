"""`mm-grpo warm CONFIG --answer COLUMN`: teach the gold answers of rows before a run."""

from __future__ import annotations

import os
import shlex
from typing import Annotated, Literal

import typer

from mm_grpo.cli.configs import Config, Overrides, load_config, refuse_missing_data
from mm_grpo.cli.imports import heavy_imports
from mm_grpo.distributed.launch import check_processes, launch
from mm_grpo.terminal import printable


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
    processes: Annotated[
        int | None, typer.Option("--processes", help="Processes of this machine that train together.")
    ] = None,
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
