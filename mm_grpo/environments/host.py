"""Hosts that call the tools and environments of a run: many conversations, a deadline for each call.

`Host` says what becomes of a conversation whose call failed, by the policies of the config, and keeps the environments
that are open. Where calls are made is its subclasses' affair: `LocalHost` makes them in the trainer's process, one
after the other; `WorkerHost` (workers.py) in processes that can be killed.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from mm_grpo.background import BackgroundThreads
from mm_grpo.data.images import MAX_BYTES, MAX_PIXELS
from mm_grpo.environments.observation import Limits, Observation, failed
from mm_grpo.environments.session import CallResult, Factory, Session, What
from mm_grpo.errors import ToolError
from mm_grpo.user_code.kept_state import own_copy
from mm_grpo.user_code.watchdog import call_within

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig
    from mm_grpo.types import Sample, Turn

log = logging.getLogger(__name__)

Functions = Mapping[str, Callable[..., Any]]
REMEDY = "rollout.environment_workers > 0 runs it in a process that can be killed"


@dataclass(eq=False)
class Episode:
    """One conversation's tools. `opening` is what its environment showed at the reset, `done` whether it says that the
    conversation is over. `masked` is why the conversation is kept out of the loss, `lost` why its environment is gone.
    `environment` is None where it is in another process. `step_reward` is the sum of its calls' since it was taken.
    `place` is what its host keeps of it, `number` its name in a worker."""

    uid: str
    host: Host
    opening: Observation | None = None
    done: bool = False
    masked: str | None = None
    lost: str | None = None
    environment: Any = None
    step_reward: float | None = None
    place: Any = None
    number: int = field(default_factory=count().__next__)

    def call(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        """The tool's answer, or a fault that the model is told; ToolError where the config says stop."""
        return self.host.call_all([(self, name, arguments)])[0]

    def reward(self) -> float | None:
        """Call `get_reward` of the environment; None where there is none, and for a conversation that is masked,
        as this one is where the answer is late or the environment is gone."""
        return self.host.rewards([self])[0]

    def take_step_reward(self) -> float | None:
        """Sum the rewards of the calls since the last time."""
        paid, self.step_reward = self.step_reward, None
        return paid


@dataclass(eq=False)
class Task:
    """One call of the user's code. `result` is what came of it, an empty one when it was skipped."""

    episode: Episode
    what: What
    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    result: CallResult | None = None

    @property
    def finished(self) -> bool:
        """True when it was made or skipped."""
        return self.result is not None

    @property
    def answer(self) -> Observation:
        """Return the observation of a call that is finished."""
        seen = None if self.result is None else self.result.observation
        return seen or failed("died", self.episode.masked or "")

    def __str__(self) -> str:
        return self.name if self.what == "call" else f"{self.what} of the environment"


