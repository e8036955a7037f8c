"""Conversations of several turns: the model samples, tools answer, and the model goes on, until it calls no tool.

No conversation waits for another: each goes on as soon as its own turn has ended and its tools have answered, while the
engine works on the others (`RequestStream`) and so do the tools, in their processes. An engine that answers whole
batches alone is asked turn by turn. A turn is an ordinary request whose prompt is the conversation so far
(conversation.py), with the seed that the seed law gives it (seeds.py), so nothing hangs on the order in which tools
answer, and what engines run is compared with what the learner trains on as ever.

A conversation ends when the model writes no call, when its environment is done, after `rollout.max_turns` turns, or
when the next observation does not fit into `rollout.max_completion_length`, which bounds all tokens after the prompt.
In the last two cases it is flagged as a completion that was cut off (`finish_reason` "length").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Protocol, cast

from mm_grpo.environments.observation import Observation, failed
from mm_grpo.errors import DataError
from mm_grpo.processors.tool_calls import ToolCall, tool_calls
from mm_grpo.rollout.conversation import Conversation
from mm_grpo.rollout.engine import BatchStream, Follows, Request, require_answers
from mm_grpo.types import Completion, FinishReason, Picture, Turn

if TYPE_CHECKING:
    from PIL.Image import Image

    from mm_grpo.config import GRPOConfig
    from mm_grpo.environments.host import Episode, Task
    from mm_grpo.environments.toolbox import Toolbox
    from mm_grpo.processors.base import ConversationProcessor, Processor
    from mm_grpo.rollout.engine import RequestStream, RolloutEngine
    from mm_grpo.rollout.seeds import SeedPlan


class Sampler(Protocol):
    """An engine, or a loop of turns over one."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]: ...


@dataclass(eq=False)
class _Running:
    """One generation on its way; `finished` says how it ended, None while it goes on. `number` is that of its last
    request in the engine's stream, `shown` the images that it was shown since. `calls` are those of its last turn, and
    `tasks` the host's for those that can be made."""

    request: Request
    conversation: Conversation
    episode: Episode
    turns: list[Turn] = field(default_factory=list)
    images: int = 0
    finished: FinishReason | None = None
    number: int | None = None
    shown: Sequence[Picture] = ()
    calls: Sequence[ToolCall] = ()
    tasks: Sequence[Task] = ()

    @property
    def called(self) -> bool:
        """True when its tools have answered."""
        return all(task.finished for task in self.tasks)

    def tool_answers(self) -> list[tuple[ToolCall, Observation]]:
        """Each call with its answer, in order."""
        made = iter(self.tasks)
        return [
            (c, next(made).answer if c.problem is None else failed("malformed_call", c.problem))
            for c in self.calls
        ]


