"""What ships to start from: `mm-grpo recipes` lists, shows and copies recipes, `mm-grpo init` writes a first config.

mm-grpo recipes                     every recipe and layer by name, with what it is for
mm-grpo recipes NAME                one recipe: its README and its config; or one layer
mm-grpo recipes NAME --copy DIR     its folder and the layers in DIR, to be edited
mm-grpo init [DIR]                  a config, a row with an image and a reward of your own; `check` passes on it
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from mm_grpo.cli.configs import find_layers, find_recipes, first_comment
from mm_grpo.errors import ConfigError, did_you_mean
from mm_grpo.terminal import printable

LEFT_OUT = ("__pycache__",)
CONFIG = """\
# mm-grpo check config.yaml, then mm-grpo train config.yaml; with --smoke a tiny model stands in for this one
model:
  path: Qwen/Qwen2.5-VL-3B-Instruct
data:
  train: rows.jsonl # one row a line: prompt, image, and columns for the rewards
rollout:
  max_completion_length: 128
rewards:
  - own_reward.py:own_reward
run:
  dir: runs/first
  max_steps: 100
"""
REWARD = '''\
"""Scores for rows.jsonl. By hand: mm-grpo rewards try own_reward.py:own_reward --completion 3 --column answer=3"""


def own_reward(completion: str, answer: str) -> float | None:
    """1 when the last word of the completion is the row's answer; None when the row has none."""
    if not answer:
        return None
    words = completion.replace(".", " ").split()
    return float(bool(words) and words[-1].lower() == answer.lower())
'''
ROW = {"prompt": "How many squares are there? Answer with a number.", "image": "row.png", "answer": "3"}


def recipes(
    name: Annotated[str | None, typer.Argument(help="A recipe or a layer.", show_default=False)] = None,
    copy: Annotated[
        Path | None,
        typer.Option("--copy", help="Copy recipe and layers into this folder.", show_default=False),
    ] = None,
) -> None:
    """List the shipped recipes and layers; with NAME show one, with --copy DIR copy it."""
    known, layers = find_recipes(), find_layers()
    if name is None:
        if copy is not None:
            raise ConfigError(f"--copy {copy}: name the recipe to copy: {', '.join(known)}")
        for title, files in (("recipes", known), ("layers", layers)):
            typer.echo(f"{title}:")
            for each, file in files.items():
                typer.echo(printable(f"  {each:<18} {first_comment(file)}"))
        typer.echo("mm-grpo recipes NAME shows one, mm-grpo recipes NAME --copy DIR copies it")
        return
    found = known.get(name) or layers.get(name.removesuffix(".yaml"))
    if found is None or (copy is not None and name not in known):
        names = f"recipes are {', '.join(known)}; layers, which are not copied alone, are {', '.join(layers)}"
        raise ConfigError(f"there is no recipe {name!r}; {did_you_mean(name, [*known, *layers])}{names}")
    if copy is not None:
        _copy(found.parent, copy, layers)
        return
    readme = found.parent / "README.md"
    if name in known and readme.is_file():
        typer.echo(printable(readme.read_text(encoding="utf-8").strip() + "\n"))
    typer.echo(printable(f"{found}\n\n{found.read_text(encoding='utf-8')}"))


def init(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where to write them.")] = Path("."),
) -> None:
    """Write a first config, one row with its image and a reward of your own, all ready to be edited."""
    writers: dict[str, Callable[[Path], object]] = {
        "config.yaml": lambda path: path.write_text(CONFIG, encoding="utf-8"),
        "rows.jsonl": lambda path: path.write_text(json.dumps(ROW) + "\n", encoding="utf-8"),
        "own_reward.py": lambda path: path.write_text(REWARD, encoding="utf-8"),
        "row.png": _draw,
    }
    _refuse_existing([folder / name for name in writers])
    _make(folder)
    for name, write in writers.items():
        write(folder / name)
    follow = f"mm-grpo check {folder / 'config.yaml'} --smoke, and mm-grpo rewards for what can score"
    typer.echo(printable(f"wrote {', '.join(writers)} in {folder}\nnext: {follow}"))


def _draw(path: Path) -> None:
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (224, 112), "white")
    for left in (20, 84, 148):
        ImageDraw.Draw(picture).rectangle((left, 30, left + 50, 80), fill=(40, 70, 200))
    picture.save(path)


def _copy(source: Path, folder: Path, layers: Mapping[str, Path]) -> None:
    files = {
        folder / path.relative_to(source): path
        for path in sorted(source.rglob("*"))
        if path.is_file() and not set(LEFT_OUT) & set(path.relative_to(source).parts)
    }
    files |= {folder / "layers" / path.name: path for path in layers.values()}
    if (source / "make_base.py").is_file():
        files[folder / "small_bases.py"] = source.parent / "small_bases.py"  # which it imports
    _refuse_existing(files)
    _make(folder)
    for target, path in files.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    command = f"mm-grpo train {folder / 'config.yaml'} [{folder / 'layers' / 'lora.yaml'} ...] [--smoke]"
    typer.echo(printable(f"copied {len(files)} files to {folder}\nnext: {command}"))


def _refuse_existing(files: Mapping[Path, Path] | list[Path]) -> None:
    there = [str(path) for path in files if path.exists() or path.is_symlink()]
    if there:
        more = f" and {len(there) - 1} more" if len(there) > 1 else ""
        raise ConfigError(f"{there[0]}{more} exists already and would be written over; name another folder")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made a folder ({error.strerror})") from None
