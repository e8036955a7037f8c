"""Hosts that call the tools and environments of a run: many conversations, a deadline for each call.

`Host` keeps the open environments, and applies the config's policies to a conversation whose call failed. Its subclass
`LocalHost` makes calls in the trainer's process, one after the other; `WorkerHost` (workers.py) in processes that can
be killed.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from mm_grpo.background import BackgroundThreads
from mm_grpo.environments.observation import Observation, failed
from mm_grpo.environments.session import CallResult, Factory, Functions, Operation, Session
from mm_grpo.errors import ToolError
from mm_grpo.user_code.kept_state import own_copy
from mm_grpo.user_code.watchdog import call_within

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig
    from mm_grpo.types import Sample, Turn

log = logging.getLogger(__name__)

REMEDY = "rollout.environment_workers > 0 runs it in a process that can be killed"


@dataclass(eq=False)
class Episode:
    """Conversation with an environment, tools or both."""

    uid: str
    opening: Observation | None = None
    """What `reset` of the environment showed."""
    done: bool = False
    """The environment says that the conversation is over."""
    masked: str | None = None
    """Why the conversation stays out of the loss."""
    lost: str | None = None
    """Why the environment is gone."""
    environment: Any = None
    """None if it is in another process."""
    step_reward: float | None = None
    """Sum of the rewards of calls since `take_step_reward`."""
    place: Any = None
    """The host's state of it: a `Session`, or the slot of a worker."""
    number: int = field(default_factory=count().__next__)
    """Its id in a worker."""

    def take_step_reward(self) -> float | None:
        """Return the sum of the rewards of calls since the last time."""
        reward, self.step_reward = self.step_reward, None
        return reward


@dataclass(eq=False)
class Task:
    """Call of the user's code."""

    episode: Episode
    operation: Operation
    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    result: CallResult | None = None
    """None until the call is finished; an empty result if it was skipped."""

    @property
    def finished(self) -> bool:
        return self.result is not None

    @property
    def answer(self) -> Observation:
        """Observation of a finished call."""
        observation = None if self.result is None else self.result.observation
        return observation or failed("died", self.episode.masked or "")

    def __str__(self) -> str:
        return self.name if self.operation == "call" else f"{self.operation} of the environment"


