"""The plain records that pass between the parts: Sample, Prompt, Completion, Group.

A dataset row becomes a `Sample`, a processor makes it a `Prompt`, an engine answers with
`Completion`s, and one prompt with its completions, rewards and advantages is a `Group`. No logic
lives here. Axis letters are those of the whole project: P prompts per step, G generations per
prompt, L prompt tokens, T completion tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeGuard

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

LARGEST = 2.0**63
"""Most, either way, that a score, a weight, a metric or a number of the config is: the product of two is a float32."""


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a number that sums and products of a run can hold."""
    return not isinstance(value, bool) and isinstance(value, int | float) and abs(value) <= LARGEST


FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Sample:
    """One dataset row, normalised.

    `uid` names the row (never its text): two equal rows have two uids. `messages` are chat messages
    whose content is a string or a list of parts; each `{"type": "image"}` part stands for the next
    entry of `images`, which are decoded, upright RGB pictures of any size. `columns` holds every
    other field of the row, for rewards. `tools` are JSON schemas of what the model may call, `row`
    the sample as it was before an environment added what it shows first, None where nothing was added.
    """

    uid: str
    messages: Sequence[Mapping[str, Any]]
    images: tuple[Image, ...] = ()
    videos: tuple[Any, ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    row: Sample | None = None


@dataclass(frozen=True)
class EnginePrompt:
    """What a rollout engine is sent: ids with one placeholder per image, and the images at final size."""

    token_ids: tuple[int, ...]
    images: tuple[Image, ...]


@dataclass(frozen=True)
class Prompt:
    """A processed sample.

    `token_ids` [L] are expanded: one image token per visual feature, what the learner trains on.
    `position_ids` [*A, L] are the model's own positions, with the axes A of its family: [3, L] for M-RoPE, [L] where
    tokens are counted. `vision` holds the tensors of the vision tower, in the family's own form; it is empty for a
    text-only prompt.
    """

    sample: Sample
    token_ids: tuple[int, ...]
    engine_prompt: EnginePrompt
    position_ids: Tensor
    vision: Mapping[str, Tensor]
    opens_thinking: bool = False
    """Whether the chat template ended it with `<think>`: a completion then begins in the midst of thinking."""

    @property
    def uid(self) -> str:
        return self.sample.uid

    @property
    def next_position(self) -> int:
        """The position of a completion's first token: M-RoPE positions of an image do not grow token by token."""
        return int(self.position_ids.max()) + 1


class Pictured(Protocol):
    """What holds tensors of the vision tower: a prompt, or an image of an observation."""

    @property
    def vision(self) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True, eq=False)
class Picture:
    """An image of an observation at its final size, with its tensors of the vision tower and the ids that it becomes.

    Equal images of a step are one object, so that the learner encodes each once.
    """

    image: Image
    vision: Mapping[str, Tensor]
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Tail:
    """What follows the prompt in a conversation of several turns, as the model runs it.

    `token_ids` [N] are expanded as those of a prompt: what was sampled, and between it what tools and environments
    answered. `sampled` [N] tells the two apart, `position_ids` [*A, N] go on from the prompt's, and `pictures` are the
    images of the observations in order.
    """

    token_ids: tuple[int, ...]
    sampled: tuple[bool, ...]
    position_ids: Tensor
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True)
class Turn:
    """One message of a conversation after its prompt: the model's (`assistant`), or the answer to a call (`tool`).

    Of the model `seed` and `tokens`, as many as it sampled, and `reward`, what the environment paid for its calls, None
    where nothing was said; of an answer the `name` of the tool, its `arguments`, its
    `images` at their final size, `tokens`, 0 where the answer before it holds those of both, and the `fault` if any.
    """

    role: Literal["assistant", "tool"]
    text: str
    tokens: int
    seed: int | None = None
    name: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[Image, ...] = ()
    fault: str | None = None
    reward: float | None = None

    def shown(self) -> dict[str, Any]:
        """The message as rewards and environments get it."""
        keys = ("role", "text", "images", "name", "arguments", "fault", "reward")
        return {key: getattr(self, key) for key in keys}


