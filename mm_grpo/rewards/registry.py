"""Rewards by name: the `@reward` decorator, `get` and `names`, and the table of built-ins.

What a reward is lies in `spec.py`, what a config entry means in `resolve.py`. To add a built-in, write one
file in `builtins/` and one line in `BUILTINS`; it is imported when it is first looked up.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, overload

from mm_grpo.errors import RewardError, did_you_mean
from mm_grpo.rewards.spec import RewardSpec, code_of, innermost, make_spec, place_of

F = TypeVar("F", bound=Callable[..., Any])

BUILTINS = {
    "anls": "mm_grpo.rewards.builtins.text",
    "box_match": "mm_grpo.rewards.builtins.grounding",
    "chart_relaxed": "mm_grpo.rewards.builtins.numeric",
    "choice": "mm_grpo.rewards.builtins.text",
    "clicking": "mm_grpo.rewards.builtins.clicking",
    "contains": "mm_grpo.rewards.builtins.text",
    "cosine_length": "mm_grpo.rewards.builtins.shaping",
    "count": "mm_grpo.rewards.builtins.numeric",
    "edit_similarity": "mm_grpo.rewards.builtins.text",
    "exact_match": "mm_grpo.rewards.builtins.text",
    "format": "mm_grpo.rewards.builtins.shaping",
    "giou": "mm_grpo.rewards.builtins.grounding",
    "iou": "mm_grpo.rewards.builtins.grounding",
    "json_schema": "mm_grpo.rewards.builtins.documents",
    "judge": "mm_grpo.rewards.builtins.judge",
    "language": "mm_grpo.rewards.builtins.shaping",
    "length": "mm_grpo.rewards.builtins.shaping",
    "mask_iou": "mm_grpo.rewards.builtins.masks",
    "math": "mm_grpo.rewards.builtins.maths",
    "numeric": "mm_grpo.rewards.builtins.numeric",
    "ordering": "mm_grpo.rewards.builtins.ordering",
    "point_in_box": "mm_grpo.rewards.builtins.grounding",
    "repetition_penalty": "mm_grpo.rewards.builtins.shaping",
    "reward_model": "mm_grpo.rewards.builtins.reward_model",
    "soft_overlong": "mm_grpo.rewards.builtins.shaping",
    "table_f1": "mm_grpo.rewards.builtins.documents",
    "temporal_iou": "mm_grpo.rewards.builtins.temporal",
}

_REGISTRY: dict[str, RewardSpec] = {}


@overload
def reward(name: F) -> F: ...


@overload
def reward(
    name: str | None = None,
    *,
    weight: float = 1.0,
    needs: Sequence[str] = (),
    **options: Any,
) -> Callable[[F], F]: ...


def reward(name: Any = None, *, weight: float = 1.0, needs: Sequence[str] = (), **options: Any) -> Any:
    """Register a plain function as a reward and return it unchanged.

    `@reward`, `@reward("name")` and `@reward("name", weight=0.5, needs=("box",))` are all legal;
    without a name the function's own is used. `options` are the fields of `RewardOptions` in `options.py`.
    Raises RewardError when another function holds the name; the same function (same module or file, same qualified
    name) may register again, as when a notebook cell runs twice.
    """
    if callable(name):
        return _register(name, None, 1.0, (), {})
    return lambda fn: _register(fn, name, weight, needs, options)


def _register(fn: F, name: str | None, weight: float, needs: Sequence[str], options: Mapping[str, Any]) -> F:
    builtin = innermost(fn).__module__ in BUILTINS.values()
    source = "built-in" if builtin else "registered"
    spec = make_spec(fn, name=name, weight=weight, needs=needs, source=source, options=options)
    held = _REGISTRY.get(spec.name)
    if held is None and spec.name in BUILTINS and not builtin:
        held = _load_builtin(spec.name)
    if held is not None and not _same_function(held.fn, fn):
        raise RewardError(
            f"reward {spec.name!r} is already registered by {place_of(held.fn)}, so {place_of(fn)} cannot take "
            f'the name; give one of them another: @reward("other_name")'
        )
    _REGISTRY[spec.name] = spec
    return fn


def get(name: str) -> RewardSpec:
    """The registered or built-in reward of that name; RewardError with the nearest name otherwise."""
    if name in _REGISTRY:
        return _REGISTRY[name]
    if name in BUILTINS:
        return _load_builtin(name)
    raise RewardError(unknown(name, names()))


def names() -> list[str]:
    """The names of all built-in and registered rewards, sorted."""
    return sorted({*BUILTINS, *_REGISTRY})


def registered_as(fn: Callable[..., Any]) -> RewardSpec | None:
    """The spec under which exactly this function object was registered, if it was."""
    return next((spec for spec in _REGISTRY.values() if spec.fn is fn), None)


def unknown(name: str, known: Iterable[str]) -> str:
    """The message for a name that is no reward's."""
    known = sorted(known)
    return (
        f"rewards: unknown reward {name!r}; {did_you_mean(name, known)}known names: "
        f"{', '.join(known)}. A reward may also be "
        f"path/to/file.py:function, package.module:function or an entry point in the group mm_grpo.rewards"
    )


def _load_builtin(name: str) -> RewardSpec:
    importlib.import_module(BUILTINS[name])
    return _REGISTRY[name]


def _same_function(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    one, other = innermost(one), innermost(other)
    qualnames = [getattr(fn, "__qualname__", None) for fn in (one, other)]
    if one is other:
        return True
    if qualnames[0] is None or qualnames[0] != qualnames[1]:
        return False
    files = [os.path.realpath(code.co_filename) for fn in (one, other) if (code := code_of(fn))]
    same_file = len(files) == 2 and files[0] == files[1] and os.path.exists(files[0])
    return one.__module__ == other.__module__ or same_file