class TurnLoop:
    """Answers requests with whole conversations. `version` gives the number of the weights that the engine holds."""

    def __init__(
        self,
        config: GRPOConfig,
        processor: ConversationProcessor,
        engine: RolloutEngine,
        toolbox: Toolbox,
        seeds: SeedPlan,
        version: Callable[[], int],
    ) -> None:
        self.config, self.processor, self.engine = config, processor, engine
        self.toolbox, self.seeds, self.version = toolbox, seeds, version

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One conversation per request, in order. Environments stay open until the next call, for rewards.

        Raises what the engine raises, ToolError for an environment that cannot be used, and GuardStop when a turn
        changed tokens of the turn before.
        """
        self.close()
        episodes = self.toolbox.episodes([request.prompt.sample for request in requests])
        running = [
            _Running(request, Conversation(request.prompt, self.processor), episode)
            for request, episode in zip(requests, episodes, strict=True)
        ]
        self._run(running)
        rewards = self.toolbox.host.rewards(episodes, [one.turns for one in running])
        return [self._completion(one, reward) for one, reward in zip(running, rewards, strict=True)]

    def close(self) -> None:
        """Close the environments of the last call, which rewards could still look at."""
        self.toolbox.host.close_episodes()

    def _run(self, running: Sequence[_Running]) -> None:
        """Lead the conversations to their ends."""
        host, pictures = self.toolbox.host, dict[bytes, Picture]()
        called: list[_Running] = []
        try:
            with self.engine.stream() as stream:
                together = self.config.rollout.synchronous_turns or isinstance(stream, BatchStream)
                asked = dict(self._ask(stream, one) for one in running)
                while asked or called:
                    for number, answer in stream.step() if asked else ():
                        one, request = asked.pop(number)
                        require_answers([request], [answer], self.version())
                        if calls := self._answered(one, answer):
                            made = [(one.episode, c.name, c.arguments) for c in calls if c.problem is None]
                            one.calls, one.tasks = calls, host.start(made)
                            called.append(one)
                        else:
                            stream.release(number)
                    host.work(wait=not asked)
                    if together and (asked or not all(one.called for one in called)):
                        continue
                    for one in [one for one in called if one.called]:
                        called.remove(one)
                        self._observe(one, pictures)
                        if one.finished is None:
                            asked |= [self._ask(stream, one)]
                        elif one.number is not None:
                            stream.release(one.number)
        finally:
            if called:
                host.abandon()

    def _ask(self, stream: RequestStream, one: _Running) -> tuple[int, tuple[_Running, Request]]:
        """Ask for a conversation's next turn."""
        request = self._request(one)
        follows = None if one.number is None else Follows(one.number, one.shown)
        one.number, one.shown = stream.add_request(request, follows), ()
        return one.number, (one, request)

    def _request(self, one: _Running) -> Request:
        sampling, conversation = one.request.sampling, one.conversation
        turn = len(conversation.answers)
        if turn == 0:
            return one.request
        left = replace(sampling, max_tokens=sampling.max_tokens - conversation.run_length)
        return Request(conversation.prompt, self.seeds.of_turn(one.request.seed, turn), left)

    def _answered(self, one: _Running, answer: Completion) -> list[ToolCall]:
        """Take the model's turn; the calls to be made, none where the conversation has ended."""
        one.conversation.answered(answer)
        one.turns.append(Turn("assistant", answer.text, len(answer.token_ids), seed=answer.seed))
        calls = tool_calls(answer.text)
        if answer.finish_reason != "stop" or not calls:
            one.finished = answer.finish_reason
        elif len(one.conversation.answers) == self.config.rollout.max_turns:
            one.finished = "length"
        return [] if one.finished is not None else calls

    def _observe(self, one: _Running, pictures: dict[bytes, Picture]) -> None:
        """Append what the calls of a turn answered, where it fits, and note what they were paid."""
        one.turns[-1] = replace(one.turns[-1], reward=one.episode.take_step_reward())
        if one.episode.masked is not None:
            one.finished = "stop"
            return
        made: list[tuple[Turn, list[Picture], Observation]] = []
        most = self.config.rollout.max_images_per_episode
        for call, seen in one.tool_answers():
            if one.images + len(seen.images) > most:
                seen = failed("too_many_images", f"no more than {most} images are shown in a conversation")
            try:
                shown = [self._picture(one, image, pictures) for image in seen.images]
            except DataError as error:  # a strip of pixels, say, that no resizing makes legal
                seen, shown = failed("bad_result", str(error)), []
            one.images += len(shown)
            images = tuple(picture.image for picture in shown)
            turn = Turn("tool", seen.text, 0, None, call.name, dict(call.arguments), images, seen.fault)
            made.append((turn, shown, seen))
        answers = [_resized(seen, shown) for _, shown, seen in made]
        ids = self.processor.observation(answers, row=one.conversation.start.uid)
        shown = [picture for _, of_call, _ in made for picture in of_call]
        added = one.conversation.observed(ids, shown, below=one.request.sampling.max_tokens)
        if added is None:  # not a token of the next turn would be left
            one.finished = "length"
            return
        first, *others = (turn for turn, _, _ in made)
        one.turns += [replace(first, tokens=added), *others]
        one.shown = shown
        if one.episode.done:
            one.finished = "stop"

    def _picture(self, one: _Running, image: Image, pictures: dict[bytes, Picture]) -> Picture:
        """An image at its final size; equal ones of a call are one object, which the learner encodes once."""
        key = sha256(f"{image.mode} {image.size}".encode() + image.tobytes()).digest()
        if key not in pictures:
            pictures[key] = self.processor.picture(image, row=one.conversation.start.uid)
        return pictures[key]

    def _completion(self, one: _Running, reward: float | None) -> Completion:
        """Return what the model sampled in a conversation as one completion."""
        answers = one.conversation.answers
        return Completion(
            token_ids=tuple(token for answer in answers for token in answer.token_ids),
            logprobs=tuple(logp for answer in answers for logp in answer.logprobs),
            text=answers[-1].text,
            finish_reason=one.finished or "length",
            seed=one.request.seed,
            weight_versions=answers[0].weight_versions,  # all turns were checked to be of one version
            tail=one.conversation.tail(),
            turns=tuple(one.turns),
            final_state=one.episode.environment,
            final_reward=reward,
            masked=one.episode.masked,
        )


def sampler_of(
    config: GRPOConfig,
    processor: Processor,
    engine: RolloutEngine,
    toolbox: Toolbox | None,
    seeds: SeedPlan,
    version: Callable[[], int],
) -> Sampler:
    """Return the engine, or with tools a loop over it."""
    if toolbox is None:
        return engine
    return TurnLoop(config, cast("ConversationProcessor", processor), engine, toolbox, seeds, version)


def _resized(seen: Observation, pictures: Sequence[Picture]) -> list[str | Image]:
    """The parts of an observation with its images at their final size."""
    following = iter(pictures)
    return [part if isinstance(part, str) else next(following).image for part in seen.parts]
