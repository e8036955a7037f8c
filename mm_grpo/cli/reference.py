"""What there is to look up: `mm-grpo config` (fields) and `mm-grpo env` (what a bug report needs of a machine)."""

from __future__ import annotations

import json
import shutil
import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

from mm_grpo.errors import ConfigError
from mm_grpo.terminal import printable

if TYPE_CHECKING:
    from mm_grpo.config import FieldHelp


def config(
    name: Annotated[str | None, typer.Argument(metavar="SECTION | FIELD", show_default=False)] = None,
) -> None:
    """Show the fields of a config, those that matter most marked with *; without a name those alone."""
    from mm_grpo.config import GRPOConfig
    from mm_grpo.config.shipped import shipped_folder
    from mm_grpo.migrate.keys import unknown_key

    fields = GRPOConfig.field_help()
    ends = {field: f".{field.path}." for field in fields}
    if name is None:
        shown = [field for field in fields if field.matters]
    else:
        shown = [field for field in fields if ends[field].startswith(f".{name}.")]
        shown = shown or [field for field in fields if ends[field].endswith(f".{name}.")]
    if not shown:
        raise ConfigError(unknown_key(name or "", None, [field.path for field in fields])[0])
    lines = _lines(shown)
    if any("docs/" in line for line in lines):
        lines.append(f"docs/ is {shipped_folder('docs')}")
    if name is None:
        sections = dict.fromkeys(field.path.rpartition(".")[0] or field.path for field in fields)
        lines.append(f"mm-grpo config SECTION shows every field of one of\n{', '.join(sections)}")
    typer.echo(printable("\n".join(lines)))


def env() -> None:
    """Show versions and devices of this machine as JSON; nothing of it names a user or a host."""
    from mm_grpo.run.environment import describe_environment

    found = describe_environment()
    del found["command"], found["started"]  # of a run
    typer.echo(printable(json.dumps(found, indent=2)))


def _lines(fields: list[FieldHelp]) -> list[str]:
    """Each field with its mark, what is legal, its default and its help, in the terminal's width."""
    lines, width = [], min(shutil.get_terminal_size().columns, 110)
    for field in fields:
        default = field.default if field.default == "required" else f"default {field.default}"
        text = field.description.rpartition(" Default: ")[0] or field.description.removesuffix(" Required.")
        for part, first, rest in (
            (f"{field.path}: {field.type}; {default}", "* " if field.matters else "  ", "      "),
            (text, "    ", "    "),
        ):
            lines += textwrap.wrap(part, width, initial_indent=first, subsequent_indent=rest)
    return lines
