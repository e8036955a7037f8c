"""What ships to start from: `mm-grpo recipes` lists, shows and copies recipes, `mm-grpo init` writes a first config.

mm-grpo recipes                     every recipe and layer by name, with what it is for
mm-grpo recipes NAME                one recipe: its README and its config; or one layer
mm-grpo recipes NAME --copy DIR     its folder as DIR, to be edited
mm-grpo init [DIR]                  what is in examples/init: a config, a row with an image and a reward of your own
"""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from mm_grpo.cli.configs import first_comment
from mm_grpo.config.shipped import find_layers, find_recipes, shipped_folder
from mm_grpo.errors import ConfigError, did_you_mean
from mm_grpo.terminal import printable


def recipes(
    name: Annotated[str | None, typer.Argument(help="A recipe or a layer.", show_default=False)] = None,
    copy: Annotated[
        Path | None,
        typer.Option("--copy", help="Copy the recipe into this folder.", show_default=False),
    ] = None,
) -> None:
    """List the shipped recipes and layers; with NAME show one, with --copy DIR copy it."""
    known, layers = find_recipes(), find_layers()
    if name is None and copy is None:
        for title, files in (("recipes", known), ("layers", layers)):
            typer.echo(f"{title}:")
            for each, file in files.items():
                typer.echo(printable(f"  {each:<18} {first_comment(file)}"))
        typer.echo("mm-grpo recipes NAME shows one, mm-grpo recipes NAME --copy DIR copies it")
        return
    name = name or ""
    found = known.get(name) or (layers.get(name.removesuffix(".yaml")) if copy is None else None)
    if found is None:
        names = f"recipes are {', '.join(known)}; layers, which are not copied, are {', '.join(layers)}"
        raise ConfigError(f"there is no recipe {name!r}; {did_you_mean(name, [*known, *layers])}{names}")
    if copy is not None:
        _copy(found.parent, copy)
        typer.echo(printable(f"next: mm-grpo train {copy / 'config.yaml'} [lora.yaml ...] [--smoke]"))
        return
    readme = found.parent / "README.md"
    if name in known and readme.is_file():
        typer.echo(printable(readme.read_text(encoding="utf-8").strip() + "\n"))
    typer.echo(printable(f"{found}\n\n{found.read_text(encoding='utf-8')}"))


def init(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where to write them.")] = Path("."),
) -> None:
    """Write a first config, one row with its image and a reward of your own, all ready to be edited."""
    _copy(shipped_folder("examples") / "init", folder)
    if find_spec("vllm") is not None:
        import torch

        if torch.cuda.is_available():
            config = folder / "config.yaml"
            config.write_text(config.read_text().replace("rollout:\n", "rollout:\n  engine: vllm\n"))
            typer.echo("rollout.engine: vllm, which is installed here and has a GPU")
    follow = f"mm-grpo check {folder / 'config.yaml'} --smoke, and mm-grpo rewards for what can score"
    typer.echo(printable(f"next: {follow}"))


def _copy(source: Path, folder: Path) -> None:
    """Copy what is in `source`. Nothing is written over."""
    files = {
        folder / path.relative_to(source): path
        for path in sorted(source.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    if there := [str(path) for path in files if path.exists() or path.is_symlink()]:
        others = f" and {len(there) - 1} more" if len(there) > 1 else ""
        raise ConfigError(f"{there[0]}{others} exists already and would be written over; name another folder")
    try:
        for target, path in files.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written to ({error})") from None
    typer.echo(printable(f"copied {len(files)} files to {folder}"))
