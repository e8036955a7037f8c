"""What a reward is: `RewardSpec`, made from a function's parameters by `make_spec`.

Conditions are options (`only_if` and `when` in `options.py`). Not here: rewards by name (`registry.py`) and config
entries (`resolve.py`).
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Literal

from mm_grpo.errors import RewardError
from mm_grpo.numbers import is_number
from mm_grpo.rewards.options import RewardOptions, read_options

Kind = Literal["completion", "batch"]

# What we supply by name, whatever the dataset holds; every other parameter is a column or an option.
_ARGUMENTS = frozenset(("completion_ids", "images", "trainer_state", "log_extra", "log_metric"))
COMPLETION_ARGUMENTS = _ARGUMENTS | {"completion", "prompt", "sample"}
BATCH_ARGUMENTS = _ARGUMENTS | {"completions", "prompts", "samples"}
# Of runs with tools alone; a column of the same name goes before.
TURN_ARGUMENTS = frozenset(("turns", "environment", "environments", "environment_reward"))
_OF_KIND = {"completion": TURN_ARGUMENTS - {"environments"}, "batch": TURN_ARGUMENTS - {"environment"}}


@dataclass(frozen=True)
class RewardSpec:
    """One reward, ready to be called.

    `kind` is "completion" when `fn` takes `completion` (called once per completion) and "batch" when
    it takes `completions` (called once per step). `needs` are columns without which the reward does
    not apply: a row where one is missing or None gets None and `fn` is not called for it. `required`
    parameters have no default, `optional` ones do; both are filled from columns. `config_only` are the
    keyword-only parameters with a default of a per-completion function, and whatever a partial sets: a
    config may bind them, a column never does. `bound` holds what the config or the partial sets, `options`
    how the reward is run. `address` is where a worker process finds the function (`address_of` in
    `resolve.py`); of an object that a class named in an entry made, `made_with` are the arguments that it was given.
    """

    name: str
    fn: Callable[..., Any]
    weight: float
    needs: tuple[str, ...]
    kind: Kind
    is_async: bool
    source: str
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    config_only: tuple[str, ...] = ()
    takes_kwargs: bool = False
    bound: Mapping[str, Any] = field(default_factory=dict)
    options: RewardOptions = field(default_factory=RewardOptions)
    address: str | None = None
    made_with: Mapping[str, Any] = field(default_factory=dict)

    @property
    def on_loop(self) -> bool:
        """Whether its calls are made on an event loop, side by side: it is async, or in worker processes."""
        return self.is_async or self.options.isolated

    @property
    def shared_settings(self) -> frozenset[str]:
        """Settings that calls get without a copy: what a partial holds, and objects, such as a large array.

        Lists and mappings are copied, because two entries of the config may share one.
        """
        partial = self.fn.keywords if isinstance(self.fn, functools.partial) else {}
        entry = {name for name, value in self.bound.items() if isinstance(value, list | Mapping)}
        return frozenset({*partial, *self.bound.keys() - entry})

    @property
    def takes_texts(self) -> bool:
        """Whether a batch function gets texts even where prompts are messages: by its options, or where its class
        derives from one named ORM, as ms-swift's do."""
        if self.options.completions is not None:
            return self.options.completions == "text"
        return any(base.__name__ in ("ORM", "AsyncORM") for base in type(innermost(self.fn)).__mro__)

    def applies_to(self, columns: Mapping[str, Any]) -> bool:
        """Whether it applies to a row with these columns: `when` names it, and no column that it needs is missing."""
        needed = (column for column in self.needs if column not in self.bound)
        return self.options.is_for(columns) and all(columns.get(column) is not None for column in needed)

    @property
    def supplied(self) -> frozenset[str]:
        """The argument names that are ours for this kind of function."""
        return _OF_KIND[self.kind] | (COMPLETION_ARGUMENTS if self.kind == "completion" else BATCH_ARGUMENTS)

    @property
    def settable(self) -> tuple[str, ...]:
        """The parameters that a config entry may bind."""
        return tuple(p for p in self.required + self.optional + self.config_only if p not in self.supplied)


