"""Conversations of several turns: the model samples, tools answer, and the model goes on, until it calls no tool.

All conversations of a call advance together: each turn is one call of the engine for those that go on. A turn is an
ordinary request whose prompt is the conversation so far (conversation.py), with the seed that the seed law gives it
(seeds.py), so engines know nothing of turns, and what they run is compared with what the learner trains on as ever.

A conversation ends when the model writes no call, when its environment is done, after `rollout.max_turns` turns, or
when the next observation does not fit into `rollout.max_completion_length`, which bounds all tokens after the prompt.
In the last two cases it is flagged as a completion that was cut off (`finish_reason` "length").
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Protocol, cast

from mm_grpo.environments.observation import Observation, failed
from mm_grpo.errors import ConfigError, DataError
from mm_grpo.processors.tool_calls import ToolCall, tool_calls
from mm_grpo.rollout.conversation import Conversation
from mm_grpo.rollout.engine import Request, require_answers
from mm_grpo.types import Completion, FinishReason, Picture, Turn

if TYPE_CHECKING:
    from PIL.Image import Image

    from mm_grpo.config import GRPOConfig
    from mm_grpo.environments.host import Episode
    from mm_grpo.environments.toolbox import Toolbox
    from mm_grpo.processors.base import ConversationProcessor, Processor
    from mm_grpo.rollout.engine import RolloutEngine
    from mm_grpo.rollout.seeds import SeedPlan

log = logging.getLogger(__name__)


class Sampler(Protocol):
    """An engine, or a loop of turns over one."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]: ...


@dataclass
class _Running:
    """One generation on its way; `finished` says how it ended, None while it goes on."""

    request: Request
    conversation: Conversation
    episode: Episode
    turns: list[Turn] = field(default_factory=list)
    images: int = 0
    finished: FinishReason | None = None


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
        pictures: dict[bytes, Picture] = {}
        for turn in range(self.config.rollout.max_turns):
            active = [one for one in running if one.finished is None]
            if not active:
                break
            asked = [self._request(one, turn) for one in active]
            answers = self.engine.generate(asked)
            require_answers(asked, answers, self.version())
            called = [
                (one, calls)
                for one, answer in zip(active, answers, strict=True)
                if (calls := self._answered(one, answer, turn))
            ]
            for one, answered in zip((one for one, _ in called), self._call_all(called), strict=True):
                self._observe(one, answered, pictures)
        rewards = self.toolbox.host.rewards(episodes)
        if masked := [episode for episode in episodes if episode.masked is not None]:
            log.warning(
                "%d of %d conversations are masked: %s: %s",
                len(masked),
                len(episodes),
                masked[0].uid,
                masked[0].masked,
            )
        return [self._completion(one, reward) for one, reward in zip(running, rewards, strict=True)]

    def close(self) -> None:
        """Close the environments of the last call, which rewards could still look at."""
        self.toolbox.host.close_episodes()

    def _request(self, one: _Running, turn: int) -> Request:
        sampling, conversation = one.request.sampling, one.conversation
        if turn == 0:
            return one.request
        left = replace(sampling, max_tokens=sampling.max_tokens - conversation.run_length)
        return Request(conversation.prompt, self.seeds.of_turn(one.request.seed, turn), left)

    def _answered(self, one: _Running, answer: Completion, turn: int) -> list[ToolCall]:
        """Take the model's turn; the calls to be made, none where the conversation has ended."""
        one.conversation.answered(answer)
        one.turns.append(Turn("assistant", answer.text, len(answer.token_ids), seed=answer.seed))
        calls = tool_calls(answer.text)
        if answer.finish_reason != "stop" or not calls:
            one.finished = answer.finish_reason
        elif turn + 1 == self.config.rollout.max_turns:
            one.finished = "length"
        return [] if one.finished is not None else calls

    def _call_all(
        self, called: Sequence[tuple[_Running, Sequence[ToolCall]]]
    ) -> list[list[tuple[ToolCall, Observation]]]:
        """Make all calls of a turn together; each conversation's calls with their answers, in order."""
        made = [
            (one.episode, call.name, call.arguments)
            for one, calls in called
            for call in calls
            if call.problem is None
        ]
        answers = iter(self.toolbox.host.call_all(made))
        return [
            [(c, next(answers) if c.problem is None else failed("malformed_call", c.problem)) for c in calls]
            for _, calls in called
        ]

    def _observe(
        self,
        one: _Running,
        answered: Sequence[tuple[ToolCall, Observation]],
        pictures: dict[bytes, Picture],
    ) -> None:
        """Append what the calls of a turn answered, where it fits."""
        if one.episode.masked is not None:
            one.finished = "stop"
            return
        made: list[tuple[Turn, list[Picture], Observation]] = []
        for call, seen in answered:
            most = self.config.rollout.max_images_per_episode
            one.images += len(seen.images)
            if one.images > most:
                one.images -= len(seen.images)
                seen = failed("too_many_images", f"no more than {most} images are shown in a conversation")
            try:
                shown = [self._picture(one, image, pictures) for image in seen.images]
            except DataError as error:  # a strip of pixels, say, that no resizing makes legal
                one.images -= len(seen.images)
                seen, shown = failed("bad_result", str(error)), []
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
        if one.episode.done:
            one.finished = "stop"

    def _picture(self, one: _Running, image: Image, pictures: dict[bytes, Picture]) -> Picture:
        """An image at its final size; equal ones of a call are one object, which the learner encodes once."""
        key = sha256(f"{image.mode} {image.size}".encode() + image.tobytes()).digest()
        if key not in pictures:
            pictures[key] = self.processor.picture(image, row=one.conversation.start.uid)
        return pictures[key]

    def _completion(self, one: _Running, reward: float | None) -> Completion:
        """What the model sampled in a conversation, as one completion."""
        answers, starts = one.conversation.answers, [0]
        for answer in answers:
            starts.append(starts[-1] + len(answer.token_ids))
        spans = (
            (start + at, version)
            for start, answer in zip(starts, answers, strict=False)
            for at, version in answer.weight_versions
        )
        return Completion(
            token_ids=tuple(token for answer in answers for token in answer.token_ids),
            logprobs=tuple(logp for answer in answers for logp in answer.logprobs),
            text=answers[-1].text,
            finish_reason=one.finished or "length",
            seed=one.request.seed,
            weight_versions=tuple(spans),
            tail=one.conversation.tail(),
            turns=tuple(one.turns),
            environment=one.episode.environment,
            environment_reward=reward,
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
    """What answers requests: the engine, or with tools a loop over it. ConfigError for a processor without turns."""
    if toolbox is None:
        return engine
    missing = [name for name in ("picture", "extended", "observation") if not hasattr(processor, name)]
    if missing:
        raise ConfigError(
            f"rollout.tools: conversations of several turns need {', '.join(missing)} of the processor "
            f"({type(processor).__qualname__}); see mm_grpo.processors.base.ConversationProcessor"
        )
    return TurnLoop(config, cast("ConversationProcessor", processor), engine, toolbox, seeds, version)


def _resized(seen: Observation, pictures: Sequence[Picture]) -> list[str | Image]:
    """The parts of an observation with its images at their final size."""
    following = iter(pictures)
    return [part if isinstance(part, str) else next(following).image for part in seen.parts]
