"""Rewards by name: the `@reward` decorator, `get` and `names`, and the table of built-ins.

Not here: what a reward is (`spec.py`), and what a config entry means (`resolve.py`). To add a built-in, write one
file in `builtins/` and one line in `_MODULES`; it is imported when it is first looked up.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, overload

from mm_grpo.errors import RewardError, did_you_mean
from mm_grpo.migrate.keys import REWARDS
from mm_grpo.rewards.spec import RewardSpec, code_of, innermost, make_spec, place_of

F = TypeVar("F", bound=Callable[..., Any])

_MODULES = {
    "clicking": ("clicking",),
    "documents": ("json_schema",),
    "grounding": ("box_match", "giou", "iou"),
    "judge": ("judge",),
    "maths": ("math",),
    "numeric": ("chart_relaxed", "count", "numeric"),
    "reward_model": ("reward_model",),
    "shaping": ("format", "length", "repetition_penalty", "soft_overlong"),
    "temporal": ("temporal_iou",),
    "text": ("anls", "choice", "contains", "edit_similarity", "exact_match"),
}
BUILTINS = {
    name: f"mm_grpo.rewards.builtins.{module}" for module, names in _MODULES.items() for name in names
}
"""Module of each built-in reward, by the reward's name."""

_REGISTRY: dict[str, RewardSpec] = {}


@overload
def reward(name: F) -> F: ...


@overload
def reward(
    name: str | None = None, *, weight: float = 1.0, needs: Sequence[str] = (), **options: Any
) -> Callable[[F], F]: ...


def reward(name: Any = None, *, weight: float = 1.0, needs: Sequence[str] = (), **options: Any) -> Any:
    """Register a plain function as a reward and return it unchanged.

    `@reward`, `@reward("name")` and `@reward("name", weight=0.5, needs=("box",))` are all legal;
    without a name the function's own is used. `options` are the fields of `RewardOptions` in `options.py`.
    Raise RewardError if another function has the name. The same function (same module or file, same qualified name) may
    register again, as when a notebook cell runs twice.
    """
    if callable(name):
        return _register(name, None, 1.0, (), {})
    return lambda fn: _register(fn, name, weight, needs, options)


def _register(fn: F, name: str | None, weight: float, needs: Sequence[str], options: Mapping[str, Any]) -> F:
    builtin = innermost(fn).__module__ in BUILTINS.values()
    source = "built-in" if builtin else "registered"
    spec = make_spec(fn, name=name, weight=weight, needs=needs, source=source, options=options)
    present = _REGISTRY.get(spec.name)
    if present is None and spec.name in BUILTINS and not builtin:
        present = _load_builtin(spec.name)
    if present is not None and not _same_function(present.fn, fn):
        raise RewardError(
            f"reward {spec.name!r} is already registered by {place_of(present.fn)}, so {place_of(fn)} cannot take the "
            "name; give one of them another"
        )
    _REGISTRY[spec.name] = spec
    return fn


def get(name: str) -> RewardSpec:
    """Return the registered or built-in reward of that name. Raise RewardError with the nearest name otherwise."""
    if name in _REGISTRY:
        return _REGISTRY[name]
    if name in BUILTINS:
        return _load_builtin(name)
    raise RewardError(unknown(name, names()))


def names() -> list[str]:
    """Return the names of all built-in and registered rewards, sorted."""
    return sorted({*BUILTINS, *_REGISTRY})


def registered_as(fn: Callable[..., Any]) -> RewardSpec | None:
    """Return the spec under which exactly this function object was registered, if it was."""
    return next((spec for spec in _REGISTRY.values() if spec.fn is fn), None)


def unknown(name: str, rewards: Iterable[str]) -> str:
    """Return the message for a name that is none of the rewards."""
    rewards = sorted(rewards)
    hint = f"the nearest here is {REWARDS[name]}; " if name in REWARDS else did_you_mean(name, rewards)
    return (
        f"rewards: unknown reward {name!r}; {hint}known names: {', '.join(rewards)}. A reward may "
        f"also be path/to/file.py:function, package.module:function or an entry point in the group mm_grpo.rewards"
    )


def _load_builtin(name: str) -> RewardSpec:
    importlib.import_module(BUILTINS[name])
    return _REGISTRY[name]


def _same_function(first: Callable[..., Any], second: Callable[..., Any]) -> bool:
    first, second = innermost(first), innermost(second)
    if first is second:
        return True
    if getattr(first, "__qualname__", None) != getattr(second, "__qualname__", ""):
        return False
    files = [os.path.realpath(code.co_filename) for fn in (first, second) if (code := code_of(fn))]
    same_file = len(files) == 2 and files[0] == files[1] and os.path.exists(files[0])
    return first.__module__ == second.__module__ or same_file
