"""`mm-grpo convert FILE`: convert a config of another trainer to ours, and report every key."""

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
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Where to write it. Default: stdout.")
    ] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Processes that its batches are per device of.")
    ] = None,
) -> None:
    """Convert a config of TRL, ms-swift or verl; keys without a counterpart are listed with the reason."""
    from mm_grpo.migrate.convert import convert as convert_keys
    from mm_grpo.migrate.files import read_foreign

    output_file = None if output is None else OutputFile("--output", output, mark=None)
    conversion = convert_keys(read_foreign(file), devices=devices)
    if output_file is None:
        typer.echo(printable(conversion.yaml()), nl=False)
    else:
        output_file.write(conversion.yaml())
    count = len(conversion.omitted)
    exceptions = f" but {count}, with their reasons as comments at the end" if count else ""
    target = f" into {output}" if output is not None else ""
    typer.echo(printable(f"all keys taken over{target}{exceptions}"), err=True)
