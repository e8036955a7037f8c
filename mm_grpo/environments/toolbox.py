"""The tools of a run: where they come from, what the model is told of them, and the host that calls them.

The rules for an environment's class are TRL's `environment_factory`: no arguments to make one, `reset` takes the row's
columns and may return an observation that is put at the end of the prompt, every other public method is a tool, and
`get_reward`, where there is one, scores the finished conversation. Ours besides: `reset` may take only the columns that
it names, a method or function may return images,
`get_reward` may ask for `turns`, `close` is called at the end, and a conversation ends when the environment's attribute
`done` is true. A class with an attribute `step_reward` is paid turn by turn: the attribute is None when one of its
methods begins, and what the method sets it to is a reward of the turn that called it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mm_grpo.environments.factories import address_of, factory_named, made, source_of, tools_of
from mm_grpo.environments.host import Episode, Host, LocalHost
from mm_grpo.environments.observation import Observation
from mm_grpo.environments.own_tools import Tool
from mm_grpo.environments.session import Factory
from mm_grpo.environments.workers import WorkerHost
from mm_grpo.errors import ConfigError, ToolError
from mm_grpo.import_path import load_named
from mm_grpo.rewards.spec import RewardSpec, make_spec
from mm_grpo.user_code.workers import default_size

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig
    from mm_grpo.data.base import Rows
    from mm_grpo.types import Sample

log = logging.getLogger(__name__)


class Toolbox:
    """The plain functions and the environment of a run, and the schemas of all their tools for the chat template.

    `factory` makes the environment of each conversation. `host` calls the tools; `place` chooses where. ConfigError for
    a tool that the model cannot be told of: it needs type hints, and a docstring with its arguments.
    """

    def __init__(
        self,
        config: GRPOConfig,
        tools: Sequence[Callable[..., Any]],
        factory: Factory | None,
    ):
        for tool in tools:
            if not callable(tool) or not hasattr(tool, "__name__"):
                raise _refused(f"{tool!r} is no function with a name; give a plain function (def)")
        self.config, self.factory = config, factory
        self.functions = {function.__name__: function for function in tools}
        self._host: Host | None = None
        self._made = None if factory is None else made(factory, config.rollout.tool_timeout)
        own = {} if self._made is None else tools_of(self._made)
        names = [*(tool.__name__ for tool in tools), *own]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise _refused(f"two tools have one name ({', '.join(twice)}); rename one")
        self.schemas = tuple(_schema(tool) for tool in (*tools, *own.values()))

    @property
    def rewards(self) -> list[Callable[..., Any] | RewardSpec]:
        """The environment's own rewards: where its class has `get_reward` one named after it, and where it has
        `step_reward` one by turn."""

        def own(completion: str, environment_reward: float | None) -> float | None:
            return environment_reward

        def steps(completion: str, turns: list[dict[str, Any]]) -> list[float | None]:
            return [turn["reward"] for turn in turns if turn["role"] == "assistant"]

        kind = type(self._made)
        own.__name__ = own.__qualname__ = kind.__name__
        steps.__name__ = steps.__qualname__ = f"{kind.__name__}.step_reward"
        found: list[Callable[..., Any] | RewardSpec] = [own] if hasattr(kind, "get_reward") else []
        by_turn = [make_spec(steps, options={"per_turn": True})] if hasattr(kind, "step_reward") else []
        return [*found, *by_turn]

    @property
    def sources(self) -> list[tuple[str, Callable[..., Any]]]:
        """User code of the run, by name: the functions, and the class of the environment."""
        source = None if self.factory is None else source_of(self.factory)
        return [*self.functions.items(), *([] if source is None else [("environment", source)])]

    @property
    def host(self) -> Host:
        """Host of the tools; chosen by the config alone where `place` was not called."""
        return self._host or self.place()

    def place(self, rewards: Sequence[str] = (), processes: int = 1) -> Host:
        """Choose where tools are called: in worker processes, if other processes can import them, and if no reward
        looks at the environment itself, as those named `rewards` do.

        ConfigError where `rollout.environment_workers` asks for processes that cannot be, and where several
        `processes` train: rewards run in the first, and the environments of the others stay where they are.
        """
        if rewards and processes > 1:
            raise ConfigError(
                f"rewards: reward {rewards[0]!r} asks for the environment itself, which is in one of several "
                "processes; give the environment a method get_reward, or train in one process"
            )
        count = self.config.rollout.environment_workers
        if count is None:
            what = [*self.functions.values(), *([] if self.factory is None else [self.factory])]
            count = 0 if rewards or any(address_of(one) is None for one in what) else default_size()
        elif count > 0 and rewards:
            raise ConfigError(
                f"rollout.environment_workers = {count}: reward {rewards[0]!r} asks for the environment itself; set it "
                "to 0, or give the environment a method get_reward"
            )
        self.close()
        scoring = getattr(type(self._made), "get_reward", None)
        asked = None if scoring is None else set(inspect.signature(scoring).parameters)
        host = (self.config, self.functions, self.factory, asked)
        self._host = WorkerHost(*host, count) if count else LocalHost(*host)
        return self._host

    def close(self) -> None:
        """Close the environments that are open, and end what calls them; a later call starts anew."""
        if self._host is not None:
            self._host.close()

    @property
    def same_thread(self) -> bool:
        """True if an environment is made by `prepare`: it begins in the thread that goes on with it."""
        return self.factory is not None

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
        self.host.close_episodes([episode])
        shown = episode.opening
        if shown is None or not shown.parts:
            return replace(sample, row=sample)
        *before, last = sample.messages
        content = last["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        for part in shown.parts:
            parts.append({"type": "text", "text": part} if isinstance(part, str) else {"type": "image"})
        return replace(
            sample,
            messages=[*before, {**last, "content": parts}],
            images=(*sample.images, *shown.images),
            row=sample,
        )

    def look(self, rows: Rows) -> None:
        """Begin a conversation about the first row, before a model is loaded. Raises as `prepare`; warns where nothing
        shows an image."""
        sample = rows.sample(0)
        if not self.prepare(sample).images and not rows.text_only:
            log.warning(
                "%s: the row has no image, and reset of an environment showed none: the model sees what tools return; "
                "name the column of images in data.columns, or set data.text_only=true",
                rows.row_name(0),
            )

    def episode(self, sample: Sample) -> Episode:
        """A new conversation about a row that was prepared. ToolError where it begins in another way than that."""
        return self.episodes([sample])[0]

    def episodes(self, samples: Sequence[Sample]) -> list[Episode]:
        """A new conversation about each of these rows, as `episode`, begun together."""
        before = [sample.row or sample for sample in samples]
        episodes = self.host.open([(sample, self._row(sample)) for sample in before])
        for episode, sample in zip(episodes, samples, strict=True):
            if episode.lost is None:
                _check_opening(episode, sample)
        return episodes

    def _row(self, sample: Sample) -> dict[str, Any]:
        """The columns of a row that `reset` takes, with `prompt` and `images` at their full size."""
        if self._made is None:
            return {}
        columns = {**sample.columns, "prompt": list(sample.messages), "images": list(sample.images)}
        taken = inspect.signature(self._made.reset).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in taken):
            return columns
        return {p.name: columns[p.name] for p in taken if p.name in columns}


def _check_opening(episode: Episode, sample: Sample) -> None:
    """ToolError where an environment showed something else than when its row was prepared."""
    shown, last = episode.opening or Observation(()), sample.messages[-1]["content"]
    promised = sample.images[len((sample.row or sample).images) :]
    text = last if isinstance(last, str) else "".join(part.get("text", "") for part in last)
    same = [(i.size, i.tobytes()) for i in shown.images] == [(i.size, i.tobytes()) for i in promised]
    if not same or shown.text not in text:
        raise ToolError(
            f"{sample.uid}: reset of the environment showed another beginning than before for the same row; it must "
            "depend on the row alone (seed its random numbers from a column)"
        )


def toolbox_of(
    config: GRPOConfig,
    tools: Sequence[Callable[..., Any]] | None,
    factory: Factory | None,
) -> Toolbox | None:
    """The tools that are given in Python, else those of the config; None where there are none."""
    rollout = config.rollout
    if tools is None:
        tools = [load_named(place, "rollout.tools", ConfigError) for place in rollout.tools]
    if factory is None and rollout.environment is not None:
        factory = factory_named(rollout.environment)
    if not tools and factory is None:
        if config.algorithm.turn_gamma is not None:
            raise ConfigError(
                f"algorithm.turn_gamma = {config.algorithm.turn_gamma:g}: there is one turn without tools; set "
                "rollout.tools or rollout.environment, or leave it out"
            )
        return None
    return Toolbox(config, tools, factory)


def reward_entries(config: GRPOConfig, given: Sequence[Any] | None, toolbox: Toolbox | None) -> Sequence[Any]:
    """The rewards that are given or the config's, and the environment's own. ConfigError where there are none."""
    own = [] if toolbox is None else toolbox.rewards
    if given is None:
        config.require_rewards(passed=bool(own))
        return [*config.rewards, *own]
    if not given and not own:
        raise ConfigError("rewards=[] has no reward; give at least one name, mapping or function")
    return [*given, *own]


def _refused(why: str) -> ConfigError:
    return ConfigError(f"rollout.tools: {why}")


def _schema(tool: Callable[..., Any]) -> dict[str, Any]:
    if isinstance(tool, Tool):
        return tool.schema
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        parameters = inspect.signature(tool).parameters.values()
        schema: dict[str, Any] = get_json_schema(tool)
    except Exception as error:
        needed = "a docstring, a type hint for each argument and a line for each under `Args:`"
        raise _refused(f"{tool.__qualname__}: {error}; a tool needs {needed}") from None
    if alone := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]:
        raise _refused(f"{tool.__qualname__} takes {alone[0]!r} by position alone; take the / out")
    schema["function"].pop("return", None)  # an image has no schema
    return schema
