"""Which rewards exist: one dict, one decorator, and what a function's parameters say about it.

Here: `RewardSpec` (a reward as the scorer calls it), `reward` (the decorator), `get` and `names`, and
`make_spec`, which reads a function's parameters. Not here: what a config entry means
(`resolve.py`) and how a function is called (`calls.py`). To add a built-in, write one file in
`builtins/` and one line in `BUILTINS`; it is imported when it is first looked up.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

from mm_grpo.errors import RewardError
from mm_grpo.rewards.policy import KEYS as POLICY_KEYS
from mm_grpo.rewards.policy import Policy, PolicySettings, check_fit
from mm_grpo.rewards.policy import read as read_policy

if TYPE_CHECKING:
    from mm_grpo.rewards.compose import RewardSum

Kind = Literal["completion", "batch"]
F = TypeVar("F", bound=Callable[..., Any])

BUILTINS = {
    "anls": "mm_grpo.rewards.builtins.anls",
    "box_match": "mm_grpo.rewards.builtins.box_match",
    "chart_relaxed": "mm_grpo.rewards.builtins.chart_relaxed",
    "choice": "mm_grpo.rewards.builtins.choice",
    "contains": "mm_grpo.rewards.builtins.contains",
    "cosine_length": "mm_grpo.rewards.builtins.cosine_length",
    "count": "mm_grpo.rewards.builtins.count",
    "edit_similarity": "mm_grpo.rewards.builtins.edit_similarity",
    "exact_match": "mm_grpo.rewards.builtins.exact_match",
    "format": "mm_grpo.rewards.builtins.format",
    "giou": "mm_grpo.rewards.builtins.giou",
    "iou": "mm_grpo.rewards.builtins.iou",
    "json_schema": "mm_grpo.rewards.builtins.json_schema",
    "judge": "mm_grpo.rewards.builtins.judge",
    "language": "mm_grpo.rewards.builtins.language",
    "length": "mm_grpo.rewards.builtins.length",
    "mask_iou": "mm_grpo.rewards.builtins.mask_iou",
    "math": "mm_grpo.rewards.builtins.maths",
    "numeric": "mm_grpo.rewards.builtins.numeric",
    "point_in_box": "mm_grpo.rewards.builtins.point_in_box",
    "repetition_penalty": "mm_grpo.rewards.builtins.repetition_penalty",
    "reward_model": "mm_grpo.rewards.builtins.reward_model",
    "soft_overlong": "mm_grpo.rewards.builtins.soft_overlong",
    "table_f1": "mm_grpo.rewards.builtins.table_f1",
}

# What we supply by name, whatever the dataset holds; every other parameter is a column or an option.
COMPLETION_ARGUMENTS = frozenset(
    ("completion", "completion_ids", "prompt", "images", "sample", "trainer_state", "log_extra", "log_metric")
)
BATCH_ARGUMENTS = frozenset(
    (
        "completions",
        "completion_ids",
        "prompts",
        "images",
        "samples",
        "trainer_state",
        "log_extra",
        "log_metric",
    )
)


@dataclass(frozen=True)
class RewardSpec:
    """One reward, ready to be called.

    `kind` is "completion" when `fn` takes `completion` (called once per completion) and "batch" when
    it takes `completions` (called once per step). `needs` are columns without which the reward does
    not apply: a row where one is missing or None gets None and `fn` is not called for it. `required`
    parameters have no default, `optional` ones do; both are filled from columns. `options` are the
    keyword-only parameters with a default of a per-completion function, and whatever a partial sets: a
    config may bind them, a column never does. `bound` holds what the config or the partial sets, `policy`
    how the reward is run. `address` is where a worker process finds the function (see `places.py`); of an
    object that an entry had a class make, `constructor` are the arguments that the class takes and
    `made_with` those that it was given. `takes_texts` says that a batch function gets completions as
    texts even where prompts are messages.
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
    options: tuple[str, ...] = ()
    takes_kwargs: bool = False
    bound: Mapping[str, Any] = field(default_factory=dict)
    policy: Policy = field(default_factory=Policy)
    address: str | None = None
    made_with: Mapping[str, Any] = field(default_factory=dict)
    constructor: tuple[str, ...] = ()

    @property
    def on_loop(self) -> bool:
        """Whether it runs on the event loop of the trainer's process."""
        return self.is_async and not self.policy.isolated

    @property
    def takes_texts(self) -> bool:
        """Whether a batch function gets texts: the policy says so, or the function is of ms-swift's kind."""
        if self.policy.completions is not None:
            return self.policy.completions == "text"
        return any(base.__name__ in ("ORM", "AsyncORM") for base in type(innermost(self.fn)).__mro__)

    def __mul__(self, factor: float) -> RewardSpec:
        """The same reward with its weight times `factor`. For sums of rewards see `compose.py`."""
        return replace(self, weight=self.weight * check_weight(self.name, factor))

    __rmul__ = __mul__

    def __neg__(self) -> RewardSpec:
        return self * -1

    def __add__(self, other: RewardSpec | RewardSum | Literal[0]) -> RewardSum:
        from mm_grpo.rewards.compose import RewardSum

        return RewardSum((self,)) + other

    def __radd__(self, other: Literal[0]) -> RewardSum:  # sum() starts with 0
        return self + other

    def __sub__(self, other: RewardSpec | RewardSum) -> RewardSum:
        return self + -other

    @property
    def supplied(self) -> frozenset[str]:
        """The argument names that are ours for this kind of function."""
        return COMPLETION_ARGUMENTS if self.kind == "completion" else BATCH_ARGUMENTS

    @property
    def settable(self) -> tuple[str, ...]:
        """The parameters that a config entry may bind."""
        return tuple(p for p in self.required + self.optional + self.options if p not in self.supplied)


