"""Where reward functions lie: files and modules imported, and the address under which another process
finds a function.

An address is `/path/to/file.py:attribute` or `module:attribute`. A file is imported by its path, without
its neighbours, and again when its text has changed.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import linecache
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from mm_grpo.errors import RewardError
from mm_grpo.rewards.registry import RewardSpec

FILE_MODULE = "mm_grpo_reward_file_"

_LOADED: dict[Path, tuple[str, ModuleType]] = {}


def address_of(spec: RewardSpec) -> str:
    """The address of a reward's function.

    RewardError for what lives in this process alone: lambdas, closures, functions of a notebook, and those
    of the script that runs, which would have to run again.
    """
    address = spec.address or importable(spec.fn)
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    place = address.rpartition(":")[0] if address else "__main__"
    if (
        address is None
        or place == "__main__"
        or (script and os.path.realpath(place) == os.path.realpath(script))
    ):
        raise RewardError(
            f"reward {spec.name!r} cannot be isolated: a worker process imports its function, and a lambda, a "
            f"closure, a function of a notebook or of the script that runs exists in this process alone. Put "
            f"it into a file of its own and name it as path/to/file.py:function or package.module:function, "
            f"or leave out isolated (then a time-out stops the run)"
        )
    return address


def importable(what: Any) -> str | None:
    """The address at which exactly this function or class is found; None when it has none."""
    module, attribute = getattr(what, "__module__", None), getattr(what, "__qualname__", "<")
    found: Any = sys.modules.get(module or "")
    place = getattr(found, "__file__", None) if str(module).startswith(FILE_MODULE) else module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    return f"{place}:{attribute}" if place and found is what else None


def digest_of(address: str) -> str | None:
    """The SHA-256 of the file that an address names, as it was loaded; None for a module."""
    return _LOADED.get(Path(address.rsplit(":", 1)[0]), (None, None))[0]


def load_file(what: str, place: str, base: Path | None) -> ModuleType:
    path = ((base or Path.cwd()) / Path(place).expanduser()).resolve()
    if not path.is_file():
        raise RewardError(
            f"rewards: {what!r}: there is no file {path}; give a path from the folder you start in"
        )
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if path in _LOADED and _LOADED[path][0] == digest:
        return _LOADED[path][1]
    name = f"{FILE_MODULE}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    linecache.checkcache(str(path))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RewardError(f"rewards: {what!r}: {path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up here
    try:
        # Not loader.exec_module: its bytecode cache goes by the file's second and size, and would run
        # the old code of a file that was edited within one second.
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise RewardError(import_failed(what, error)) from error
    _LOADED[path] = (digest, module)
    return module


def load_module(what: str, place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise RewardError(import_failed(what, error)) from error


def import_failed(what: str, error: BaseException) -> str:
    if isinstance(error, RewardError):
        return f"rewards: {what!r} cannot be imported: {error}"
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if f.filename != __file__ and "importlib" not in f.filename
    ]
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    if isinstance(error, SyntaxError):
        where = f" at {error.filename}:{error.lineno}"
    hint = (
        "; install the package, or set PYTHONPATH to its folder (a reward file is imported without its "
        "neighbours)"
        if isinstance(error, ModuleNotFoundError)
        else ""
    )
    return f"rewards: {what!r} cannot be imported: {type(error).__name__}: {error}{where}{hint}"
