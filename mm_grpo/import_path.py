"""Import of Python files and modules that a config names: reward functions, processors.

An address is `path/to/file.py:name` or `package.module:name`. A file is imported by its path, without its
neighbours, and again when its text has changed. Messages begin with the field and its value.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from mm_grpo.errors import UserError, did_you_mean
from mm_grpo.files import expand_home, read_regular_file

FILE_MODULE = "mm_grpo_file_"
"""Prefix of the names of modules that were imported from a file."""

_LOADED: dict[Path, tuple[str, ModuleType]] = {}


def library_first(path: Sequence[str], folder: str) -> list[str]:
    """Return `sys.path` with `folder`, if it holds it, behind the standard library.

    It stays first when PYTHONPATH names it.
    """
    # a json.py in the folder would otherwise replace the library's
    user_paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    entries = [entry for entry in path if entry not in ("", folder)]
    if len(entries) == len(path) or folder in (os.path.abspath(entry) for entry in user_paths if entry):
        return list(path)
    library = sysconfig.get_path("stdlib")
    libraries = (library, os.path.join(library, "lib-dynload"))
    end = max((n for n, entry in enumerate(entries, 1) if entry in libraries), default=len(entries))
    return [*entries[:end], folder, *entries[end:]]


def load_named(address: str, field: str, error: type[UserError]) -> Any:
    """Return the object at an address. Raises `error`, naming the `field`, if file, module or name does not exist."""
    place, _, name = address.rpartition(":")
    if not place or not name:
        raise error(f"{field} = {address!r}: must be path/to/file.py:Name or package.module:Name")
    subject = f"{field} = {address!r}"
    module = (load_file if place.endswith(".py") else load_module)(subject, place, error)
    target: Any = module
    for part in name.split("."):
        target = getattr(target, part, None)
    if target is None:
        public = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__]
        raise error(
            f"{subject}: {place} has no {name!r}; {did_you_mean(name, public)}it has {', '.join(public)}"
        )
    return target


def load_file(what: str, place: str, error: type[UserError]) -> ModuleType:
    """Import a file; `what` begins the message of `error`."""
    try:
        path = Path(expand_home(place)).resolve()
        source = read_regular_file(path)
    except FileNotFoundError:
        raise error(f"{what}: there is no file {path}; give a path from the folder you start in") from None
    except (ValueError, OSError, RuntimeError) as cause:  # an unknown user, a folder, a circle of links
        raise error(f"{what}: no such file can be read ({cause})") from None
    digest = hashlib.sha256(source).hexdigest()
    if path in _LOADED and _LOADED[path][0] == digest:
        return _LOADED[path][1]
    name = f"{FILE_MODULE}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    linecache.checkcache(str(path))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise error(f"{what}: {path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up here
    try:
        # not loader.exec_module: its bytecode cache goes by the file's second and size, and would run
        # the old code of a file that was edited within one second
        exec(compile(source, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as cause:
        del sys.modules[name]
        raise error(import_failed(what, cause)) from cause
    _LOADED[path] = (digest, module)
    return module


def load_module(what: str, place: str, error: type[UserError]) -> ModuleType:
    """Import the module named `place`; `what` begins the message of `error`."""
    try:
        return importlib.import_module(place)
    except (Exception, SystemExit) as cause:
        raise error(import_failed(what, cause)) from cause


def digest_of(address: str) -> str | None:
    """Return the SHA-256 of the file that an address names, as it was loaded; None for a module."""
    return _LOADED.get(Path(address.rsplit(":", 1)[0]), (None, None))[0]


def address_in_module(what: Any) -> str | None:
    """Return the address that leads to exactly this function or class; None when there is none."""
    module, attribute = getattr(what, "__module__", None), getattr(what, "__qualname__", "<")
    target: Any = sys.modules.get(module or "")
    place = getattr(target, "__file__", None) if str(module).startswith(FILE_MODULE) else module
    for part in attribute.split("."):
        target = getattr(target, part, None)
    return f"{place}:{attribute}" if place and target is what else None


def in_this_process_alone(address: str) -> bool:
    """Return True if an address is in a notebook or in the running script: another process would run it again."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    place = address.rpartition(":")[0]
    return place == "__main__" or bool(script and os.path.realpath(place) == os.path.realpath(script))


def import_failed(what: str, cause: BaseException) -> str:
    """Return the message for an import that raised: `what` was imported, the cause and its line."""
    if isinstance(cause, UserError):
        return f"{what} cannot be imported: {cause}"
    trace = traceback.extract_tb(cause.__traceback__)
    frames = [frame for frame in trace if frame.filename != __file__ and "importlib" not in frame.filename]
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    if isinstance(cause, SyntaxError):
        where = f" at {cause.filename}:{cause.lineno}"
    hint = ""
    if isinstance(cause, ModuleNotFoundError):
        hint = "; install the package, or set PYTHONPATH to its folder (a file is imported without its neighbours)"
    return f"{what} cannot be imported: {type(cause).__name__}: {cause}{where}{hint}"
