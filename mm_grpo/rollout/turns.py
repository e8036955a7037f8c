"""Conversations of several turns: the model samples, tools answer, and the model goes on, until it calls no tool.

No conversation waits for another: each goes on as soon as its turn has ended and its tools have answered. Meanwhile the
engine works on the others (`RequestStream`), and so do the tools, in their processes. An engine that can only answer
whole batches is asked turn by turn. A turn is an ordinary request: its prompt is the conversation so far
(conversation.py), its seed the one of the seed law (seeds.py). So no sample depends on the order in which tools answer,
and the engine's tokens are compared with the learner's as ever.

A conversation ends when the model writes no call, when its environment is done, after `rollout.max_turns` turns, or
when the next observation does not fit into `rollout.max_completion_length`, which bounds all tokens after the prompt.
In the last two cases its `finish_reason` is "length", as of a completion that was cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, cast

from mm_grpo.environments.observation import Observation, digest, failed
from mm_grpo.errors import BadMedia
from mm_grpo.processors.tool_calls import ToolCall, tool_calls
from mm_grpo.rollout.conversation import Conversation
from mm_grpo.rollout.engine import BatchStream, Follows, Request, require_answers
from mm_grpo.types import Completion, FinishReason, Medium, Picture, Turn, split_media

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig
    from mm_grpo.environments.host import Episode, Task
    from mm_grpo.environments.toolbox import Toolbox
    from mm_grpo.processors.base import ConversationProcessor, Processor
    from mm_grpo.rollout.engine import RequestStream, RolloutEngine
    from mm_grpo.rollout.seeds import SeedPlan


class Sampler(Protocol):
    """An engine, or a loop of turns over one."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]: ...

    def stream(self) -> RequestStream: ...


@dataclass(eq=False)
class _Talk:
    """A conversation on its way, with what the engine, the tools and the learner need of it."""

    request: Request
    conversation: Conversation
    episode: Episode
    turns: list[Turn] = field(default_factory=list)
    media_count: int = 0
    """Images and videos of all observations."""
    finish_reason: FinishReason | None = None
    """None while the conversation goes on."""
    number: int | None = None
    """Number of its last request in the engine's stream."""
    new_pictures: Sequence[Picture] = ()
    """Media of observations since that request."""
    calls: Sequence[ToolCall] = ()
    """Calls of its last turn."""
    tasks: Sequence[Task] = ()
    """The host's tasks for the well-formed `calls`."""

    @property
    def tools_answered(self) -> bool:
        return all(task.finished for task in self.tasks)

    def tool_answers(self) -> list[tuple[ToolCall, Observation]]:
        """Return each call with its answer, in order."""
        tasks = iter(self.tasks)
        return [
            (c, next(tasks).answer if c.problem is None else failed("malformed_call", c.problem))
            for c in self.calls
        ]