_REGISTRY: dict[str, RewardSpec] = {}


@overload
def reward(name: F) -> F: ...


@overload
def reward(
    name: str | None = None,
    *,
    weight: float = 1.0,
    needs: Sequence[str] = (),
    **policy: Unpack[PolicySettings],
) -> Callable[[F], F]: ...


def reward(
    name: Any = None, *, weight: float = 1.0, needs: Sequence[str] = (), **policy: Unpack[PolicySettings]
) -> Any:
    """Register a plain function as a reward and return it unchanged.

    `@reward`, `@reward("name")` and `@reward("name", weight=0.5, needs=("box",))` are all legal;
    without a name the function's own is used. `policy` says how it is run: isolated, timeout, retries,
    max_concurrency, memory_limit, on_error, on_timeout, only_if, clip and completions, as `Policy` in
    `policy.py` describes them. Raises RewardError when another function holds the name; the same function
    (same module or file, same qualified name) may register again, as when a notebook cell runs twice.
    """
    if callable(name):
        return _register(name, None, 1.0, (), {})
    return lambda fn: _register(fn, name, weight, needs, policy)


def _register(fn: F, name: str | None, weight: float, needs: Sequence[str], policy: Mapping[str, Any]) -> F:
    builtin = innermost(fn).__module__ in BUILTINS.values()
    source = "built-in" if builtin else "registered"
    spec = make_spec(fn, name=name, weight=weight, needs=needs, source=source, policy=policy)
    held = _REGISTRY.get(spec.name)
    if held is None and spec.name in BUILTINS and not builtin:
        held = _load_builtin(spec.name)
    if held is not None and not _same_function(held.fn, fn):
        raise RewardError(
            f"reward {spec.name!r} is already registered by {_place(held.fn)}, so {_place(fn)} cannot take "
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
    """The message for a reward name that nobody holds."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return (
        f"rewards: unknown reward {name!r}; {hint}known names: {', '.join(known)}. A reward may also be "
        f"path/to/file.py:function, package.module:function or an entry point in the group mm_grpo.rewards"
    )


def make_spec(
    fn: Callable[..., Any],
    *,
    name: str | None = None,
    weight: float = 1.0,
    needs: Sequence[str] = (),
    source: str = "callable",
    policy: Mapping[str, Any] | None = None,
) -> RewardSpec:
    """Read a function's parameters into a `RewardSpec`; RewardError says what it cannot be."""
    name = function_name(fn) if name is None else name
    check_name(name, fn)
    if isinstance(needs, str):
        raise RewardError(f"reward {name!r}: needs is a tuple of column names, not the string {needs!r}")
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"reward {name!r}: {fn!r} is not a function whose parameters can be read"
        ) from error
    if positional := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]:
        raise RewardError(
            f"reward {name!r}: arguments are passed by name, so {', '.join(positional)} cannot be "
            f"positional-only; remove the '/' from its parameters"
        )
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_kwargs = any(p.kind is p.VAR_KEYWORD for p in parameters)
    kind = _kind(name, [p.name for p in named], takes_kwargs)
    bound = dict(fn.keywords) if isinstance(fn, functools.partial) else {}
    keyword_only = set(bound)
    if kind == "completion":  # asked of the inner function: a partial makes all that follows keyword-only
        inner = inspect.signature(innermost(fn)).parameters.values()
        keyword_only |= {p.name for p in inner if p.kind is p.KEYWORD_ONLY}
    options = [
        p.name
        for p in named
        if p.name in keyword_only and p.default is not p.empty and p.name not in COMPLETION_ARGUMENTS
    ]
    how = _read_policy(name, policy or {})
    check_fit(name, how, is_async=is_async(fn), kind=kind)
    return RewardSpec(
        name=name,
        fn=fn,
        weight=check_weight(name, weight),
        needs=tuple(needs),
        kind=kind,
        is_async=is_async(fn),
        source=source,
        required=tuple(p.name for p in named if p.default is p.empty),
        optional=tuple(p.name for p in named if p.default is not p.empty and p.name not in options),
        options=tuple(options),
        takes_kwargs=takes_kwargs,
        bound=bound,
        policy=how,
    )