@dataclass(frozen=True)
class Completion:
    """One sampled answer; in a conversation of several turns, all that the model sampled in it.

    `token_ids` [T] include the end token when it was sampled. `logprobs` [T] are the engine's
    natural log-probabilities of those tokens under the distribution they were drawn from (media
    tokens masked, temperature applied). `weight_versions` are (first token, version) spans. `tail` is None in a
    conversation of one turn, where the model runs prompt and `token_ids`; `turns` are its messages, and `text` is the
    model's last one. `environment` is the conversation's own, None in another process, and
    `environment_reward` what it says of the conversation. `masked` keeps it out of the
    loss, with the reason.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: FinishReason
    seed: int
    weight_versions: tuple[tuple[int, int], ...] = ((0, 0),)
    tail: Tail | None = None
    turns: tuple[Turn, ...] = ()
    environment: Any = None
    environment_reward: float | None = None
    masked: str | None = None

    @property
    def turn_lengths(self) -> tuple[int, ...]:
        """Of each turn of the model how many tokens it sampled; () where there are no turns."""
        return tuple(turn.tokens for turn in self.turns if turn.role == "assistant")

    @property
    def run_length(self) -> int:
        """How many tokens the model runs after the prompt: what was sampled, and the observations."""
        return len(self.token_ids) if self.tail is None else len(self.tail.token_ids)


@dataclass(frozen=True)
class Group:
    """One prompt in its slot and what is known of it so far: completions, then rewards, then advantages.

    Each stage fills its own fields (`dataclasses.replace`); all are [G], and empty before their stage. Completions:
    `completions`, and `kl`, in nats, where rewards pay for the distance from the reference. Rewards: `rewards` are
    the totals, None where no reward applied, `parts` the raw scores by reward, `extra` the columns that rewards
    logged, and `turn_rewards[G][K]` the totals by turn of the model, () of a completion without turns. Advantages:
    `advantages`, 0 where there is no reward; with `algorithm.turn_gamma` those of first turns, that is of whole
    conversations, and `turn_advantages[G][K]` those of all turns, else (). `attempt` is above 0 when the group took
    the place of one whose rewards were all equal. In evaluation the slot is the number of the row.
    """

    slot: int
    prompt: Prompt
    completions: tuple[Completion, ...]
    rewards: tuple[float | None, ...] = ()
    advantages: tuple[float, ...] = ()
    attempt: int = 0
    kl: tuple[float, ...] = ()
    parts: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    extra: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    turn_rewards: tuple[tuple[float | None, ...], ...] = ()
    turn_advantages: tuple[tuple[float, ...], ...] = ()

    def without_local_state(self) -> Group:
        """Return a copy for another process: without vision tensors, observations and live objects."""
        completions = tuple(replace(c, tail=None, environment=None) for c in self.completions)
        return replace(self, prompt=replace(self.prompt, vision={}), completions=completions)

    @property
    def has_advantage(self) -> list[bool]:
        """Of each completion whether some token of it has an advantage that is not 0."""
        if self.turn_advantages:
            return [any(turns) for turns in self.turn_advantages]
        return [advantage != 0 for advantage in self.advantages]


@dataclass(frozen=True)
class UpdateRecord:
    """What one optimizer update did, for metrics and guards.

    `live_tokens` counts the tokens that are unmasked and unclipped and whose completion has a non-zero
    advantage: with one of them the gradient cannot honestly be 0. `update_norm` is the change of the
    weights, `grad_norm` the gradient's norm before clipping. `stepped` is False where the optimizer
    held the update back (no live work, or a gradient that is not finite). `boundaries` counts the backward
    passes that closed the accumulation: anything but 1 means that gradients were dropped.
    """

    learning_rate: float
    grad_norm: float
    update_norm: float
    live_tokens: int
    trainable_parameters: int
    stepped: bool = True
    boundaries: int = 1
