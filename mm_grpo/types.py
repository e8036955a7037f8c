"""The plain records that pass between the parts: Sample, Prompt, Completion, Group.

A dataset row becomes a `Sample`, a processor makes it a `Prompt`, an engine answers with `Completion`s, and one prompt
with its completions, rewards and advantages is a `Group`. No logic lives here. The axis letters of the whole project:
P prompts per step, G generations per prompt, L prompt tokens, T completion tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from mm_grpo.messages import media_parts

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]


# eq=False: two clips are compared by identity, because comparing their pixels would cost too much
@dataclass(frozen=True, eq=False)
class Video:
    """Frames that stand for a video, chosen once: learner, engine, rewards and pages all get these."""

    frames: tuple[Image, ...]
    """[F] upright RGB pictures of one size, in the order of time."""
    times: tuple[float, ...]
    """[F] seconds from the beginning of the file, also if only a part of the file is shown."""
    fps: float
    """Frames per second of the part that is shown: F over its seconds."""

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) of the frames in pixels, as PIL's."""
        return self.frames[0].size


Medium: TypeAlias = "Image | Video"
"""What a part of a message can show beside text."""


@dataclass(frozen=True)
class Sample:
    """A normalised dataset row."""

    uid: str
    """Names the row, never its text: two equal rows have two uids."""
    messages: Sequence[Mapping[str, Any]]
    """Chat messages; a content is a string or a list of parts. An `{"type": "image"}` part is the next of `images`, a
    `{"type": "video"}` part the next of `videos`; both may hold PIXEL_LIMITS, of a video for each frame."""
    images: tuple[Image, ...] = ()
    """Decoded, upright RGB pictures of any size."""
    videos: tuple[Video, ...] = ()
    """With frames of any size."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """All fields of the row by our names; rewards get them."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template for this row, over the run's."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the tools that the model may call."""
    row: Sample | None = None
    """The sample before the first messages of a conversation were added to it; None when nothing was added."""
    opening_digest: bytes | None = None
    """Digest of what was added to `row`; None when nothing was added."""
    prompt_columns: frozenset[str] = frozenset()
    """Names of `columns` that prompt and images were made of."""

    @property
    def media(self) -> tuple[Medium, ...]:
        """Images and videos in the order of their parts; those without a part come last."""
        kinds: dict[str, Iterator[Medium]] = {"image": iter(self.images), "video": iter(self.videos)}
        media = [next(kinds[part["type"]], None) for part in media_parts(self.messages)]
        return tuple(m for m in chain(media, *kinds.values()) if m is not None)

    @property
    def other_columns(self) -> dict[str, Any]:
        """The columns that the model is not shown."""
        return {name: value for name, value in self.columns.items() if name not in self.prompt_columns}


@dataclass(frozen=True)
class EnginePrompt:
    """A prompt as a rollout engine gets it: ids with one placeholder per medium, and the media at their final size."""

    token_ids: tuple[int, ...]
    media: tuple[Medium, ...]
    """In the order of their placeholders."""

    @property
    def images(self) -> tuple[Image, ...]:
        return split_media(self.media)[0]

    @property
    def videos(self) -> tuple[Video, ...]:
        return split_media(self.media)[1]


@dataclass(frozen=True)
class Prompt:
    """A processed sample."""

    sample: Sample
    token_ids: tuple[int, ...]
    """[L], expanded: one image token per visual feature. The learner trains on these."""
    # not the same ids: an engine expands placeholders itself, and a second time if it gets expanded ids
    engine_prompt: EnginePrompt
    position_ids: Tensor
    """[*A, L], the model's own positions. A are the axes of its family: [3, L] for M-RoPE, [L] for a plain count."""
    vision: Mapping[str, Tensor]
    """Tensors of the vision tower in the family's own form; empty for a text-only prompt."""
    opens_thinking: bool = False
    """True when the chat template ended it with `<think>`: a completion then begins in the midst of thinking."""

    @property
    def uid(self) -> str:
        return self.sample.uid

    @property
    def next_position(self) -> int:
        """Position of a completion's first token."""
        # not L: M-RoPE positions of an image do not grow token by token
        return int(self.position_ids.max()) + 1


class Pictured(Protocol):
    """A holder of tensors of the vision tower: a prompt, or an image of an observation."""

    @property
    def vision(self) -> Mapping[str, Tensor]: ...


# eq=False: equal images of a step are one object, and the learner encodes each object once
@dataclass(frozen=True, eq=False)
class Picture:
    """An image or a video of an observation."""

    medium: Medium
    """At its final size."""
    vision: Mapping[str, Tensor]
    token_ids: tuple[int, ...]
    """The ids that it becomes in the sequence."""


@dataclass(frozen=True)
class Tail:
    """The sequence after the prompt in a conversation of several turns, as the model runs it."""

    token_ids: tuple[int, ...]
    """[N], expanded: sampled tokens, and between them the answers to calls."""
    sampled: tuple[bool, ...]
    """[N], True for sampled tokens."""
    position_ids: Tensor
    """[*A, N], going on from the prompt's."""
    pictures: tuple[Picture, ...] = ()
    """Images of the answers, in order."""


