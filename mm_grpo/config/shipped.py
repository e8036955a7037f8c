"""Shipped recipes and layers by name, and their folder `examples`.

A recipe is a folder of `examples/` with a config.yaml and a README, a layer a file of `examples/layers/` (lora or
lora.yaml).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mm_grpo.errors import ConfigError, did_you_mean


def find_config(config: str | os.PathLike[str]) -> Path:
    """Return the path of a config file, of the one in a folder, or of a recipe by name; ConfigError otherwise."""
    path = Path(config)
    if (path / "config.yaml").is_file():  # a run's folder, or a recipe's
        return path / "config.yaml"
    if os.path.exists(path) or path.suffix != "":
        return path
    recipes = find_recipes()
    if str(path) not in recipes:
        names = f"{did_you_mean(str(path), recipes)}recipes are {', '.join(recipes) or 'none'}"
        raise ConfigError(f"'{path}' is neither a YAML file nor a recipe; {names}")
    return recipes[str(path)]


def find_layer(layer: str | os.PathLike[str]) -> Path:
    """Return the path of a layer, or of a shipped one by name, with or without its suffix; ConfigError otherwise."""
    if os.path.isfile(layer):
        return Path(layer)
    layers = find_layers()
    name = re.sub(r"\.ya?ml$", "", os.fspath(layer))
    if name not in layers:
        names = f"{did_you_mean(name, layers)}layers are {', '.join(layers) or 'none'}"
        raise ConfigError(
            f"'{layer}' is no YAML file, no layer and no section.field=value (without spaces around the =); {names}"
        )
    return layers[name]


def find_recipes() -> dict[str, Path]:
    """Return the config files of the shipped recipes by name. Folders without a README are no recipes."""
    paths = sorted(shipped_folder("examples").glob("*/config.yaml"))
    return {path.parent.name: path for path in paths if path.with_name("README.md").is_file()}


def find_layers() -> dict[str, Path]:
    """Return the shipped layers by name."""
    return {path.stem: path for path in sorted((shipped_folder("examples") / "layers").glob("*.yaml"))}


def shipped_folder(name: str) -> Path:
    """Return the path of `examples` or `docs`: in the wheel inside the package, in a checkout beside it."""
    here = Path(__file__).resolve().parents[1]
    return here / name if (here / name).is_dir() else here.parent / name
