"""What a run reads: files and folders that may not lie in its folder, where it writes and removes."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from mm_grpo.config import GRPOConfig
from mm_grpo.config.yaml_file import is_source
from mm_grpo.data.mixture import Mixture, mixture_of
from mm_grpo.errors import ConfigError
from mm_grpo.files import expand_glob

AnyPath = str | PathLike[str]
Inputs = Iterable[tuple[str, AnyPath]]


def inputs_of(config: GRPOConfig, **given: Any) -> list[tuple[str, AnyPath]]:
    """What a run reads, as (field, path); `given` are `train`, `eval` and `rewards` that were passed in Python.

    Those that are no files or folders here (a name on a hub, a task) are left out.
    """
    sets = given.get("eval")
    if sets is None:
        sets = {name: mixture_of(source) for name, source in config.data.eval_sets().items()}
    named = sets.items() if isinstance(sets, Mapping) and not is_source(sets) else [("", sets)]
    train = given.get("train") if given.get("train") is not None else mixture_of(config.data.train)
    found: list[tuple[str, Any]] = [
        ("model.path", config.model.path),
        ("algorithm.reference_path", config.algorithm.reference_path),
        ("data.train", train),
        *((f"data.eval.{name}".rstrip("."), source) for name, source in named),
        ("data.image_dir", config.data.image_dir),
        ("run.expected_curve", config.run.expected_curve),
        *(("algorithm.features", a.rpartition(":")[0]) for a in config.algorithm.features if ".py:" in a),
    ]
    for entry in given.get("rewards") or config.rewards:
        name = entry.get("name") if isinstance(entry, Mapping) else entry
        if isinstance(name, str) and ".py:" in name:
            found.append(("rewards", name.rpartition(":")[0]))
    return [(field, path) for field, given_path in found for path in _paths_in(given_path)]


def _paths_in(source: Any) -> list[AnyPath]:
    """The files and folders that a source names: itself, those of a list, a folder:split, or what a glob matches."""
    if isinstance(source, Mixture):
        source = [entry.get(key) for entry in source.entries for key in ("path", "image_dir")]
    if isinstance(source, list | tuple):
        return [path for one in source if isinstance(one, (str, PathLike)) for path in _paths_in(one)]
    if not isinstance(source, (str, PathLike)):
        return []
    if os.path.exists(source):
        return [source]
    text = os.fspath(source)
    if os.path.isdir(whole := text.rpartition(":")[0]):
        return [whole]
    return [*expand_glob(text)] if glob.has_magic(text) else []


def refuse_inputs(dir: AnyPath, inputs: Inputs) -> None:
    """ConfigError when one of `inputs`, (field, path), lies in the run folder `dir`."""
    # os.path's realpath, which takes a circle of links for what it is called
    root = Path(os.path.realpath(dir))
    for field, path in inputs:
        if Path(os.path.realpath(path)).is_relative_to(root):
            raise ConfigError(
                f"{field} = '{path}' lies in run.dir = '{dir}', where a run writes and removes files; move it, or name "
                "another folder with run.dir=..."
            )