@dataclass(frozen=True)
class Turn:
    """A message of a conversation after its prompt: the model's (`assistant`), or the answer to a call (`tool`)."""

    role: Literal["assistant", "tool"]
    text: str
    tokens: int
    """Tokens of the message. Of several answers to one turn the first has the tokens of all, the others 0."""
    seed: int | None = None
    """The model's turn: the seed that it was sampled with."""
    name: str | None = None
    """An answer: the tool."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """An answer: the arguments of the call."""
    images: tuple[Image, ...] = ()
    """An answer: its images at their final size."""
    videos: tuple[Video, ...] = ()
    """An answer: its videos at their final size."""
    fault: str | None = None
    """An answer: why the call failed; None if it did not."""
    reward: float | None = None
    """The model's turn: what its calls earned; None if nothing was reported."""

    def shown(self) -> dict[str, Any]:
        """Return the message as rewards get it."""
        keys = ("role", "text", "images", "videos", "name", "arguments", "fault", "reward")
        return {key: getattr(self, key) for key in keys}


@dataclass(frozen=True)
class Completion:
    """A sampled answer; in a conversation of several turns, all that the model sampled in it."""

    token_ids: tuple[int, ...]
    """[T], with the end token if it was sampled."""
    logprobs: tuple[float, ...]
    """[T], the engine's natural log-probabilities under the sampling distribution: media tokens masked, temperature
    applied."""
    text: str
    """The text of the model's last turn."""
    finish_reason: FinishReason
    seed: int
    weight_versions: tuple[tuple[int, int], ...] = ((0, 0),)
    """Spans of equal weights, as (first token, version)."""
    ids_compared: int = 0
    """Prompt ids that the engine ran and that were compared with the learner's; 0 if it is handed the learner's own."""
    tail: Tail | None = None
    """None in a conversation of one turn: the model then runs the prompt and `token_ids`."""
    turns: tuple[Turn, ...] = ()
    """Messages after the prompt; empty in a conversation of one turn."""
    final_state: Any = None
    """The object whose methods the model called; rewards get it. None if it lives in another process."""
    final_reward: float | None = None
    """What `final_state` says that the whole conversation earned."""
    masked: str | None = None
    """Reason why the completion is kept out of the loss; None if it is not."""

    @property
    def turn_lengths(self) -> tuple[int, ...]:
        """Sampled tokens of each of the model's turns; empty without turns."""
        return tuple(turn.tokens for turn in self.turns if turn.role == "assistant")

    @property
    def run_length(self) -> int:
        """Tokens that the model runs after the prompt: sampled ones and observations."""
        return len(self.token_ids) if self.tail is None else len(self.tail.token_ids)


@dataclass(frozen=True)
class Group:
    """A prompt and its completions, then their rewards, then their advantages.

    Each stage fills its own fields by `dataclasses.replace`. Fields are [G], and empty before their stage.
    """

    slot: int
    """Place of the prompt in the step; in evaluation the number of the row."""
    prompt: Prompt
    completions: tuple[Completion, ...]
    rewards: tuple[float | None, ...] = ()
    """Totals; None if no reward applied."""
    advantages: tuple[float, ...] = ()
    """0 if there is no reward. With `algorithm.turn_gamma`: of first turns, which is of whole conversations."""
    attempt: int = 0
    """Above 0 when the group replaces one whose rewards were all equal."""
    kl: tuple[float, ...] = ()
    """Distance from the reference in nats; filled when rewards pay for it."""
    parts: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """Raw scores by reward."""
    extra: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Columns that rewards logged."""
    turn_rewards: tuple[tuple[float | None, ...], ...] = ()
    """`[G][K]`, totals by turn of the model; () for a completion without turns."""
    turn_advantages: tuple[tuple[float, ...], ...] = ()
    """`[G][K]` with `algorithm.turn_gamma`, else empty."""

    def without_local_state(self) -> Group:
        """Return a copy for another process: without vision tensors, observations and live objects."""
        completions = tuple(replace(c, tail=None, final_state=None) for c in self.completions)
        return replace(self, prompt=replace(self.prompt, vision={}), completions=completions)

    @property
    def has_advantage(self) -> list[bool]:
        """True for each completion with an advantage that is not 0 at some token."""
        if self.turn_advantages:
            return [any(turns) for turns in self.turn_advantages]
        return [advantage != 0 for advantage in self.advantages]


@dataclass(frozen=True)
class UpdateRecord:
    """Figures of one optimizer update; metrics and guards read them."""

    learning_rate: float
    grad_norm: float
    """Norm of the gradient before clipping."""
    update_norm: float
    """Norm of the change of the weights."""
    live_tokens: int
    """Unmasked, unclipped tokens of completions with a non-zero advantage: with one of them the gradient is not 0."""
    trainable_parameters: int
    stepped: bool = True
    """False when the optimizer held the update back: no live tokens, or a gradient that is not finite."""
    boundaries: int = 1
    """Backward passes that closed the accumulation. Anything but 1 means that gradients were dropped."""


def message_part(content: str | Medium) -> dict[str, str]:
    """Return the part of a message that shows a text or stands for a medium."""
    if isinstance(content, str):
        return {"type": "text", "text": content}
    return {"type": "video" if isinstance(content, Video) else "image"}


def split_media(media: Iterable[Medium]) -> tuple[tuple[Image, ...], tuple[Video, ...]]:
    """Return the images and the videos of media, each in order."""
    media = list(media)
    videos = tuple(medium for medium in media if isinstance(medium, Video))
    return tuple(medium for medium in media if not isinstance(medium, Video)), videos
