"""Configs to begin with: `mm-grpo recipes` lists, shows and copies recipes; `mm-grpo init` copies examples/init; and
`mm-grpo convert FILE` converts a config of another trainer to ours, and reports every key."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from mm_grpo.cli.configs import first_comment
from mm_grpo.config.shipped import find_layers, find_recipes, shipped_folder
from mm_grpo.errors import ConfigError, did_you_mean
from mm_grpo.files import OutputFile, refuse_existing
from mm_grpo.terminal import printable


def recipes(
    name: Annotated[str | None, typer.Argument(help="A recipe or a layer.", show_default=False)] = None,
    copy: Annotated[
        Path | None, typer.Option("--copy", help="Copy the recipe into this folder.", show_default=False)
    ] = None,
) -> None:
    """List the shipped recipes and layers; with NAME show one, with --copy DIR copy it."""
    recipe_files, layers = find_recipes(), find_layers()
    if name is None and copy is None:
        for title, files in (("recipes", recipe_files), ("layers", layers)):
            typer.echo(f"{title}:")
            for label, file in files.items():
                typer.echo(printable(f"  {label:<18} {first_comment(file)}"))
        typer.echo("mm-grpo recipes NAME shows one, mm-grpo recipes NAME --copy DIR copies it")
        return
    name = name or ""
    path = recipe_files.get(name) or (layers.get(name.removesuffix(".yaml")) if copy is None else None)
    if path is None:
        hint = did_you_mean(name, [*recipe_files, *layers])
        names = f"recipes are {', '.join(recipe_files)}; layers (not copied) are {', '.join(layers)}"
        raise ConfigError(f"there is no recipe {name!r}; {hint}{names}")
    if copy is not None:
        _copy(path.parent, copy)
        typer.echo(printable(f"next: mm-grpo train {copy / 'config.yaml'} [lora.yaml ...] [--smoke]"))
        return
    readme = path.parent / "README.md"
    if name in recipe_files and readme.is_file():
        typer.echo(printable(readme.read_text(encoding="utf-8").strip() + "\n"))
    typer.echo(printable(f"{path}\n\n{path.read_text(encoding='utf-8')}"))


def init(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Folder to write to.")] = Path("."),
    source: Annotated[
        str | None, typer.Option("--from", metavar="FOLDER|FILE", help="Your pictures, to write rows of.")
    ] = None,
) -> None:
    """Write a first config with a row, an image and a reward to be edited, or with rows of your pictures (--from)."""
    if source is None:
        _copy(shipped_folder("examples") / "init", folder)
    else:
        from mm_grpo.preflight.from_folder import write_first_config

        try:
            typer.echo(printable("\n".join(write_first_config(source, folder))))
        except OSError as error:
            raise ConfigError(f"{error.filename}: {error.strerror or error}") from None
    if find_spec("vllm") is not None:
        import torch

        if torch.cuda.is_available():
            config = folder / "config.yaml"
            config.write_text(config.read_text().replace("rollout:\n", "rollout:\n  engine: vllm\n"))
            typer.echo("rollout.engine: vllm, which is installed here and has a GPU")
    check = f"mm-grpo check {folder / 'config.yaml'} --smoke"
    typer.echo(printable(f"next: {check}; mm-grpo rewards lists the rewards"))


def _copy(source: Path, folder: Path) -> None:
    """Copy the files of `source`. Raises ConfigError if one exists in `folder`."""
    files = {
        folder / path.relative_to(source): path
        for path in sorted(source.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    refuse_existing(files)
    try:
        for target, path in files.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written to ({error})") from None
    typer.echo(printable(f"copied {len(files)} files to {folder}"))


def convert(
    file: Annotated[
        str,
        typer.Argument(
            help="YAML, JSON, a shell script, or Python with GRPOConfig(...).", show_default=False
        ),
    ],
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Where to write it. Default: stdout.")
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes that its batches are per device of. Default: what the file says."
        ),
    ] = None,
) -> None:
    """Convert a config of TRL, ms-swift, verl or EasyR1; keys without a counterpart are listed with the reason."""
    from mm_grpo.migrate.convert import convert as convert_keys
    from mm_grpo.migrate.convert import to_yaml
    from mm_grpo.migrate.files import read_foreign

    output_file = None if output is None else OutputFile("--output", output, mark=None)
    keys = read_foreign(file)
    conversion = convert_keys(keys, devices=devices)
    needed = ["model.path", "data.train", "rewards", "rollout.num_generations", "optim.learning_rate"]
    if keys.keys().isdisjoint(conversion.origin.get(path) for path in needed):
        why = "; ".join(f"{key}: {reason}" for key, reason in [*conversion.omitted.items()][:3])
        raise ConfigError(f"{file}: is no config of TRL, ms-swift, verl or EasyR1, or says no values ({why})")
    if output_file is None:
        typer.echo(printable(to_yaml(conversion)), nl=False)
    else:
        output_file.write(to_yaml(conversion))
    count = len(conversion.omitted)
    exceptions = f" but {count}, with their reasons as comments at the end" if count else ""
    target = f" into {output}" if output is not None else ""
    typer.echo(printable(f"all keys taken over{target}{exceptions}"), err=True)
