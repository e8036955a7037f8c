"""Inputs of a run: files and folders that it reads, and that may not be in its folder."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from mm_grpo.config import GRPOConfig
from mm_grpo.config.values import is_source
from mm_grpo.data.mixture import Mixture, mixture_of
from mm_grpo.errors import ConfigError
from mm_grpo.files import expand_glob

AnyPath = str | PathLike[str]
Inputs = Iterable[tuple[str, AnyPath]]


def inputs_of(config: GRPOConfig, **arguments: Any) -> list[tuple[str, AnyPath]]:
    """Return (field, path) of each file and folder that a run reads.

    `arguments` are `train`, `eval` and `rewards` that were passed in Python. Names on a hub and tasks are left out.
    """
    sets, train = arguments.get("eval"), arguments.get("train")
    if sets is None:
        sets = {name: mixture_of(source) for name, source in config.data.eval_sets().items()}
    by_name = sets.items() if isinstance(sets, Mapping) and not is_source(sets) else [("", sets)]
    sources: list[tuple[str, Any]] = [
        ("model.path", config.model.path),
        ("algorithm.reference_path", config.algorithm.reference_path),
        ("data.train", mixture_of(config.data.train) if train is None else train),
        *((f"data.eval.{name}".rstrip("."), source) for name, source in by_name),
        ("data.image_dir", config.data.image_dir),
        ("run.expected_curve", config.run.expected_curve),
        *(("algorithm.features", a.rpartition(":")[0]) for a in config.algorithm.features if ".py:" in a),
    ]
    for entry in arguments.get("rewards") or config.rewards:
        name = entry.get("name") if isinstance(entry, Mapping) else entry
        if isinstance(name, str) and ".py:" in name:
            sources.append(("rewards", name.rpartition(":")[0]))
    return [(field, path) for field, source in sources for path in _paths_in(source)]


def _paths_in(source: Any) -> list[AnyPath]:
    """Return the existing files and folders of a source: a path, a list, a mixture, folder:split, or a glob."""
    if isinstance(source, Mixture):
        source = [entry.get(key) for entry in source.entries for key in ("path", "image_dir")]
    if isinstance(source, list | tuple):
        return [path for entry in source if isinstance(entry, (str, PathLike)) for path in _paths_in(entry)]
    if not isinstance(source, (str, PathLike)):
        return []
    if os.path.exists(source):
        return [source]
    text = os.fspath(source)
    if os.path.isdir(folder := text.rpartition(":")[0]):
        return [folder]
    return [*expand_glob(text)] if glob.has_magic(text) else []


def refuse_inputs(dir: AnyPath, inputs: Inputs) -> None:
    """Raise ConfigError if one of `inputs`, (field, path), is in the run folder `dir`."""
    # not Path.resolve, which raises for links in a circle
    root = Path(os.path.realpath(dir))
    for field, path in inputs:
        if Path(os.path.realpath(path)).is_relative_to(root):
            raise ConfigError(
                f"{field} = '{path}' lies in run.dir = '{dir}', in which a run writes and removes files; move it, or "
                "name another folder with run.dir=..."
            )
