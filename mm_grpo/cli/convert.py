"""`mm-grpo convert FILE`: a config of another trainer as one of ours, with every key accounted for."""

from __future__ import annotations

from typing import Annotated

import typer

from mm_grpo.files import OutputFile
from mm_grpo.terminal import printable


def convert(
    file: Annotated[
        str, typer.Argument(help="YAML, JSON, or a script with a command line.", show_default=False)
    ],
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="Where to write it; without it stdout."),
    ] = None,
    devices: Annotated[int, typer.Option(min=1, help="Processes that its batches are per device of.")] = 1,
) -> None:
    """Make a config of ours from one of TRL, ms-swift or verl; what has no counterpart is listed with the reason."""
    from mm_grpo.migrate.convert import convert as convert_keys
    from mm_grpo.migrate.files import read_foreign

    written = None if output is None else OutputFile("--output", output, mark=None)
    found = convert_keys(read_foreign(file), devices=devices)
    text = found.yaml()
    if written is None:
        typer.echo(printable(text), nl=False)
    else:
        written.write(text)
    left = f" but {len(found.omitted)}, with their reasons as comments at the end" if found.omitted else ""
    where = f" into {output}" if output is not None else ""
    typer.echo(printable(f"all keys taken over{where}{left}"), err=True)
