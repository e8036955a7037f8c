"""Tools of a run: where they come from, their schemas for the model, and the host that calls them.

An environment's class follows TRL's `environment_factory`: the constructor takes no arguments; `reset` takes the row's
columns and may return an observation, which ends the prompt; every other public method is a tool; `get_reward`
(optional) scores the finished conversation.

In addition, `reset` may take only the columns that it names, any method may return images and videos, `get_reward` may
ask for `turns`, `close` is called at the end, and the attribute `done` ends a conversation when true. A class with an
attribute `step_reward` is paid turn by turn: it is None before each call, and its value after the call is a reward of
that turn.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mm_grpo.environments.factories import address_of, factory_named, make_environment, source_of, tools_of
from mm_grpo.environments.host import Episode, Host, LocalHost
from mm_grpo.environments.observation import digest
from mm_grpo.environments.own_tools import Tool
from mm_grpo.environments.session import Factory
from mm_grpo.environments.workers import WorkerHost
from mm_grpo.errors import ConfigError, ToolError
from mm_grpo.import_path import load_named
from mm_grpo.messages import content_parts
from mm_grpo.rewards.spec import RewardSpec, make_spec
from mm_grpo.types import message_part, split_media
from mm_grpo.user_code.workers import default_size

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig
    from mm_grpo.data.base import Rows
    from mm_grpo.data.rows import Fields
    from mm_grpo.types import Sample

log = logging.getLogger(__name__)


class Toolbox:
    """Plain functions and the environment of a run, and the schemas of all tools for the chat template.

    `factory` makes the environment of each conversation. `host` calls the tools; `place` chooses where. Raise
    ConfigError for a tool without a schema: it needs type hints, and a docstring with its arguments.
    """

    def __init__(self, config: GRPOConfig, tools: Sequence[Callable[..., Any]], factory: Factory | None):
        for tool in tools:
            if not callable(tool) or not hasattr(tool, "__name__"):
                raise _refused(f"{tool!r} is no function with a name; give a plain function (def)")
        self.config, self.factory = config, factory
        self.functions = {function.__name__: function for function in tools}
        self._host: Host | None = None
        self._example = None if factory is None else make_environment(factory, config.rollout.tool_timeout)
        methods = {} if self._example is None else tools_of(self._example)
        names = [*(tool.__name__ for tool in tools), *methods]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise _refused(f"two tools have one name ({', '.join(duplicates)}); rename one")
        self.schemas = tuple(_schema(tool) for tool in (*tools, *methods.values()))

    @property
    def rewards(self) -> list[Callable[..., Any] | RewardSpec]:
        """The environment's own rewards: one of `get_reward`, named after its class, and one of `step_reward`, by turn;
        each only if the class has it."""

        def final(completion: str, environment_reward: float | None) -> float | None:
            return environment_reward

        def steps(completion: str, turns: list[dict[str, Any]]) -> list[float | None]:
            return [turn["reward"] for turn in turns if turn["role"] == "assistant"]

        cls = type(self._example)
        final.__name__ = final.__qualname__ = cls.__name__
        steps.__name__ = steps.__qualname__ = f"{cls.__name__}.step_reward"
        rewards: list[Callable[..., Any] | RewardSpec] = [final] if hasattr(cls, "get_reward") else []
        by_turn = [make_spec(steps, options={"per_turn": True})] if hasattr(cls, "step_reward") else []
        return [*rewards, *by_turn]

    @property
    def sources(self) -> list[tuple[str, Callable[..., Any]]]:
        """User code by name: the functions, and the class of the environment."""
        source = None if self.factory is None else source_of(self.factory)
        return [*self.functions.items(), *([] if source is None else [("environment", source)])]

    @property
    def host(self) -> Host:
        """Host of the tools; the config alone chooses it if `place` was not called."""
        return self._host or self.place()

    def place(self, rewards: Sequence[str] = (), processes: int = 1) -> Host:
        """Choose the host: worker processes if they can import the tools, and no reward takes the environment itself.

        `rewards` names those that do. Raise ConfigError if there are some and `rollout.environment_workers` asks for
        processes, or several `processes` train: rewards run in the first process, environments in all.
        """
        if rewards and processes > 1:
            raise ConfigError(
                f"rewards: reward {rewards[0]!r} asks for the environment itself, which is in one of several "
                "processes; give the environment a method get_reward, or train in one process"
            )
        count = self.config.rollout.environment_workers
        if count is None:
            code = [*self.functions.values(), *([] if self.factory is None else [self.factory])]
            count = 0 if rewards or any(address_of(c) is None for c in code) else default_size()
        elif count > 0 and rewards:
            raise ConfigError(
                f"rollout.environment_workers = {count}: reward {rewards[0]!r} asks for the environment itself; set it "
                "to 0, or give the environment a method get_reward"
            )
        self.close()
        get_reward = getattr(type(self._example), "get_reward", None)
        parameters = None if get_reward is None else set(inspect.signature(get_reward).parameters)
        arguments = (self.config, self.functions, self.factory, parameters)
        self._host = WorkerHost(count, *arguments) if count else LocalHost(*arguments)
        return self._host

    def close(self) -> None:
        """Close the open environments, and end the host's thread or processes; later calls start new ones."""
        if self._host is not None:
            self._host.close()

    @property
    def same_thread(self) -> bool:
        """True if an environment is made by `prepare`: it begins in the thread that goes on with it."""
        return self.factory is not None

    def prepare(self, sample: Sample) -> Sample:
        """Return a row with the tools, and with what `reset` of its environment shows at the end of the prompt.

        Raise ToolError if `reset` fails.
        """
        sample = replace(sample, tools=self.schemas)
        if self.factory is None:
            return sample
        (episode,) = self.host.open([(sample, self._row(sample))])
        if episode.lost is not None:
            raise ToolError(f"{sample.uid}: reset of the environment: {episode.lost}")
        self.host.close_episodes([episode])
        opening = episode.opening
        if opening is None or not opening.parts:
            return replace(sample, row=sample)
        *messages, last = sample.messages
        parts = [*content_parts(last["content"])]
        parts += map(message_part, opening.parts)
        messages, (images, videos) = [*messages, {**last, "content": parts}], split_media(opening.media)
        media: Any = {"images": (*sample.images, *images), "videos": (*sample.videos, *videos)}
        return replace(sample, messages=messages, **media, row=sample, opening_digest=digest(opening.parts))

    def look(self, rows: Rows) -> None:
        """Prepare the first row, before a model is loaded. Raise as `prepare`; warn if nothing shows a medium."""
        sample = rows.sample(0)
        if not self.prepare(sample).media and not rows.text_only:
            log.warning(
                "%s: the row has no image or video, and reset of an environment showed none: the model sees what tools "
                "return; name the column of images in data.columns, or set data.text_only=true",
                rows.row_name(0),
            )

    def episodes(self, samples: Sequence[Sample]) -> list[Episode]:
        """Start conversations about prepared rows, all at once. Raise ToolError if a `reset` disagrees with its row."""
        rows = [sample.row or sample for sample in samples]
        episodes = self.host.open([(row, self._row(row)) for row in rows])
        for episode, sample in zip(episodes, samples, strict=True):
            parts = () if episode.opening is None else episode.opening.parts
            if episode.lost is None and (digest(parts) if parts else None) != sample.opening_digest:
                raise ToolError(
                    f"{sample.uid}: reset of the environment showed another beginning than before for the same row; it "
                    "must depend on the row alone (seed its random numbers from a column)"
                )
        return episodes

    def reads(self, row: Fields) -> list[str]:
        """Return the columns of a row that `reset` takes."""
        names = self._names(row)
        return [name for name in row.columns if name in names]

    def _row(self, sample: Sample) -> dict[str, Any]:
        """Return the columns of a row that `reset` takes, with `prompt`, and `images` and `videos` at full size."""
        from mm_grpo.user_code.lazy_image import with_pil_images

        columns = {**sample.columns, "prompt": list(sample.messages)}
        columns |= {"images": list(sample.images), "videos": list(sample.videos)}
        names = self._names(sample)
        return {name: with_pil_images(value) for name, value in columns.items() if name in names}

    def _names(self, row: Sample | Fields) -> set[str]:
        """Return the names that `reset` takes, of the row's columns and others."""
        if self._example is None:
            return set()
        parameters = inspect.signature(self._example.reset).parameters.values()
        names = {p.name for p in parameters}
        if any(p.kind is p.VAR_KEYWORD for p in parameters):  # what prompt and images say is sent once
            names |= {*row.other_columns, "prompt", "images", "videos"}
        return names


def toolbox_of(
    config: GRPOConfig, tools: Sequence[Callable[..., Any]] | None, factory: Factory | None
) -> Toolbox | None:
    """Return the toolbox of these tools and factory, else of the config's; None without any."""
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


def reward_entries(
    config: GRPOConfig, rewards: Sequence[Any] | None, toolbox: Toolbox | None
) -> Sequence[Any]:
    """Return `rewards` or the config's, and the environment's own. Raise ConfigError if there are none."""
    environment_rewards = [] if toolbox is None else toolbox.rewards
    if rewards is None:
        config.require_rewards(passed=bool(environment_rewards))
        rewards = config.rewards
    elif not rewards and not environment_rewards:
        raise ConfigError("rewards=[] has no reward; give at least one name, mapping or function")
    return [*rewards, *environment_rewards]


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
    if positional := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]:
        raise _refused(f"{tool.__qualname__} takes {positional[0]!r} by position alone; take the / out")
    schema["function"].pop("return", None)  # an image has no schema
    return schema
