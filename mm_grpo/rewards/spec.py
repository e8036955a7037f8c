"""`RewardSpec`, which `make_spec` reads from a function's parameters.

Not here: options (`options.py`), rewards by name (`registry.py`) and config entries (`resolve.py`).
"""

from __future__ import annotations

import dis
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

# Arguments that we supply whatever the dataset holds; every other parameter is a column or an option.
_ARGUMENTS = frozenset(("completion_ids", "images", "videos", "trainer_state", "log_extra", "log_metric"))
COMPLETION_ARGUMENTS = _ARGUMENTS | {"completion", "prompt", "sample"}
BATCH_ARGUMENTS = _ARGUMENTS | {"completions", "prompts", "samples"}
# Supplied in runs with tools; a column of the same name has precedence.
TURN_ARGUMENTS = frozenset(("turns", "environment", "environments", "environment_reward"))
_OF_KIND = {"completion": TURN_ARGUMENTS - {"environments"}, "batch": TURN_ARGUMENTS - {"environment"}}


@dataclass(frozen=True)
class RewardSpec:
    """Reward that is ready to be called."""

    name: str
    fn: Callable[..., Any]
    weight: float
    needs: tuple[str, ...]
    """Columns without which the reward does not apply: a row without one gets None, and `fn` is not called for it."""
    kind: Kind
    """"completion" (takes `completion`, one call each) or "batch" (takes `completions`, one call per step)."""
    is_async: bool
    source: str
    required: tuple[str, ...] = ()
    """Parameters without a default, filled from columns."""
    optional: tuple[str, ...] = ()
    """Parameters with a default, filled from columns that exist."""
    config_only: tuple[str, ...] = ()
    """Parameters that a config may bind and a column never fills: keyword-only ones with a default of a function of
    one completion, and whatever a partial sets."""
    takes_kwargs: bool = False
    bound: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that the config or a partial sets."""
    options: RewardOptions = field(default_factory=RewardOptions)
    address: str | None = None
    """Where a worker process finds the function (`resolve.address_of`)."""
    made_with: Mapping[str, Any] = field(default_factory=dict)
    """Constructor's arguments of a class that the entry named."""

    @property
    def on_loop(self) -> bool:
        """True if its calls run concurrently on an event loop: it is async, or in worker processes."""
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
        """True if a batch function gets texts although prompts are messages: by its options, or as ms-swift's ORM."""
        if self.options.completions is not None:
            return self.options.completions == "text"
        return any(base.__name__ in ("ORM", "AsyncORM") for base in type(innermost(self.fn)).__mro__)

    def applies_to(self, columns: Mapping[str, Any]) -> bool:
        """Return True if `when` selects a row with these columns, and no column of `needs` is missing."""
        needed = (column for column in self.needs if column not in self.bound)
        return self.options.is_for(columns) and all(columns.get(column) is not None for column in needed)

    @property
    def supplied(self) -> frozenset[str]:
        """Arguments that we supply to this kind of function."""
        return _OF_KIND[self.kind] | (COMPLETION_ARGUMENTS if self.kind == "completion" else BATCH_ARGUMENTS)

    @property
    def settable(self) -> tuple[str, ...]:
        """Parameters that a config entry may bind."""
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
    """Read a function's parameters into a `RewardSpec`. Raise RewardError if it cannot be a reward."""
    name = function_name(fn) if name is None else name
    check_name(name, fn)
    if isinstance(needs, str):
        raise RewardError(f"reward {name!r}: needs is a tuple of column names, not the string {needs!r}")
    parameters = list(inspect.signature(fn).parameters.values())
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    kwargs = [p.name for p in parameters if p.kind is p.VAR_KEYWORD]
    kind = _kind(name, [p.name for p in by_name], bool(kwargs))
    bound = dict(fn.keywords) if isinstance(fn, functools.partial) else {}
    keyword_only = set(bound)
    if kind == "completion":  # a partial makes all parameters behind its own keyword-only
        inner = inspect.signature(innermost(fn)).parameters.values()
        keyword_only |= {p.name for p in inner if p.kind is p.KEYWORD_ONLY}
    config_only = [
        p.name
        for p in by_name
        if p.name in keyword_only and p.default is not p.empty and p.name not in COMPLETION_ARGUMENTS
    ]
    reward_options = read_options(name, options or {})
    reward_options.check_kind(name, is_async=is_async(fn), kind=kind)
    return RewardSpec(
        name=name,
        fn=fn,
        weight=check_weight(name, weight),
        needs=tuple(needs),
        kind=kind,
        is_async=is_async(fn),
        source=source,
        required=tuple(p.name for p in by_name if p.default is p.empty),
        optional=tuple(p.name for p in by_name if p.default is not p.empty and p.name not in config_only),
        config_only=tuple(config_only),
        takes_kwargs=any(_reads(fn, name) for name in kwargs),
        bound=bound,
        options=reward_options,
    )


def check_weight(name: str, weight: Any) -> float:
    """Return `weight` as a float. Raise RewardError unless it is a finite number."""
    if not is_number(weight):
        raise RewardError(f"reward {name!r}: weight is {weight!r}; it must be a finite number")
    return float(weight)


def check_name(name: Any, fn: Callable[..., Any] | None = None) -> None:
    """Raise RewardError unless `name` can stand in a config and in a metric's key."""
    if not isinstance(name, str) or not re.fullmatch(r"[^\W\d][\w.-]*", name):
        owner = f" for {place_of(fn)}" if fn is not None else ""
        raise RewardError(
            f"reward name {name!r}{owner} is not legal: letters, digits, '_', '-' and '.', starting with a letter; "
            f"give one by `as`"
        )


def function_name(fn: Callable[..., Any]) -> str:
    """Return a function's name, the class's name for a callable object, `lambda` for a lambda."""
    inner = innermost(fn)
    return str(getattr(inner, "__name__", None) or type(inner).__name__).replace("<lambda>", "lambda")


def innermost(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function behind partials, decorators that use functools.wraps, and bound methods."""
    while True:
        inner = getattr(fn, "__wrapped__", None) or getattr(fn, "__func__", None)
        if isinstance(fn, functools.partial):
            inner = fn.func
        if inner is None:
            return fn
        fn = inner


def code_of(fn: Callable[..., Any]) -> CodeType | None:
    """Return the compiled code of a function, or of the `__call__` of an object."""
    inner = innermost(fn)
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


def _reads(fn: Callable[..., Any], name: str) -> bool:
    """Return True if the body of a function reads its parameter; published rewards often have idle **kwargs."""
    code = code_of(fn)
    if code is None or hasattr(fn, "__wrapped__") or "locals" in code.co_names:
        return True  # a decorator's wrapper, say, may use what the function in it does not
    return any(name in re.split(r"\W+", step.argrepr) for step in dis.get_instructions(code))


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
        verl = "; verl's solution_str (EasyR1's predict, response) is completion here, and its ground_truth"
        theirs = re.compile("solution_str|predict|reward_input|.*(response|output)|quer")
        raise RewardError(
            f"reward {name!r}: needs either a parameter completion (a text) or completions (a list of all), and has"
            f" ({', '.join(parameters)}){f'{verl} the column answer' * any(map(theirs.match, parameters))}"
        )
    return "completion" if per_completion else "batch"


def is_async(fn: Callable[..., Any]) -> bool:
    inner = innermost(fn)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None))  # noqa: B004


def place_of(fn: Callable[..., Any]) -> str:
    inner = innermost(fn)
    qualname = getattr(inner, "__qualname__", type(inner).__qualname__)
    return f"{getattr(inner, '__module__', None)}.{qualname}"