class TurnLoop:
    """Sampler that answers each request with a whole conversation.

    `version` returns the number of the weights that the engine holds.
    """

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
        """Return one conversation per request, in order. Environments stay open until the next call: rewards may look.

        Raises what the engine raises, ToolError for an environment that cannot be used, and GuardStop when a turn
        changed tokens of the turn before.
        """
        self.close()
        episodes = self.toolbox.episodes([request.prompt.sample for request in requests])
        talks = [
            _Talk(request, Conversation(request.prompt, self.processor), episode)
            for request, episode in zip(requests, episodes, strict=True)
        ]
        self._run(talks)
        rewards = self.toolbox.host.rewards(episodes, [talk.turns for talk in talks])
        return [self._completion(talk, reward) for talk, reward in zip(talks, rewards, strict=True)]

    def stream(self) -> RequestStream:
        """Open a stream that answers whole batches."""
        return BatchStream(self.generate)

    def close(self) -> None:
        """Close the environments of the last call, which rewards could still look at."""
        self.toolbox.host.close_episodes()

    def _run(self, talks: Sequence[_Talk]) -> None:
        """Lead the conversations to their ends."""
        host, pictures = self.toolbox.host, dict[bytes, Picture]()
        calling: list[_Talk] = []
        try:
            with self.engine.stream() as stream:
                in_step = self.config.rollout.synchronous_turns or isinstance(stream, BatchStream)
                sampling = dict(self._ask(stream, talk) for talk in talks)
                while sampling or calling:
                    for number, answer in stream.step() if sampling else ():
                        talk, request = sampling.pop(number)
                        require_answers([request], [answer], self.version())
                        talk.calls = self._take_turn(talk, answer)
                        if talk.calls:
                            well_formed = (call for call in talk.calls if call.problem is None)
                            talk.tasks = host.start(
                                [(talk.episode, c.name, c.arguments) for c in well_formed]
                            )
                            calling.append(talk)
                        else:
                            stream.release(number)
                    host.work(wait=not sampling)
                    if in_step and (sampling or not all(talk.tools_answered for talk in calling)):
                        continue
                    for talk in [talk for talk in calling if talk.tools_answered]:
                        calling.remove(talk)
                        self._observe(talk, pictures)
                        if talk.finish_reason is None:
                            sampling |= [self._ask(stream, talk)]
                        elif talk.number is not None:
                            stream.release(talk.number)
        finally:
            if calling:
                host.abandon()

    def _ask(self, stream: RequestStream, talk: _Talk) -> tuple[int, tuple[_Talk, Request]]:
        """Ask for a conversation's next turn."""
        request, conversation = talk.request, talk.conversation
        if turn := len(conversation.answers):
            tokens = request.sampling.max_tokens - conversation.run_length
            seed = self.seeds.of_turn(request.seed, turn)
            request = Request(conversation.prompt, seed, replace(request.sampling, max_tokens=tokens))
        follows = None if talk.number is None else Follows(talk.number, talk.new_pictures)
        talk.number, talk.new_pictures = stream.add_request(request, follows), ()
        return talk.number, (talk, request)

    def _take_turn(self, talk: _Talk, answer: Completion) -> list[ToolCall]:
        """Append the model's turn; returns the calls to be made, [] if the conversation has ended."""
        talk.conversation.add_answer(answer)
        talk.turns.append(Turn("assistant", answer.text, len(answer.token_ids), seed=answer.seed))
        calls = tool_calls(answer.text)
        if answer.finish_reason != "stop" or not calls:
            talk.finish_reason = answer.finish_reason
        elif len(talk.conversation.answers) == self.config.rollout.max_turns:
            talk.finish_reason = "length"
        return [] if talk.finish_reason is not None else calls

    def _observe(self, talk: _Talk, pictures: dict[bytes, Picture]) -> None:
        """Append the answers to the calls of a turn, if they fit, and note the turn's reward."""
        talk.turns[-1] = replace(talk.turns[-1], reward=talk.episode.take_step_reward())
        if talk.episode.masked is not None:
            talk.finish_reason = "stop"
            return
        turns: list[Turn] = []
        contents: list[list[str | Medium]] = []
        new_pictures: list[Picture] = []
        limit = self.config.rollout.max_images_per_episode
        for call, observation in talk.tool_answers():
            if talk.media_count + len(observation.media) > limit:
                text = f"no more than {limit} images and videos are shown in a conversation"
                observation = failed("too_many_images", text)
            try:
                resized = [self._picture(talk, medium, pictures) for medium in observation.media]
            except BadMedia as error:  # a strip of pixels, say, that no resizing makes legal
                observation, resized = failed("bad_result", str(error)), []
            talk.media_count += len(resized)
            media = tuple(picture.medium for picture in resized)
            about = call.name, dict(call.arguments), *split_media(media), observation.fault
            turns.append(Turn("tool", observation.text, 0, None, *about))
            contents.append(_content(observation, media))
            new_pictures += resized
        conversation = talk.conversation
        ids = self.processor.observation(contents, conversation.start.sample)
        length = conversation.add_observation(ids, new_pictures, below=talk.request.sampling.max_tokens)
        if length is None:  # no token would be left for the next turn
            talk.finish_reason = "length"
            return
        # the tokens of all answers are counted at the first one
        talk.turns += [replace(turns[0], tokens=length), *turns[1:]]
        talk.new_pictures = new_pictures
        if talk.episode.done:
            talk.finish_reason = "stop"

    def _picture(self, talk: _Talk, medium: Medium, pictures: dict[bytes, Picture]) -> Picture:
        """Return a medium at its final size; equal ones are one object, which the learner encodes once."""
        key = digest([medium])
        if key not in pictures:
            pictures[key] = self.processor.picture(medium, row=talk.conversation.start.uid)
        return pictures[key]

    def _completion(self, talk: _Talk, reward: float | None) -> Completion:
        """Return what the model sampled in a conversation as one completion."""
        answers = talk.conversation.answers
        return Completion(
            token_ids=tuple(token for answer in answers for token in answer.token_ids),
            logprobs=tuple(logp for answer in answers for logp in answer.logprobs),
            text=answers[-1].text,
            finish_reason=talk.finish_reason or "length",
            seed=talk.request.seed,
            weight_versions=answers[0].weight_versions,  # all turns were checked to be of one version
            ids_compared=sum(answer.ids_compared for answer in answers),
            tail=talk.conversation.tail(),
            turns=tuple(talk.turns),
            final_state=talk.episode.environment,
            final_reward=reward,
            masked=talk.episode.masked,
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


def _content(observation: Observation, media: Sequence[Medium]) -> list[str | Medium]:
    """Return the parts of an observation with its media at their final size."""
    resized = iter(media)
    return [part if isinstance(part, str) else next(resized) for part in observation.parts]
