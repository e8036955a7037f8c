"""`HFProcessor`: the base of all families' processors, over the model's own transformers processor.

A row becomes a prompt in five steps:

1. Its media, images and videos, are resized once (image_size.py).
2. The model's chat template makes text of its messages.
3. The text becomes ids with one placeholder for each medium: the engine gets these ("collapsed").
4. The model's own processor makes the ids of each medium, in the place of the placeholder: the learner trains on these.
5. The same call makes the vision tensors.

A family says which tokens are media, how it resizes and which tensors its tower takes; see `docs/add-a-family.md`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import AutoProcessor, GenerationConfig

from mm_grpo.errors import BadMedia, ConfigError, DataError
from mm_grpo.messages import pixel_limits, with_limits
from mm_grpo.processors.chat_template import check_arguments
from mm_grpo.processors.family import Family
from mm_grpo.processors.image_size import MAX_WALK, NoFixedPoint, Size, resize_to, settle
from mm_grpo.processors.model_folder import refuse_own_code
from mm_grpo.processors.special_tokens import conversation_ids
from mm_grpo.processors.tool_calls import knows_tools, with_tools
from mm_grpo.processors.turn_ids import TurnIds, count_kinds
from mm_grpo.processors.video_input import FRAMES_UNCHANGED, frames_array
from mm_grpo.types import EnginePrompt, Medium, Picture, Prompt, Sample, Video, message_part

if TYPE_CHECKING:
    from mm_grpo.processors.base import Layout

_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError)
"""Errors of transformers for missing or broken files of a model."""


class HFProcessor(TurnIds):
    """Processor of one model, read from its folder. Text-only and image prompts share one path.

    `min_pixels` and `max_pixels` bound an image's area after the resize; None keeps the model's own limit, and `save`
    then writes that. `video_max_pixels` bounds the area of a video's frame. Raises ConfigError for a folder without a
    readable processor, chat template or vocabulary, and for limits that no image of the family can keep.
    """

    family: Family
    layout: Layout = "shared_prefix"
    stable: ClassVar[str] = "an area that fits data.min_pixels and data.max_pixels"
    """Images that have a stable size, in words for the message about an image that has none."""
    template_tokens: ClassVar[Mapping[str, int]] = {}
    """Count of each media token that the chat template writes for one image, without the placeholder."""
    follows_rows: ClassVar[bool] = True
    no_video = ""
    """Why a model of a family with videos takes none."""
    frame: Size | None = None
    """(height, width) of the frames of all videos, in a family that knows no other."""
    content_as_parts: ClassVar[bool] = True
    """True when the chat template gets a message's string as a list of one part: some templates take no string."""

    def __init__(
        self,
        path: str,
        config: Any,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        video_max_pixels: int | None = None,
        trust_remote_code: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.config, self.trust_remote_code = config, trust_remote_code
        self.hf = self._load(path)
        self.tokenizer: Any = self.hf.tokenizer
        template = self.hf.chat_template or self.tokenizer.chat_template
        self.template: str = template.get("default", "") if isinstance(template, Mapping) else template
        if not self.template:
            raise ConfigError(f"model.path = '{path}': it has no chat template; add chat_template.jinja")
        self.chat_template_kwargs = check_arguments(chat_template_kwargs or {}, self.template)
        # a tokenizer loads without its vocabulary, and then drops all text but special tokens
        if not self.tokenizer("a", add_special_tokens=False)["input_ids"]:
            raise ConfigError(
                f"model.path = '{path}': the tokenizer has no vocabulary; copy tokenizer.json, or vocab.json and "
                "merges.txt, beside the weights"
            )
        self.image_token_id = int(self.tokenizer.convert_tokens_to_ids(self.placeholder()))
        vocabulary = self.tokenizer.get_vocab()
        self.video_token_id = vocabulary.get(self.video_placeholder())
        media = (vocabulary.get(token) for token in self.media_tokens())
        self.media_token_ids = frozenset(token for token in media if token is not None)
        self.stop_token_ids = self._stop_ids(path)
        self.min_pixels, self.max_pixels = self.limits(min_pixels, max_pixels)
        if (video_max_pixels or 0) > self.max_pixels:
            raise ConfigError(
                f"data.video_max_pixels = {video_max_pixels} is above data.max_pixels = {self.max_pixels} (the model's "
                "own if it is not set), which bounds frames too; lower the first or raise the second"
            )
        self.video_max_pixels = video_max_pixels or self.max_pixels
        if self.min_pixels > self.max_pixels:
            raise ConfigError(
                f"data.min_pixels = {self.min_pixels} is above data.max_pixels = {self.max_pixels} "
                "(a limit that is not set is the model's own); lower the first or raise the second"
            )

    # what a family must define ----------------------------------------------------------------------

    @abstractmethod
    def media_tokens(self) -> Iterator[str]:
        """Yield every token of images, videos and their boundaries, as text; the model may lack some."""

    @abstractmethod
    def limits(self, min_pixels: int | None, max_pixels: int | None) -> tuple[int, int]:
        """Set the user's limits in `hf`; return the least and largest area [pixels] of an image after the resize."""

    @abstractmethod
    def max_image_tokens(self) -> int:
        """Return the largest number of ids that one image becomes."""

    @abstractmethod
    def vision(self, outputs: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Join the outputs of `hf` for each image of a prompt, one at least, into its vision tensors."""

    @property
    def mm_processor_kwargs(self) -> Mapping[str, Any]:
        """Return vLLM's `mm_processor_kwargs`, so that its processor keeps the same limits."""
        return {}

    # the processor ---------------------------------------------------------------------------

    def prompt(self, sample: Sample) -> Prompt:
        """Process one sample: resize once, tokenize once, expand one placeholder per medium.

        Raises DataError with the row's name for videos that the family does not take, an image without a stable size,
        or special tokens in the text.
        """
        limits = chain(pixel_limits(sample.messages), repeat({}))
        pairs = enumerate(zip(sample.media, limits, strict=False))
        media = tuple(self._resize(sample.uid, i, *pair) for i, pair in pairs)
        collapsed = self.ids(sample)
        self._check_placeholders(sample.uid, collapsed, media)
        ids, vision = self.encode(media) if media else ([], {})
        expanded = self.expand(sample, collapsed, ids)
        engine_prompt = EnginePrompt(tuple(collapsed), media)
        return Prompt(
            # its media have their final size, and may go through here again; frames of full size would fill the memory
            sample=replace(sample, messages=with_limits(sample.messages, None), videos=engine_prompt.videos),
            token_ids=tuple(expanded),
            engine_prompt=engine_prompt,
            position_ids=self.positions(expanded, vision, media),
            vision=vision,
        )

    def image_size(self, size: Size, limits: Mapping[str, int]) -> Size:
        """Return the size to resize an image to, which the model's own rule under the run's limits maps to itself.

        `limits` are the image's own (`messages.PIXEL_LIMITS`), clipped to the run's; `max_pixels` counts if no size has
        both. NoFixedPoint if there is no size.
        """
        current = limits.get("resized_height", size[0]), limits.get("resized_width", size[1])
        low, high = limits.get("min_pixels", self.min_pixels), limits.get("max_pixels", self.max_pixels)
        result = self.fixed_size(current)
        fits = low <= math.prod(result) <= high and ("resized_height" not in limits or result == current)
        if fits or not limits:
            return result
        low, high = (min(max(limit, self.min_pixels), self.max_pixels) for limit in (low, high))
        bound = high
        for _ in range(MAX_WALK):
            current = self.limited_size(current, low, bound)
            # the engine applies the run's rule to it, which may choose a size above `high`
            if math.prod(result := self.fixed_size(current)) <= high:
                return result
            low, bound = self.min_pixels, min(bound, math.prod(current)) - 1
        raise NoFixedPoint(f"{size[1]}x{size[0]} pixels: the model's own processor would enlarge it")

    def refusal(self, size: Size, limits: Iterable[tuple[str, int]]) -> str:
        """Return why `image_size` refuses an upright image, what is legal and what to do; "" if it is taken."""
        row_limits = dict(limits)
        try:
            self.image_size(size, row_limits)
        except NoFixedPoint as error:
            extra = f", and the row's or its source's {row_limits}" if row_limits else ""
            legal = f"legal are {self.stable}{extra}; crop the image or widen them"
            return f"cannot be brought to a stable size: {error}; {legal}"
        return ""

    def picture(self, medium: Medium, *, row: str) -> Picture:
        resized = self._resize(row, 0, medium, {})
        ids, vision = self.encode([resized])
        return Picture(resized, vision, tuple(ids[0]))

    def extended(self, prompt: Prompt, token_ids: Sequence[int], pictures: Sequence[Picture]) -> Prompt:
        image_ids = [picture.token_ids for picture in pictures]
        ids = [*prompt.token_ids, *self._splice(token_ids, image_ids)]
        vision, collapsed = self.family.vision([prompt, *pictures]), prompt.engine_prompt
        media = (*collapsed.media, *(picture.medium for picture in pictures))
        return replace(
            prompt,
            token_ids=tuple(ids),
            engine_prompt=EnginePrompt((*collapsed.token_ids, *token_ids), media),
            position_ids=self.positions(ids, vision, media),
            vision=vision,
        )

    def max_prompt_tokens(self, sample: Sample, images: int) -> int:
        return len(self.ids(sample)) + images * self.max_image_tokens()

    def max_video_tokens(self, frames: int) -> int:
        """Return a bound on the ids that a video of so many frames of any size becomes."""
        return frames * self.max_image_tokens()

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def save(self, path: str | Path) -> None:
        self.hf.save_pretrained(str(path))

    # what a family may override ----------------------------------------------------------

    def placeholder(self) -> str:
        """Return the token that stands for an image in the text that the chat template makes."""
        return str(self.hf.image_token)

    def video_placeholder(self) -> str:
        """Return the token that stands for a video; "" in a family whose videos are not supported."""
        return ""

    def frame_size(self, size: Size, limits: Mapping[str, int]) -> Size:
        """Return the size to resize the frames of a video to. NoFixedPoint if there is none."""
        high = min(limits.get("max_pixels", self.video_max_pixels), self.video_max_pixels)
        if self.frame is None:
            return self.image_size(size, {**limits, "max_pixels": high})
        height, width = self.frame
        row_size = limits.get("resized_height", height), limits.get("resized_width", width)
        if row_size != self.frame or not limits.get("min_pixels", 0) <= height * width <= high:
            raise NoFixedPoint(
                f"the model sees every frame at {width}x{height} = {height * width} pixels, which the limits of the "
                f"row or data.video_max_pixels = {self.video_max_pixels} do not allow; remove them"
            )
        return self.frame

    def fixed_size(self, size: Size) -> Size:
        """Return the size to resize to, which the model's own rule maps to itself. NoFixedPoint if there is none."""
        return settle(size, lambda size: self.limited_size(size, self.min_pixels, self.max_pixels))

    def limited_size(self, size: Size, min_pixels: int, max_pixels: int) -> Size:
        """Apply the rule once, with limits within the run's. NoFixedPoint if it cannot keep them; here it has none."""
        raise NoFixedPoint("this model's images cannot be made smaller or larger one by one")

    def encode(self, media: Sequence[Medium]) -> tuple[list[list[int]], dict[str, Tensor]]:
        """Return the ids of each medium, which is at its final size, and the vision tensors of all."""
        outputs = [self.output_of(medium) for medium in media]
        return [output["input_ids"][0].tolist() for output in outputs], self.vision(outputs)

    def output_of(self, medium: Medium) -> Any:
        """Return the output of `hf` for one medium, which is at its final size."""
        # one medium a call, as in vLLM, which caches the result for each medium
        options = {"return_tensors": "pt", "add_special_tokens": False}
        if not isinstance(medium, Video):
            return self.hf(text=[self.placeholder()], images=[medium], **options)
        videos = {"videos": [frames_array(medium)], "videos_kwargs": FRAMES_UNCHANGED}
        return self.hf(text=[self.video_placeholder()], **videos, **options)

    def render(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
        """Render a conversation by the chat template, by default up to the beginning of the answer."""
        # not by the processor: some add options of videos to every call, and warn of them as unknown
        text: str = self.tokenizer.apply_chat_template(
            list(messages),
            chat_template=self.template,
            tokenize=False,
            **{"add_generation_prompt": True, **arguments},
        )
        return text

    def expand(self, sample: Sample, collapsed: Sequence[int], images: Sequence[Sequence[int]]) -> list[int]:
        """Return the ids of a prompt with the ids of its media, `images`, in the place of placeholders."""
        return self._splice(collapsed, images)

    def positions(
        self, token_ids: Sequence[int], vision: Mapping[str, Tensor], media: Sequence[Medium]
    ) -> Tensor:
        """Return the model's positions [*A, L] of a prompt's ids: here they count tokens."""
        return torch.arange(len(token_ids))

    # parts -----------------------------------------------------------------------------------

    def _load(self, path: str) -> Any:
        try:
            return AutoProcessor.from_pretrained(path, trust_remote_code=self.trust_remote_code)
        except _UNREADABLE as error:
            refuse_own_code(path, error, self.trust_remote_code)
            raise ConfigError(
                f"model.path = '{path}': the model has no readable processor ({error}); copy tokenizer, "
                "preprocessor_config.json and chat template beside the weights"
            ) from None

    def ids(
        self, sample: Sample, change: Callable[[str], str] = lambda text: text, **arguments: Any
    ) -> list[int]:
        """Return the ids of a sample's conversation, with one placeholder for each image; `change` edits its text.

        `arguments` go to `render`, over the row's.
        """
        where = f"{sample.uid}: chat_template_kwargs"
        arguments = check_arguments(sample.chat_template_kwargs, self.template, where, DataError) | arguments
        messages = sample.messages
        if sample.tools and knows_tools(self.template):
            arguments["tools"] = list(sample.tools)
        elif sample.tools:
            messages = with_tools(messages, sample.tools)

        def render(messages: Sequence[Mapping[str, Any]]) -> str:
            text = self.text_of(messages, sample.uid, **arguments)
            self._check_shown(sample.uid, messages, text)
            return change(text)

        return conversation_ids(render, self.tokenizer, messages, sample.uid)

    def _check_shown(self, uid: str, messages: Sequence[Mapping[str, Any]], text: str) -> None:
        """DataError if the chat template left out the text of a system or user message."""
        rendered = "".join(text.split())  # templates strip and add line breaks
        for message in messages:
            content = message["content"] if message["role"] in ("system", "user") else ""
            parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
            if lost := [part[:60] for part in parts if "".join(part.split()) not in rendered]:
                raise DataError(
                    f"{uid}: the model's chat template drops the text of the {message['role']} message ({lost[0]!r}); "
                    "correct the template in model.path"
                )

    def text_of(self, messages: Sequence[Mapping[str, Any]], row: str, **arguments: Any) -> str:
        """Render messages, one placeholder for each image. DataError if the chat template refuses them."""
        copies = [dict(message) for message in messages]
        if self.content_as_parts:
            for message in copies:
                if isinstance(message.get("content"), str):
                    message["content"] = [{"type": "text", "text": message["content"]}]
        try:
            return self.render(copies, **{**self.chat_template_kwargs, **arguments})
        except TemplateError as error:
            raise DataError(
                f"{row}: the model's chat template does not take the prompt ({error}); change the prompt, or "
                "the template in model.path"
            ) from None

    def _splice(self, collapsed: Sequence[int], images: Sequence[Sequence[int]]) -> list[int]:
        remaining, placeholders = iter(images), (self.image_token_id, self.video_token_id)
        return [t for token in collapsed for t in (next(remaining) if token in placeholders else (token,))]

    def _resize(self, uid: str, index: int, medium: Medium, limits: Mapping[str, int]) -> Medium:
        size = medium.size[::-1]
        if isinstance(medium, Video):
            if self.video_token_id is None:
                raise DataError(
                    f"{uid}: a video is shown, and this model cannot be trained on videos: "
                    f"{self.no_video or f'models of type {self.config.model_type!r} get images alone'}; leave it out"
                )
            try:
                final = self.frame_size(size, limits)
            except NoFixedPoint as error:
                raise BadMedia(f"{uid}: video {index}: its frames have no stable size: {error}") from None
            return replace(medium, frames=tuple(resize_to(frame, final) for frame in medium.frames))
        if why := self.refusal(size, limits.items()):
            raise BadMedia(f"{uid}: image {index} {why}")
        return resize_to(medium, self.image_size(size, limits))

    def _check_placeholders(self, uid: str, token_ids: Sequence[int], media: Sequence[Medium]) -> None:
        """DataError unless the ids hold the placeholder of each medium, and no media tokens but the template's."""
        # ids that the template wrote in another order than the media would show one in the place of another
        kinds = {self.image_token_id: "image", self.video_token_id: "video"}
        actual = [kinds[token] for token in token_ids if token in kinds]
        expected = [message_part(medium)["type"] for medium in media]
        if actual != expected:
            raise DataError(
                f"{uid}: the prompt has {len(actual)} placeholder(s), {count_kinds(actual)}, for {len(expected)} "
                f"media, {count_kinds(expected)}; do not type '{self.placeholder()}' into the text: each image or "
                "video part of the messages makes one, if the model's chat template has a place for it"
            )
        for token in sorted(self.media_token_ids - kinds.keys()):
            name = str(self.tokenizer.convert_ids_to_tokens(token))
            count = token_ids.count(token)
            if count != len(media) * self.template_tokens.get(name, 0):
                raise DataError(
                    f"{uid}: the prompt's text holds a media token of its own ({count} '{name}' for {len(media)} "
                    "image(s) and video(s)); remove it from the row's text"
                )

    def _stop_ids(self, path: str) -> frozenset[int]:
        """Return the end tokens of the model's generation config, and the tokenizer's."""
        # a chat model's turn often ends with another token than the tokenizer's: both stop
        try:
            eos = GenerationConfig.from_pretrained(path).eos_token_id
        except OSError:
            eos = None
        ids = set(eos if isinstance(eos, list) else [eos]) | {self.tokenizer.eos_token_id}
        return frozenset(int(i) for i in ids if i is not None)
