"""What makes environments: a class of this package, of another one or at an address, or an OpenEnv server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from mm_grpo.background import BackgroundThreads
from mm_grpo.environments.observation import described
from mm_grpo.environments.own_tools import EnvironmentGone
from mm_grpo.environments.session import methods
from mm_grpo.errors import ConfigError, UserError
from mm_grpo.import_path import address_in_module, in_this_process_alone, load_named
from mm_grpo.user_code.watchdog import call_within

BUILTINS = {"zoom": "Zoom"}
"""Environments of this package by the name that `rollout.environment` gives them."""


class OpenEnvFactory:
    """Makes the environments of `openenv:URL`, the name by which other processes find them too."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.address = self.__qualname__ = f"openenv:{url}"

    def __call__(self) -> Any:
        from mm_grpo.environments.openenv import OpenEnv

        return OpenEnv(self.url)


def source_of(factory: Callable[[], Any]) -> Callable[..., Any] | None:
    """The user's code that makes environments; None where it is on a server."""
    return None if isinstance(factory, OpenEnvFactory) else factory


def address_of(what: Any) -> str | None:
    """The address at which another process finds a function or class; None where only this one has it."""
    if isinstance(what, OpenEnvFactory):
        return what.address
    address = address_in_module(what)
    return None if address is None or in_this_process_alone(address) else address


def found_at(address: str, field: str, error: type[UserError]) -> Any:
    """What an address leads to. `error`, naming the `field`, where that is not there."""
    kind, _, url = address.partition(":")
    return OpenEnvFactory(url) if kind == "openenv" else load_named(address, field, error)


def factory_named(name: str) -> Callable[[], Any]:
    """Resolve `rollout.environment`: a class of this package, a server, or an address."""
    found: Callable[[], Any]
    if name in BUILTINS:
        found = getattr(import_module("mm_grpo.environments.builtins"), BUILTINS[name])
        return found
    if ":" not in name:
        raise ConfigError(
            f"rollout.environment = {name!r}: must be {', '.join(BUILTINS)}, openenv:http://HOST:PORT, "
            f"path/to/file.py:Class or package.module:Class"
        )
    found = found_at(name, "rollout.environment", ConfigError)
    return found


def made(factory: Callable[[], Any], seconds: float) -> Any:
    """Make an environment. ConfigError when none can be made, or none in so many seconds."""
    if not callable(factory):
        raise _refused(f"{factory!r} cannot be called without arguments; name a class")
    name = getattr(factory, "__qualname__", repr(factory))
    thread = BackgroundThreads(1, "environment")
    try:
        return call_within(seconds, thread, factory)
    except TimeoutError:
        late = f"{name}() had not ended after rollout.tool_timeout = {seconds:g} s"
        raise _refused(f"{late}; mend its __init__, or set a longer one") from None
    except Exception as error:
        why = f"{name}() raised {described(error)}; it gets no arguments, but the row in reset"
        raise _refused(str(error) if isinstance(error, UserError) else why) from error
    finally:
        thread.close()


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
    except Exception as error:
        ours = isinstance(error, UserError | EnvironmentGone)
        raise _refused(str(error) if ours else f"{name}.tools raised {described(error)}") from error
    if not found:
        raise _refused(f"{name} has no tools, that is no public method besides reset, get_reward and close")
    return found


def _refused(why: str) -> ConfigError:
    return ConfigError(f"rollout.environment: {why}")
