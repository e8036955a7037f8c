"""Load the config of a command: a YAML file or a shipped recipe, changed by layers and fields.

    CONFIG [LAYER ...] [a.b=value ...]

CONFIG and LAYER are YAML files or names of shipped ones (config/shipped.py). Layers are merged in their order, then
fields are set in theirs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from mm_grpo.config.shipped import find_config, find_layer
from mm_grpo.errors import DataError
from mm_grpo.terminal import printable

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig

Config = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG", help="A YAML file, a run's folder or a shipped recipe.", show_default=False
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="LAYER.yaml | section.field=value",
        help="Layers, which are YAML files or names of shipped ones, and fields to change.",
        show_default=False,
    ),
]
Smoke = Annotated[
    bool, typer.Option("--smoke", help="A tiny random model and the fixture's rows, on the CPU, in seconds.")
]
Processes = Annotated[
    int | None, typer.Option("--processes", help="Processes of this machine that train together.")
]
CheckpointName = Annotated[
    str | None,
    typer.Option(
        "--checkpoint", help="Of a run folder: best, last or step-N. Default: last.", show_default=False
    ),
]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that a run, an export or a model brings.")
]


class ConfigFiles(NamedTuple):
    """Files of a config in the order of merging, and fields that are set after them."""

    config: Path
    layers: tuple[Path, ...]
    fields: tuple[str, ...]


def load_config(config: str, overrides: Sequence[str]) -> GRPOConfig:
    """Load a config by path or a recipe by name, and apply layers and fields."""
    from mm_grpo.config import GRPOConfig

    files = config_files(config, overrides)
    return GRPOConfig.from_yaml(files.config, files.fields, layers=files.layers)


def config_files(config: str, overrides: Sequence[str]) -> ConfigFiles:
    """Sort a command's arguments: one with a `=` is a field, any other is a layer."""
    fields = tuple(argument for argument in overrides if "=" in argument)
    layers = tuple(find_layer(argument) for argument in overrides if "=" not in argument)
    return ConfigFiles(find_config(config), layers, fields)


def first_comment(path: Path) -> str:
    """Return the text of the first comment line of a config file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return next((line[1:].strip() for line in lines if line.startswith("#")), "")


def refuse_missing_data(loaded: GRPOConfig, config: str) -> None:
    """Raise DataError if a recipe's prepared rows do not exist; the message names the script that makes them."""
    from mm_grpo.config.source_entries import map_source

    recipe = find_config(config).parent
    script = recipe / "prepare.py"
    paths: list[Any] = []
    map_source([loaded.data.train, loaded.data.eval], paths.append)
    for path in paths if script.is_file() else ():
        if isinstance(path, str) and path.endswith(".jsonl") and not os.path.exists(path):
            raise DataError(
                f"{path} does not exist; the recipe's rows are made once, with a network, by\n"
                f"    python {os.path.relpath(script)}    # its first lines say what it takes\n"
                f"--smoke does not need them: it uses the rows of {recipe / 'fixture'}"
            )


def to_smoke(
    loaded: GRPOConfig, config: str, overrides: Sequence[str], work: Path, run_dir: str
) -> GRPOConfig:
    """Return the smoke version of a config; print what it replaces."""
    from mm_grpo.config.yaml_file import read_yaml
    from mm_grpo.preflight.smoke import smoke_config

    files = config_files(config, overrides)
    fixed = {field.partition("=")[0].strip() for field in files.fields}
    for layer in files.layers:
        sections = [(name, fields) for name, fields in read_yaml(layer).items() if isinstance(fields, dict)]
        fixed |= {f"{name}.{key}" for name, fields in sections for key in fields}
    smoke = smoke_config(loaded, work, run_dir, folder=files.config.parent, fixed=fixed)
    rows = smoke.data.train if isinstance(smoke.data.train, str) else "the same task"
    changes = f"a tiny random model in place of {loaded.model.path}, rows of {rows}, on the CPU"
    typer.echo(printable(f"smoke: {changes}; this shows that the config works, not that it learns"))
    return smoke
