"""The tools of a run: where they come from, what the model is told of them, and the host that calls them.

The rules for an environment's class are TRL's `environment_factory`: no arguments to make one, `reset` takes the row's
columns and may return an observation that is put at the end of the prompt, every other public method is a tool, and
`get_reward`, where there is one, scores the finished conversation. Ours besides: `reset` may take only the columns that
it names, a method or function may return images, `close` is called at the end, and a conversation ends when the
environment's attribute `done` is true.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from mm_grpo.environments.host import Episode, Host, LocalHost
from mm_grpo.environments.observation import described
from mm_grpo.environments.session import methods
from mm_grpo.environments.workers import WorkerHost, address_of
from mm_grpo.errors import ConfigError, ToolError, did_you_mean
from mm_grpo.import_path import load_named
from mm_grpo.worker_processes import default_size

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig
    from mm_grpo.types import Sample

BUILTINS = {"zoom": "Zoom", "rotate": "Rotate", "grid_world": "GridWorld"}
"""Environments of this package by the name that `rollout.environment` gives them."""


class Toolbox:
    """The plain functions and the environment of a run, and the schemas of all their tools for the chat template.

    `host` calls them; `place` chooses where. ConfigError for a tool that the model cannot be told of: it needs type
    hints, and a docstring with its arguments.
    """

    def __init__(
        self, config: GRPOConfig, tools: Sequence[Callable[..., Any]], factory: Callable[[], Any] | None
    ):
        for tool in tools:
            if not callable(tool) or not hasattr(tool, "__name__"):
                raise ConfigError(
                    f"rollout.tools: {tool!r} is no function with a name, by which the model could call it; give a "
                    "plain function (def)"
                )
        self.config, self.factory = config, factory
        self.functions = {function.__name__: function for function in tools}
        self._host: Host | None = None
        self._first: Any = _made(factory) if factory is not None else None
        found = _methods(self._first) if factory is not None else {}
        twice = [tool.__name__ for tool in tools if tool.__name__ in found]
        if len(self.functions) < len(tools) or twice:
            raise ConfigError(
                f"rollout.tools: two tools have one name ({', '.join([*twice, *(t.__name__ for t in tools)])}); rename "
                "one, for the model calls them by it"
            )
        self.schemas = tuple(_schema(tool) for tool in (*self.functions.values(), *found.values()))
        if not self.schemas:
            raise ConfigError(
                "rollout.environment: its class has no public method besides reset, get_reward and close, so there is "
                "nothing that the model could call"
            )

    @property
    def rewards(self) -> list[Callable[..., Any]]:
        """The environment's own reward where its class has `get_reward`, named after the class."""
        if not hasattr(type(self._first), "get_reward"):
            return []

        def own(completion: str, environment_reward: float | None) -> float | None:
            return environment_reward

        own.__name__ = own.__qualname__ = type(self._first).__name__
        return [own]

    @property
    def host(self) -> Host:
        """What calls the tools; chosen by the config alone where `place` was not called."""
        return self._host or self.place()

    def place(self, rewards: Sequence[str] = (), processes: int = 1) -> Host:
        """Choose where tools are called: in worker processes, if other processes can import them, and if no reward
        looks at the environment itself, as those named `rewards` do.

        ConfigError where `rollout.environment_workers` asks for processes that cannot be, and where several
        `processes` train: rewards run in the first, and the environments of the others stay where they are.
        """
        if rewards and processes > 1:
            raise ConfigError(
                f"rewards: reward {rewards[0]!r} asks for the environment itself, and of several processes only the "
                "first one's would be there; give the environment a method get_reward, or train in one process"
            )
        given = self.config.rollout.environment_workers
        what = [*self.functions.values(), *([] if self.factory is None else [self.factory])]
        count = given
        if given is None:
            count = 0 if rewards or any(address_of(one) is None for one in what) else default_size()
        elif given > 0 and rewards:
            raise ConfigError(
                f"rollout.environment_workers = {given}: reward {rewards[0]!r} asks for the environment itself, which "
                "is then in another process; set rollout.environment_workers=0, or give the environment a method "
                "get_reward"
            )
        self.close()
        host = (self.config, self.functions, self.factory, hasattr(type(self._first), "get_reward"))
        self._host = WorkerHost(*host, count) if count else LocalHost(*host)
        return self._host

    def close(self) -> None:
        """Close the environments that are open, and end what calls them; a later call starts anew."""
        if self._host is not None:
            self._host.close()

    def prepare(self, sample: Sample) -> Sample:
        """A row as it is asked about: with the tools, and with what its environment shows first at its end.

        Raises ToolError for an environment that cannot begin.
        """
        sample = replace(sample, tools=self.schemas)
        if self.factory is None:
            return sample
        (episode,) = self.host.open([(sample, self._row(sample))])
        if episode.lost is not None:
            raise ToolError(f"{sample.uid}: reset of the environment: {episode.lost}")
        episode.close()
        shown = episode.opening
        if shown is None or not shown.parts:
            return replace(sample, row=sample)
        *before, last = sample.messages
        content = last["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        parts += [
            {"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in shown.parts
        ]
        return replace(
            sample,
            messages=[*before, {**last, "content": parts}],
            images=(*sample.images, *shown.images),
            row=sample,
        )

    def episode(self, sample: Sample) -> Episode:
        """A new conversation about a row that was prepared. ToolError where it begins in another way than that."""
        return self.episodes([sample])[0]

    def episodes(self, samples: Sequence[Sample]) -> list[Episode]:
        """A new conversation about each of these rows, as `episode`, begun together."""
        before = [sample.row or sample for sample in samples]
        rows = {id(sample): self._row(sample) for sample in before}
        episodes = self.host.open([(sample, rows[id(sample)]) for sample in before])
        for episode, sample in zip(episodes, samples, strict=True):
            if episode.lost is None:
                _check_opening(episode, sample)
        return episodes

    def _row(self, sample: Sample) -> dict[str, Any]:
        return {} if self.factory is None else _row(self._first.reset, sample)


def _check_opening(episode: Episode, sample: Sample) -> None:
    """ToolError where an environment showed something else than when its row was prepared."""
    before = sample.row or sample
    shown = episode.opening.images if episode.opening is not None else ()
    promised = sample.images[len(before.images) :]
    text = episode.opening.text if episode.opening is not None else ""
    same = len(shown) == len(promised) and all(
        a.size == b.size and a.tobytes() == b.tobytes() for a, b in zip(shown, promised, strict=True)
    )
    if not same or (text and text not in _text_of(sample.messages[-1])):
        raise ToolError(
            f"{sample.uid}: reset of the environment showed another beginning than before for the same row; the "
            "completions of a group answer one prompt, so reset must depend on the row alone (seed its random "
            "numbers from a column)"
        )


def toolbox_of(
    config: GRPOConfig, tools: Sequence[Callable[..., Any]] | None, factory: Callable[[], Any] | None
) -> Toolbox | None:
    """The tools that are given in Python, else those of the config; None where there are none."""
    rollout = config.rollout
    if tools is None:
        tools = [load_named(place, "rollout.tools", ConfigError) for place in rollout.tools]
    if factory is None and rollout.environment is not None:
        factory = _class_named(rollout.environment)
    if not tools and factory is None:
        return None
    return Toolbox(config, tools, factory)


def _class_named(name: str) -> Callable[[], Any]:
    """A class of this package, of an entry point in `mm_grpo.environments`, or at an address."""
    if name in BUILTINS:
        found: Callable[[], Any] = getattr(import_module("mm_grpo.environments.builtins"), BUILTINS[name])
        return found
    points = {point.name: point for point in entry_points(group="mm_grpo.environments")}
    if name in points:
        loaded: Callable[[], Any] = points[name].load()
        return loaded
    if ":" not in name:
        known = sorted({*BUILTINS, *points})
        raise ConfigError(
            f"rollout.environment = {name!r}: must be one of {', '.join(known)}, path/to/file.py:Class or "
            f"package.module:Class; {did_you_mean(name, known)}".rstrip("; ")
        )
    at: Callable[[], Any] = load_named(name, "rollout.environment", ConfigError)
    return at


def _made(factory: Callable[[], Any]) -> Any:
    if not callable(factory):
        raise ConfigError(
            f"rollout.environment: {factory!r} cannot be called without arguments to make an environment; name a class"
        )
    try:
        return factory()
    except Exception as error:
        name = getattr(factory, "__qualname__", repr(factory))
        raise ConfigError(
            f"rollout.environment: {name} raised {described(error)} when an environment was made; it is called without "
            "arguments, and gets the row in reset"
        ) from error


def _methods(environment: Any) -> dict[str, Callable[..., Any]]:
    """The tools of an environment. ConfigError where it cannot be begun."""
    if not callable(getattr(environment, "reset", None)):
        raise ConfigError(
            f"rollout.environment: {type(environment).__name__} has no method `reset`, which begins each conversation"
        )
    return methods(environment)


def _schema(tool: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        schema: dict[str, Any] = get_json_schema(tool)
    except Exception as error:
        raise ConfigError(
            f"rollout.tools: {tool.__qualname__}: {error}; a tool needs a docstring, a type hint for each argument "
            "and a line for each under `Args:`, for that is what the model is told"
        ) from None
    schema["function"].pop("return", None)  # an image has no schema
    return schema


def _text_of(message: Mapping[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _row(reset: Callable[..., Any], sample: Sample) -> dict[str, Any]:
    """The columns of a row that `reset` takes, with `prompt` and `images` at their full size."""
    columns = {**sample.columns, "prompt": list(sample.messages), "images": list(sample.images)}
    taken = inspect.signature(reset).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in taken):
        return columns
    return {p.name: columns[p.name] for p in taken if p.name in columns}
