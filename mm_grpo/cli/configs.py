"""The config that a command runs: a YAML file or a shipped recipe, with the command's overrides; `mm-grpo recipes`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mm_grpo.errors import ConfigError
from mm_grpo.terminal import printable

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig

Config = Annotated[
    str, typer.Argument(help="A YAML file, or the name of a shipped recipe.", show_default=False)
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Fields to change: section.field=value.", show_default=False)
]
Smoke = Annotated[
    bool, typer.Option("--smoke", help="A tiny random model and the fixture's rows, on the CPU, in seconds.")
]


def recipes() -> None:
    """List the shipped recipes: name, and the first comment of its config."""
    for name, path in find_recipes().items():
        lines = [line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#")]
        typer.echo(f"{name:<16} {lines[0] if lines else ''}\n{'':<16} {path}")


def load_config(config: str, overrides: list[str]) -> GRPOConfig:
    """The config at a path, or that of a recipe by name, with overrides applied."""
    from mm_grpo.config import GRPOConfig

    return GRPOConfig.from_yaml(find_config(config), overrides)


def find_config(config: str) -> Path:
    """The file of a config, or of a recipe by name."""
    path = Path(config)
    if os.path.exists(path) or path.suffix != "":
        return path
    known = find_recipes()
    if config not in known:
        raise ConfigError(
            f"'{config}' is neither a file nor a recipe; recipes are {', '.join(known) or 'none'}; "
            "give the path of a YAML file or one of these names"
        )
    return known[config]


def find_recipes() -> dict[str, Path]:
    """The shipped recipes by name: in the wheel inside the package, in a checkout in examples/."""
    here = Path(__file__).resolve().parents[1]
    for folder in (here / "examples", here.parent / "examples"):
        if folder.is_dir():
            return {path.parent.name: path for path in sorted(folder.glob("*/config.yaml"))}
    return {}


def to_smoke(loaded: GRPOConfig, config: str, overrides: list[str], work: Path, run_dir: str) -> GRPOConfig:
    """The smoke version of a config; prints a line about what it replaces."""
    from transformers.utils import logging as transformers_logging

    from mm_grpo.preflight.smoke import smoke_config

    transformers_logging.disable_progress_bar()
    kept = {override.partition("=")[0] for override in overrides}
    made = smoke_config(loaded, work, run_dir, beside=find_config(config).parent, kept=kept)
    rows = made.data.train if isinstance(made.data.train, str) else "the same task"
    typer.echo(
        printable(
            f"smoke: a tiny random model in place of {loaded.model.path}, rows of {rows}, on the CPU; this shows "
            "that the config works, not that it learns"
        )
    )
    return made