class Host(ABC):
    """Opens conversations and makes their calls. `scores` are the arguments that `get_reward` of the environments asks
    for, None where none has it. It is used by one thread."""

    def __init__(
        self,
        config: GRPOConfig,
        functions: Functions,
        factory: Factory | None,
        scores: Collection[str] | None,
    ) -> None:
        self.config, self.functions, self.factory, self.scores = config, functions, factory, scores
        self.limits = Limits(MAX_PIXELS, MAX_BYTES)
        self.policy, self.timeout = config.rollout.on_tool_error, config.rollout.tool_timeout
        self.opened: list[Episode] = []

    def open(self, rows: Sequence[tuple[Sample, Mapping[str, Any]]]) -> list[Episode]:
        """A conversation for each row, with the arguments of `reset`.

        ToolError for a reset that raised; where it is late or its process died the environment is lost."""
        episodes = [Episode(sample.uid, self) for sample, _ in rows]
        self.opened += episodes
        tasks = [Task(e, "reset", arguments=row) for e, (_, row) in zip(episodes, rows, strict=True)]
        if self.factory is not None:
            self.run(tasks)
        for episode, task in zip(episodes, tasks, strict=True):
            episode.opening = None if task.result is None else task.result.observation
        return episodes

    def call_all(self, calls: Sequence[tuple[Episode, str, Mapping[str, Any]]]) -> list[Observation]:
        """The answers to calls of many conversations, in order. A conversation that is masked by one of its calls has a
        fault for its later ones, which are not made. ToolError where the config says that a failure stops the run."""
        tasks = [Task(episode, "call", name, arguments) for episode, name, arguments in calls]
        self.run(tasks)
        return [task.answer for task in tasks]

    def start(self, calls: Sequence[tuple[Episode, str, Mapping[str, Any]]]) -> list[Task]:
        """Begin calls as `call_all` makes them, and return before they are made; `work` goes on with them."""
        tasks = [Task(episode, "call", name, arguments) for episode, name, arguments in calls]
        self.begin(tasks)
        return tasks

    def rewards(
        self, episodes: Sequence[Episode], turns: Sequence[Sequence[Turn]] | None = None
    ) -> list[float | None]:
        """Call `get_reward` of each conversation, which may ask for the `turns`; None where it is masked."""
        tasks = [Task(episode, "get_reward") for episode in episodes]
        if self.scores is not None:
            if "turns" in self.scores:
                for task, own in zip(tasks, turns or [()] * len(tasks), strict=True):
                    task.arguments = {"turns": [turn.shown() for turn in own]}
            self.run(tasks)
        return [None if t.episode.masked or t.result is None else t.result.reward for t in tasks]

    def close_episodes(self, episodes: Iterable[Episode] | None = None) -> None:
        """Close the environments of some conversations, by default of all."""
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
        """Make calls, and return when all are finished."""
        self.begin(tasks)
        while not all(task.finished for task in tasks):
            self.work(wait=True)

    @abstractmethod
    def begin(self, tasks: Sequence[Task]) -> None:
        """Take calls to make, those that `due` allows, and `settle` each; here, or in `work`."""

    @abstractmethod
    def end(self) -> None:
        """End what calls tools; another call starts anew."""

    def work(self, wait: bool) -> None:  # noqa: B027
        """Take answers to calls that were begun; with `wait`, wait for one, a deadline or the end of a worker."""

    def abandon(self) -> None:  # noqa: B027
        """Give up the calls that were begun and are not finished, with the environments that they are made in."""

    def forget(self, episode: Episode) -> None:
        """Forget a conversation that was closed."""
        episode.place = None

    def close(self) -> None:
        """Close the environments, whatever they do, and end what calls them."""
        try:
            self.close_episodes()
        except ToolError as error:
            log.warning("%s", error)
        finally:
            self.end()

    def due(self, task: Task) -> bool:
        """True when a call is to be made; if its environment is gone, the conversation is masked, or the run stops."""
        episode = task.episode
        if episode.masked is None and episode.lost is not None and task.what in ("call", "get_reward"):
            why = f"{task}: the conversation's environment is gone: {episode.lost}"
            if self.policy == "stop":
                raise self._stop(task, why)
            episode.masked = why
        if episode.lost is None and (episode.masked is None or task.what == "close"):
            return True
        task.result = CallResult()
        return False

    def settle(self, task: Task, answer: CallResult) -> None:
        """Note what came of a call. Raises ToolError where a failure stops the run."""
        episode, seen = task.episode, answer.observation
        task.result = answer
        episode.done = episode.done or answer.done
        if task.what == "call" and answer.reward is not None:
            episode.step_reward = (episode.step_reward or 0.0) + answer.reward
        if answer.raised is not None and task.what != "close":  # there the others are closed first
            if task.what == "call" and self.policy != "stop" and seen is None:
                self._fail(task, failed("raised", answer.raised.removeprefix("raised ")), self.policy)
            else:  # a bad step_reward, which comes with an observation, is no affair of the model's
                raise self._stop(task, f"{task} {answer.raised}")
        elif answer.gone is not None or answer.late or answer.died is not None:
            policy = "mask" if answer.late and self.policy != "stop" else self.policy
            why = f"{task} ended its worker process, which {answer.died}"
            if answer.gone is not None:
                why, episode.lost = answer.gone, episode.lost or answer.gone
            elif answer.late:
                why = f"{task} had not answered after {self.timeout:g} s (rollout.tool_timeout)"
            if policy == "stop" and task.what != "close":
                raise self._stop(task, why if answer.gone is None else f"{task}: {why}")
            self._fail(task, failed("timed_out" if answer.late else "died", why), policy)
        elif task.what == "reset" and seen is not None and seen.fault:
            raise self._stop(task, f"{task}: {seen.text}")

    def _fail(self, task: Task, seen: Observation, policy: str) -> None:
        """Tell the model, or mask the conversation; it is masked too where its environment is gone."""
        episode, why = task.episode, f"{task}: {seen.text}"
        task.result = CallResult(seen if task.what == "call" else None)
        if task.what == "close":
            log.warning("%s: %s", episode.uid, seen.text)
        elif task.what != "reset" and (policy == "mask" or task.what == "get_reward" or episode.lost):
            episode.masked = why

    def _stop(self, task: Task, why: str) -> ToolError:
        return ToolError(
            f"{task.episode.uid}: {why}; mend it, or for a tool set rollout.on_tool_error to reply or mask"
        )


class LocalHost(Host):
    """Calls tools and environments in this process, one after the other, in a thread of their own. A thread cannot be
    ended, so a call that is late stops the run; where it lets nothing else run, a watchdog ends the process."""

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
            episode.place = Session(self.functions, self.factory, self.limits)
        self._thread = self._thread or BackgroundThreads(1, "tools")
        call = partial(episode.place.answer, task.what, task.name, own_copy(task.arguments))
        try:
            answer: CallResult = call_within(self.timeout, self._thread, call)
        except BaseException as error:  # late, or Ctrl-C: the thread is not ours any more, nor what it holds
            self._thread = None
            for one in self.opened:
                one.lost = one.lost or f"a call was given up ({type(error).__name__})"
            if isinstance(error, TimeoutError):
                raise ToolError(f"{episode.uid}: {task} {late}; {REMEDY}") from None
            raise
        episode.environment = episode.place.environment
        return answer