def make_spec(
    fn: Callable[..., Any],
    *,
    name: str | None = None,
    weight: float = 1.0,
    needs: Sequence[str] = (),
    source: str = "callable",
    options: Mapping[str, Any] | None = None,
) -> RewardSpec:
    """Read a function's parameters into a `RewardSpec`; RewardError when it cannot be a reward."""
    name = function_name(fn) if name is None else name
    check_name(name, fn)
    if isinstance(needs, str):
        raise RewardError(f"reward {name!r}: needs is a tuple of column names, not the string {needs!r}")
    parameters = list(inspect.signature(fn).parameters.values())
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_kwargs = any(p.kind is p.VAR_KEYWORD for p in parameters)
    kind = _kind(name, [p.name for p in named], takes_kwargs)
    bound = dict(fn.keywords) if isinstance(fn, functools.partial) else {}
    keyword_only = set(bound)
    if kind == "completion":  # a partial makes all parameters behind its own keyword-only
        inner = inspect.signature(innermost(fn)).parameters.values()
        keyword_only |= {p.name for p in inner if p.kind is p.KEYWORD_ONLY}
    config_only = [
        p.name
        for p in named
        if p.name in keyword_only and p.default is not p.empty and p.name not in COMPLETION_ARGUMENTS
    ]
    how = read_options(name, options or {})
    how.check_kind(name, is_async=is_async(fn), kind=kind)
    return RewardSpec(
        name=name,
        fn=fn,
        weight=check_weight(name, weight),
        needs=tuple(needs),
        kind=kind,
        is_async=is_async(fn),
        source=source,
        required=tuple(p.name for p in named if p.default is p.empty),
        optional=tuple(p.name for p in named if p.default is not p.empty and p.name not in config_only),
        config_only=tuple(config_only),
        takes_kwargs=takes_kwargs,
        bound=bound,
        options=how,
    )


def check_weight(name: str, weight: Any) -> float:
    """`weight` as a float; RewardError unless it is a finite number."""
    if not is_number(weight):
        raise RewardError(f"reward {name!r}: weight is {weight!r}; it must be a finite number")
    return float(weight)


def check_name(name: Any, fn: Callable[..., Any] | None = None) -> None:
    """RewardError unless `name` can stand in a config and in a metric's key."""
    if not isinstance(name, str) or not re.fullmatch(r"[^\W\d][\w.-]*", name):
        what = f" for {place_of(fn)}" if fn is not None else ""
        raise RewardError(
            f"reward name {name!r}{what} is not legal: letters, digits, '_', '-' and '.', starting with a letter; "
            f"give one by `as`"
        )


def function_name(fn: Callable[..., Any]) -> str:
    """A function's own name; that of the class for a callable object, and `lambda` for a lambda."""
    inner = innermost(fn)
    return str(getattr(inner, "__name__", None) or type(inner).__name__).replace("<lambda>", "lambda")


def innermost(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function behind partials, decorators that use functools.wraps, and bound methods."""
    while True:
        inner = getattr(fn, "__wrapped__", None) or getattr(fn, "__func__", None)
        if isinstance(fn, functools.partial):
            inner = fn.func
        if inner is None:
            return fn
        fn = inner


def code_of(fn: Callable[..., Any]) -> CodeType | None:
    """The compiled code behind a function, or behind the `__call__` of an object."""
    inner = innermost(fn)
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


def _kind(name: str, parameters: Sequence[str], takes_kwargs: bool) -> Kind:
    per_completion, per_batch = "completion" in parameters, "completions" in parameters
    # TRL's functions that look at nothing but the tokens or the environments leave the completions in their **kwargs.
    if (
        not per_completion
        and takes_kwargs
        and not {"completion_ids", "prompts", "environments"}.isdisjoint(parameters)
    ):
        return "batch"
    if per_completion == per_batch:
        fault = "both parameters" if per_batch else "neither parameter"
        verl = "; verl's solution_str is completion here, and its ground_truth the column answer"
        raise RewardError(
            f"reward {name!r} has {fault}, completion (a text) and completions (a list, for all at once), and needs one"
            f" of them; it has ({', '.join(parameters)}){verl if 'solution_str' in parameters else ''}"
        )
    return "completion" if per_completion else "batch"


def is_async(fn: Callable[..., Any]) -> bool:
    inner = innermost(fn)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None))  # noqa: B004


def place_of(fn: Callable[..., Any]) -> str:
    inner = innermost(fn)
    qualname = getattr(inner, "__qualname__", type(inner).__qualname__)
    return f"{getattr(inner, '__module__', None)}.{qualname}"
