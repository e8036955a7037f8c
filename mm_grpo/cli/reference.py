"""`mm-grpo config` (fields of a config) and `mm-grpo env` (versions and devices for bug reports)."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

from mm_grpo.errors import ConfigError
from mm_grpo.terminal import printable

if TYPE_CHECKING:
    from mm_grpo.config import FieldHelp


def config(
    name: Annotated[str | None, typer.Argument(metavar="SECTION | FIELD | WORD", show_default=False)] = None,
) -> None:
    """Show a field, a section, or fields about a word; without a name the most important fields, marked with *."""
    from mm_grpo.config import GRPOConfig
    from mm_grpo.config.shipped import shipped_folder
    from mm_grpo.migrate.keys import advice_on, unknown_key

    fields = GRPOConfig.field_help()
    paths = [field.path for field in fields]
    if name is None:
        matches = [field for field in fields if field.matters]
    else:
        matches = [field for field in fields if f"{field.path}.".startswith(f"{name}.")]
        matches = matches or [field for field in fields if f".{field.path}".endswith(f".{name}")]
        word = re.compile(rf"(?<![a-z]){re.escape(name)}", re.IGNORECASE)
        if not matches and advice_on(name, paths) is None:  # a word, such as save
            matches = [field for field in fields if word.search(f"{field.path} {field.description}")]
    if not matches:
        raise ConfigError(unknown_key(name or "", None, paths)[0])
    lines = _lines(matches)
    if any("docs/" in line for line in lines):
        lines.append(f"docs/ is {shipped_folder('docs')}")
    if name is None:
        sections = dict.fromkeys(field.path.rpartition(".")[0] or field.path for field in fields)
        lines.append(f"mm-grpo config SECTION shows every field of one of\n{', '.join(sections)}")
    typer.echo(printable("\n".join(lines)))


def env() -> None:
    """Show versions and devices of this machine as JSON, without the names of its user and host."""
    from mm_grpo.run.environment import describe_environment

    environment = describe_environment()
    del environment["command"], environment["started"]  # they belong to a run
    typer.echo(printable(json.dumps(environment, indent=2)))


def _lines(fields: list[FieldHelp]) -> list[str]:
    """Write each field with its mark, type, default and help, in the terminal's width."""
    lines, width = [], min(shutil.get_terminal_size().columns, 110)
    for field in fields:
        default = field.default if field.default == "required" else f"default {field.default}"
        text = field.description.rpartition(" Default: ")[0] or field.description.removesuffix(" Required.")
        title, mark = f"{field.path}: {field.type}; {default}", "* " if field.matters else "  "
        lines += textwrap.wrap(title, width, initial_indent=mark, subsequent_indent="      ")
        lines += textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ")
    return lines
