"""Factories of environments: classes of this package or at an address, and OpenEnv servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mm_grpo.background import BackgroundThreads
from mm_grpo.environments.observation import describe_error
from mm_grpo.environments.own_tools import EnvironmentGone
from mm_grpo.environments.session import methods
from mm_grpo.errors import ConfigError, UserError
from mm_grpo.import_path import address_in_module, in_this_process_alone, load_named
from mm_grpo.user_code.watchdog import call_within

BUILTINS = {"zoom": "mm_grpo.environments.builtins:Zoom"}
"""Addresses of this package's classes by their name in `rollout.environment`."""


class OpenEnvFactory:
    """Factory of the environments of `openenv:URL`, an address for other processes too."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.address = self.__qualname__ = f"openenv:{url}"

    def __call__(self) -> Any:
        from mm_grpo.environments.openenv import OpenEnv

        return OpenEnv(self.url)


def source_of(factory: Callable[[], Any]) -> Callable[..., Any] | None:
    """Return the user's code that makes environments; None if it is on a server."""
    return None if isinstance(factory, OpenEnvFactory) else factory


def address_of(code: Any) -> str | None:
    """Return the address at which other processes find a function or class; None if only this one has it."""
    if isinstance(code, OpenEnvFactory):
        return code.address
    address = address_in_module(code)
    return None if address is None or in_this_process_alone(address) else address


def load_code(address: str, field: str, error: type[UserError]) -> Any:
    """Import the function, class or factory of an address. Raise `error`, naming the `field`, if there is none."""
    kind, _, url = address.partition(":")
    return OpenEnvFactory(url) if kind == "openenv" else load_named(address, field, error)


def factory_named(name: str) -> Callable[[], Any]:
    """Resolve `rollout.environment`: a class of this package, a server, or an address."""
    if name not in BUILTINS and ":" not in name:
        raise ConfigError(
            f"rollout.environment = {name!r}: must be {', '.join(BUILTINS)}, openenv:http://HOST:PORT, "
            f"path/to/file.py:Class or package.module:Class"
        )
    factory: Callable[[], Any] = load_code(BUILTINS.get(name, name), "rollout.environment", ConfigError)
    return factory


def make_environment(factory: Callable[[], Any], seconds: float) -> Any:
    """Make an environment. Raise ConfigError if that fails or takes longer than `seconds`."""
    if not callable(factory):
        raise _refused(f"{factory!r} cannot be called without arguments; name a class")
    name = getattr(factory, "__qualname__", repr(factory))
    thread = BackgroundThreads(1, "environment")
    try:
        return call_within(seconds, thread, factory)
    except TimeoutError:
        late = f"{name}() had not ended after rollout.tool_timeout = {seconds:g} s"
        raise _refused(f"{late}; fix its __init__, or set a longer one") from None
    except Exception as error:
        why = f"{name}() raised {describe_error(error)}; it gets no arguments, but the row in reset"
        raise _refused(str(error) if isinstance(error, UserError) else why) from error
    finally:
        thread.close()


def tools_of(environment: Any) -> Mapping[str, Callable[..., Any]]:
    """Return the tools of an environment by name. Raise ConfigError without `reset` or tools, or if listing fails."""
    name = type(environment).__name__
    if not callable(getattr(environment, "reset", None)):
        raise _refused(f"{name} has no method `reset`")
    step_reward = getattr(type(environment), "step_reward", None)
    if isinstance(step_reward, property) and step_reward.fset is None:
        raise _refused(f"{name}.step_reward is a property without a setter; give it one")
    try:
        tools = methods(environment)
    except Exception as error:
        plain = isinstance(error, UserError | EnvironmentGone)
        raise _refused(str(error) if plain else f"{name}.tools raised {describe_error(error)}") from error
    if not tools:
        raise _refused(f"{name} has no tools, that is no public method besides reset, get_reward and close")
    return tools


def _refused(why: str) -> ConfigError:
    return ConfigError(f"rollout.environment: {why}")