def check_weight(name: str, weight: Any) -> float:
    """`weight` as a float; RewardError unless it is a finite number."""
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise RewardError(
            f"reward {name!r}: weight is {weight!r}; it must be a finite number (1.0 is the default, 0 logs "
            f"the reward without training on it)"
        )
    return float(weight)


def check_name(name: Any, fn: Callable[..., Any] | None = None) -> None:
    """RewardError unless `name` can stand in a config and in a metric's key."""
    if not isinstance(name, str) or not re.fullmatch(r"[^\W\d][\w.-]*", name):
        what = f" for {_place(fn)}" if fn is not None else ""
        raise RewardError(
            f"reward name {name!r}{what} is not legal: letters, digits, '_', '-' and '.', starting with a "
            f'letter. Name it with @reward("name"), or with `as` in its entry: {{name: ..., as: my_name}}'
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


def _load_builtin(name: str) -> RewardSpec:
    importlib.import_module(BUILTINS[name])
    return _REGISTRY[name]


def _read_policy(name: str, said: Mapping[str, Any]) -> Policy:
    if strange := [key for key in said if key not in POLICY_KEYS]:
        raise RewardError(
            f"reward {name!r}: @reward has no setting {strange[0]!r}; legal are name, weight, needs, "
            f"{', '.join(POLICY_KEYS)}"
        )
    return read_policy(name, said)


def _kind(name: str, parameters: Sequence[str], takes_kwargs: bool) -> Kind:
    per_completion, per_batch = "completion" in parameters, "completions" in parameters
    # TRL's functions that look at nothing but the tokens leave the completions in their **kwargs.
    if not per_completion and takes_kwargs and not {"completion_ids", "prompts"}.isdisjoint(parameters):
        return "batch"
    if per_completion == per_batch:
        fault = "takes both `completion` and `completions`" if per_batch else "takes neither"
        raise RewardError(
            f"reward {name!r} {fault}; its parameters are ({', '.join(parameters)}). A reward takes "
            f"`completion` (a text, called per completion) or `completions` (a list, called per batch)"
        )
    return "completion" if per_completion else "batch"


def is_async(fn: Callable[..., Any]) -> bool:
    inner = innermost(fn)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None))  # noqa: B004


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


def _place(fn: Callable[..., Any]) -> str:
    inner = innermost(fn)
    qualname = getattr(inner, "__qualname__", type(inner).__qualname__)
    return f"{getattr(inner, '__module__', None)}.{qualname}"
