"""Factories of environments: a class of this package, of another one, or at an address, and adapters.

An adapter is named in a config as `kind:rest`. What it makes environments with is an `Adapter`, which other processes
find again by that name, as they find a class by its address.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from mm_grpo.environments.observation import described
from mm_grpo.environments.own_tools import EnvironmentGone
from mm_grpo.environments.session import methods
from mm_grpo.errors import ConfigError, UserError, did_you_mean
from mm_grpo.import_path import address_in_module, in_this_process_alone, load_named
from mm_grpo.user_code.watchdog import at_start

BUILTINS = {"zoom": "Zoom", "rotate": "Rotate", "grid_world": "GridWorld"}
"""Environments of this package by the name that `rollout.environment` gives them."""
ADAPTERS = {"openenv": "http://127.0.0.1:8000"}
"""Adapters, each a module of this package whose `named(rest)` makes an environment, and what may follow the name."""


class Adapter:
    """Makes environments of another library, by the name that a config gives them."""

    def __init__(self, name: str) -> None:
        self.address = name
        self.kind, _, self.rest = name.partition(":")
        self.__qualname__ = self.__name__ = name

    def __call__(self) -> Any:
        return import_module(f"mm_grpo.environments.{self.kind}").named(self.rest)


def adapter_of(name: str) -> Adapter | None:
    """The adapter that a name stands for; None where it is none."""
    kind, colon, _ = name.partition(":")
    return Adapter(name) if colon and kind in ADAPTERS else None


def source_of(factory: Callable[[], Any]) -> Callable[..., Any] | None:
    """The user's code that makes environments; None where it is on a server."""
    if not isinstance(factory, Adapter):
        return factory
    module = import_module(f"mm_grpo.environments.{factory.kind}")
    found: Callable[..., Any] | None = module.source(factory.rest)
    return found


def address_of(what: Any) -> str | None:
    """The address at which another process finds a function or class; None where only this one has it."""
    if isinstance(what, Adapter):
        return what.address
    address = address_in_module(what)
    return None if address is None or in_this_process_alone(address) else address


def factory_named(name: str) -> Callable[[], Any]:
    """Resolve `rollout.environment`: a class of this package, an adapter, an entry point, or an address."""
    if name in BUILTINS:
        found: Callable[[], Any] = getattr(import_module("mm_grpo.environments.builtins"), BUILTINS[name])
        return found
    if (adapter := adapter_of(name)) is not None:
        return adapter
    points = {point.name: point for point in entry_points(group="mm_grpo.environments")}
    if name in points:
        loaded: Callable[[], Any] = points[name].load()
        return loaded
    if ":" not in name:
        known = sorted({*BUILTINS, *points})
        others = ", ".join(f"{kind}:{rest}" for kind, rest in ADAPTERS.items())
        raise ConfigError(
            f"rollout.environment = {name!r}: must be one of {', '.join(known)}, {others}, path/to/file.py:Class or "
            f"package.module:Class; {did_you_mean(name, known)}".rstrip("; ")
        )
    at: Callable[[], Any] = load_named(name, "rollout.environment", ConfigError)
    return at


def made(factory: Callable[[], Any]) -> Any:
    """An environment. ConfigError where none can be made."""
    if not callable(factory):
        raise _refused(f"{factory!r} cannot be called without arguments; name a class")
    name = getattr(factory, "__qualname__", repr(factory))
    try:
        with at_start(f"rollout.environment: {name}(), which makes an environment,"):
            return factory()
    except UserError as error:
        raise _refused(str(error)) from error
    except Exception as error:
        raise _refused(
            f"{name}() raised {described(error)}; it gets no arguments, and the row in reset"
        ) from error


def tools_of(environment: Any) -> Mapping[str, Callable[..., Any]]:
    """The tools of an environment by name. ConfigError where it cannot be begun, or cannot say them."""
    name = type(environment).__name__
    if not callable(getattr(environment, "reset", None)):
        raise _refused(f"{name} has no method `reset`")
    paid = getattr(type(environment), "step_reward", None)
    if isinstance(paid, property) and paid.fset is None:
        raise _refused(f"{name}.step_reward is a property without a setter; give it one")
    try:
        found = methods(environment)
    except (UserError, EnvironmentGone) as error:
        raise _refused(str(error)) from error
    except Exception as error:
        raise _refused(f"{name}.tools raised {described(error)}") from error
    if not found:
        raise _refused(f"{name} has no tools, that is no public method besides reset, get_reward and close")
    return found


def _refused(why: str) -> ConfigError:
    return ConfigError(f"rollout.environment: {why}")