class Host(ABC):
    """Opens conversations and makes their calls for one thread.

    `reward_arguments` are the parameters of the environment's `get_reward`, None if it has none.
    """

    def __init__(
        self,
        config: GRPOConfig,
        functions: Functions,
        factory: Factory | None,
        reward_arguments: Collection[str] | None,
    ) -> None:
        self.config, self.functions, self.factory = config, functions, factory
        self.reward_arguments = reward_arguments
        self.policy, self.timeout = config.rollout.on_tool_error, config.rollout.tool_timeout
        self.video_limits = {"fps": config.data.video_fps, "max_frames": config.data.video_max_frames}
        self.opened: list[Episode] = []

    def open(self, rows: Sequence[tuple[Sample, Mapping[str, Any]]]) -> list[Episode]:
        """Start a conversation for each row and its arguments of `reset`.

        Raise ToolError if a reset raised. If it is late or its process died, the environment is lost.
        """
        episodes = [Episode(sample.uid) for sample, _ in rows]
        self.opened += episodes
        tasks = [Task(e, "reset", arguments=row) for e, (_, row) in zip(episodes, rows, strict=True)]
        if self.factory is not None:
            self.run(tasks)
        for episode, task in zip(episodes, tasks, strict=True):
            episode.opening = None if task.result is None else task.result.observation
        return episodes

    def start(self, calls: Sequence[tuple[Episode, str, Mapping[str, Any]]]) -> list[Task]:
        """Start calls of many conversations, without waiting; `work` continues them.

        If a call masks its conversation, later ones are skipped and return a fault. Raise ToolError, here or in `work`,
        if the config says that a failure stops the run.
        """
        tasks = [Task(episode, "call", name, arguments) for episode, name, arguments in calls]
        self.begin(tasks)
        return tasks

    def rewards(
        self, episodes: Sequence[Episode], turns: Sequence[Sequence[Turn]] | None = None
    ) -> list[float | None]:
        """Call `get_reward` of each conversation, with its `turns` if asked for.

        None for one that is masked, also by this call, and without `get_reward`.
        """
        tasks = [Task(episode, "get_reward") for episode in episodes]
        if self.reward_arguments is not None:
            if "turns" in self.reward_arguments:
                for task, messages in zip(tasks, turns or [()] * len(tasks), strict=True):
                    task.arguments = {"turns": [turn.shown() for turn in messages]}
            self.run(tasks)
        return [None if t.episode.masked or t.result is None else t.result.reward for t in tasks]

    def close_episodes(self, episodes: Iterable[Episode] | None = None) -> None:
        """Close the environments of these conversations, by default of all. Raise ToolError if a `close` raised."""
        closing = list(self.opened if episodes is None else episodes)
        self.opened = [episode for episode in self.opened if episode not in closing]
        tasks = [Task(episode, "close") for episode in closing if episode.lost is None]
        try:
            if self.factory is not None and tasks:
                self.run(tasks)
        finally:
            for episode in closing:
                episode.lost, episode.environment = episode.lost or "the conversation was closed", None
                self.forget(episode)
        for task in tasks:
            if task.result is not None and task.result.raised is not None:
                raise self._stop(task, f"{task} {task.result.raised}")

    def run(self, tasks: Sequence[Task]) -> None:
        """Make calls, and wait until all are finished."""
        self.begin(tasks)
        while not all(task.finished for task in tasks):
            self.work(wait=True)

    @abstractmethod
    def begin(self, tasks: Sequence[Task]) -> None:
        """Start the calls that `due` allows. Each is settled here or in `work`."""

    @abstractmethod
    def end(self) -> None:
        """End the thread or processes; the next call starts new ones."""

    def work(self, wait: bool) -> None:  # noqa: B027
        """Settle calls that have answers; with `wait`, wait for an answer, a deadline or the end of a worker."""

    def abandon(self) -> None:  # noqa: B027
        """Give up the calls that run, with their environments."""

    def forget(self, episode: Episode) -> None:
        """Forget a conversation that was closed."""
        episode.place = None

    def close(self) -> None:
        """Close the environments, and end the thread or processes. A failing `close` is only logged."""
        try:
            self.close_episodes()
        except ToolError as error:
            log.warning("%s", error)
        finally:
            self.end()

    def due(self, task: Task) -> bool:
        """Return True if a call is to be made. If its environment is gone, mask the conversation or stop the run."""
        episode = task.episode
        if episode.masked is None and episode.lost is not None and task.operation in ("call", "get_reward"):
            why = f"{task}: the conversation's environment is gone: {episode.lost}"
            if self.policy == "stop":
                raise self._stop(task, why)
            episode.masked = why
        if episode.lost is None and (episode.masked is None or task.operation == "close"):
            return True
        task.result = CallResult()
        return False

    def settle(self, task: Task, answer: CallResult) -> None:
        """Store the result of a call. Raise ToolError if a failure stops the run."""
        episode, operation, observation = task.episode, task.operation, answer.observation
        task.result = answer
        episode.done = episode.done or answer.done
        if operation == "call" and answer.reward is not None:
            episode.step_reward = (episode.step_reward or 0.0) + answer.reward
        if answer.raised is not None and operation != "close":  # a failed close waits for the others
            if operation == "call" and self.policy != "stop" and observation is None:
                self._fail(task, failed("raised", answer.raised.removeprefix("raised ")), self.policy)
            else:  # with an observation it is a bad step_reward, which is not the model's fault
                raise self._stop(task, f"{task} {answer.raised}")
        elif answer.gone is not None or answer.late or answer.died is not None:
            policy = "mask" if answer.late and self.policy != "stop" else self.policy
            why = f"{task} ended its worker process, which {answer.died}"
            if answer.gone is not None:
                why, episode.lost = answer.gone, episode.lost or answer.gone
            elif answer.late:
                why = f"{task} had not answered after {self.timeout:g} s (rollout.tool_timeout)"
            if policy == "stop" and operation != "close":
                raise self._stop(task, why if answer.gone is None else f"{task}: {why}")
            self._fail(task, failed("timed_out" if answer.late else "died", why), policy)
        elif operation == "reset" and observation is not None and observation.fault:
            raise self._stop(task, f"{task}: {observation.text}")

    def _fail(self, task: Task, observation: Observation, policy: str) -> None:
        """Show the failure to the model, or mask the conversation, also if its environment is gone."""
        episode, operation = task.episode, task.operation
        task.result = CallResult(observation if operation == "call" else None)
        if operation == "close":
            log.warning("%s: %s", episode.uid, observation.text)
        elif operation != "reset" and (policy == "mask" or operation == "get_reward" or episode.lost):
            episode.masked = f"{task}: {observation.text}"

    def _stop(self, task: Task, why: str) -> ToolError:
        remedy = "fix it, or for a tool set rollout.on_tool_error to reply or mask"
        return ToolError(f"{task.episode.uid}: {why}; {remedy}")


class LocalHost(Host):
    """Host that makes calls in a thread of this process, one after the other.

    A thread cannot be killed, so a late call stops the run. If it blocks all threads, a watchdog ends the process.
    """

    _thread: BackgroundThreads | None = None

    def begin(self, tasks: Sequence[Task]) -> None:
        for task in filter(self.due, tasks):
            self.settle(task, self._answer(task))

    def end(self) -> None:
        if self._thread is not None:
            self._thread.close()
            self._thread = None

    def _answer(self, task: Task) -> CallResult:
        episode, late = task.episode, f"had not answered after rollout.tool_timeout = {self.timeout:g} s"
        if episode.place is None:
            episode.place = Session(self.functions, self.factory, self.video_limits)
        self._thread = self._thread or BackgroundThreads(1, "tools")
        call = partial(episode.place.answer, task.operation, task.name, own_copy(task.arguments))
        try:
            answer: CallResult = call_within(self.timeout, self._thread, call)
        except BaseException as error:  # late, or Ctrl-C: the thread may still use every environment
            self._thread = None
            for conversation in self.opened:
                conversation.lost = conversation.lost or f"a call was given up ({type(error).__name__})"
            if isinstance(error, TimeoutError):
                raise ToolError(f"{episode.uid}: {task} {late}; {REMEDY}") from None
            raise
        episode.environment = episode.place.environment
        return answer
