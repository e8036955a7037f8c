"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: images and chat messages to prompts, and how the models are built.

They share a prompt format (`<|vision_start|><|image_pad|>...<|vision_end|>`), a resize rule and
M-RoPE positions; what differs (patch size, position rule) is read from the model's own config, image
processor and `get_rope_index`, so no layout constant of a family is written here.

The resize. Both sides of an image are rounded to a multiple of `factor`, and the area is kept between two limits
(`smart_resize` in transformers' image_processing_qwen2_vl, which vLLM calls too). Applied to its own result the rule
mostly changes nothing, but not always: near the limits the area can fall outside again. Engines cannot be asked
not to resize, so an image is resized once, to a size that the rule maps to itself, and refused where there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from jinja2 import TemplateError
from torch import Tensor, nn
from transformers import AutoModel, AutoProcessor, GenerationConfig
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from mm_grpo.errors import ConfigError, DataError
from mm_grpo.processors.base import register
from mm_grpo.processors.chat_template import check_arguments
from mm_grpo.processors.family import Family
from mm_grpo.processors.model_folder import refuse_own_code
from mm_grpo.processors.special_tokens import SpecialTokensMode, conversation_ids
from mm_grpo.processors.tool_calls import answer_messages, knows_tools, with_tools
from mm_grpo.types import EnginePrompt, Picture, Prompt, Sample

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_WALK = 16
"""Most times that the resize rule is applied before an image counts as having no stable size."""
IMAGE_TOKENS = 1280
"""Most tokens of an image where `data.max_pixels` is not set: what Qwen's model cards advise. The models' own limit is
16,384, which makes some 15,000 of a 12-megapixel photo."""
_BOUNDARIES = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>")


class QwenVLFamily(Family):
    """`model.model.visual` makes features, its merger included; positions are those of M-RoPE.

    In Qwen3.5 most text layers are of linear attention.
    """

    position_axes = (3,)
    layer_types = frozenset({"full_attention", "linear_attention"})

    def tower(self, model: Any) -> nn.Module:
        tower: nn.Module = model.model.visual
        return tower

    def blank(self, model: Any) -> dict[str, Tensor]:
        """One merged patch of zeros: the least that the vision tower accepts."""
        vision = model.config.vision_config
        merge, width = vision.spatial_merge_size, vision.temporal_patch_size * vision.patch_size**2
        return {
            "pixel_values": torch.zeros(merge * merge, vision.in_channels * width),
            "image_grid_thw": torch.tensor([[1, merge, merge]]),
        }

    def count(self, vision: Mapping[str, Tensor]) -> int:
        return len(vision["image_grid_thw"]) if vision else 0


@register("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
class QwenVLProcessor:
    """The processor of one Qwen-VL model, read from its folder.

    `min_pixels` and `max_pixels` bound an image's area after the resize. None keeps the model's own, the larger of
    which is lowered to IMAGE_TOKENS; `save` writes the model's own then. Text-only and image prompts share one path.
    """

    family = QwenVLFamily()
    layout: Literal["shared_prefix", "padded"] = "shared_prefix"
    special_tokens: SpecialTokensMode = "refuse"

    def __init__(
        self,
        path: str,
        config: Any,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        trust_remote_code: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            self.hf: Any = AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
        ) as error:  # by what the files lack
            refuse_own_code(path, error, trust_remote_code)
            raise ConfigError(
                f"model.path = '{path}': the model has no readable processor ({error}); copy tokenizer, "
                "preprocessor_config.json and chat template beside the weights"
            ) from error
        if not self.hf.chat_template and not self.hf.tokenizer.chat_template:
            raise ConfigError(
                f"model.path = '{path}': the processor has no chat template; add chat_template.jinja"
            )
        self.chat_template_kwargs = check_arguments(chat_template_kwargs or {}, self.hf.chat_template, path)
        self.tokenizer: Any = self.hf.tokenizer
        # Without its vocabulary a tokenizer loads all the same, and drops all text but special tokens.
        if not self.tokenizer("a", add_special_tokens=False)["input_ids"]:
            raise ConfigError(
                f"model.path = '{path}': the tokenizer has no vocabulary; copy tokenizer.json, or vocab.json and "
                "merges.txt, beside the weights"
            )
        image_processor = self.hf.image_processor
        self.factor = int(image_processor.patch_size * image_processor.merge_size)
        own = {edge: int(image_processor.size[edge]) for edge in ("shortest_edge", "longest_edge")}
        self.min_pixels = int(min_pixels or own["shortest_edge"])
        default = max(min(own["longest_edge"], IMAGE_TOKENS * self.factor**2), own["shortest_edge"])
        self.max_pixels = int(max_pixels or default)
        if self.min_pixels > self.max_pixels:
            raise ConfigError(
                f"data.min_pixels = {self.min_pixels} is above data.max_pixels = {self.max_pixels} "
                "(a limit that is not set is the model's own); lower the first or raise the second"
            )
        image_processor.size = {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels}
        self._saved_size = image_processor.size if max_pixels else {**own, "shortest_edge": self.min_pixels}
        self.image_token_id = int(config.image_token_id)
        self.config = config
        self.media_token_ids = self._media_ids()
        self.stop_token_ids = self._stop_ids(path)
        self._stop_texts = [self.tokenizer.convert_ids_to_tokens(i) for i in sorted(self.stop_token_ids)]
        self._template: str = self.hf.chat_template or self.tokenizer.chat_template
        # its layers have no memory; only its method for positions is used
        with torch.device("meta"):
            self._rope: Any = AutoModel.from_config(config, trust_remote_code=trust_remote_code)

    def prompt(self, sample: Sample) -> Prompt:
        """Process one sample: resize once, tokenize once, expand one placeholder per image.

        `token_ids` [L], `position_ids` [3, L], `pixel_values` [patches, patch size]. Raises DataError
        naming the row for videos, an image without a fixed size, or special tokens typed into the text.
        """
        if sample.videos:
            raise DataError(
                f"{sample.uid}: the row has {len(sample.videos)} video(s); only images are supported"
            )
        images = tuple(self._resize(sample.uid, i, image) for i, image in enumerate(sample.images))
        collapsed = self._collapsed(sample.messages, sample.uid, sample.tools)
        self._check_placeholders(sample.uid, collapsed, len(images))

        vision = self._pixels(images)
        expanded = self._expanded(collapsed, vision)
        return Prompt(
            sample=sample,
            token_ids=tuple(expanded),
            engine_prompt=EnginePrompt(tuple(collapsed), images),
            position_ids=self._positions(expanded, vision.get("image_grid_thw")),
            vision=vision,
        )

    def picture(self, image: Image, *, row: str) -> Picture:
        """An image that comes in the middle of a conversation, at its fixed size. DataError where there is none."""
        resized = self._resize(row, 0, image)
        return Picture(resized, self._pixels([resized]))

    def extended(self, prompt: Prompt, token_ids: Sequence[int], pictures: Sequence[Picture]) -> Prompt:
        """`prompt` with further tokens, which hold one image token for each of `pictures`; nothing before changes."""
        vision = self.family.vision([prompt, *pictures])
        added = self._expanded(token_ids, self.family.vision(pictures))
        whole = [*prompt.token_ids, *added]
        sent = prompt.engine_prompt
        images = (*sent.images, *(picture.image for picture in pictures))
        return Prompt(
            sample=prompt.sample,
            token_ids=tuple(whole),
            engine_prompt=EnginePrompt((*sent.token_ids, *token_ids), images),
            position_ids=self._positions(whole, vision.get("image_grid_thw")),
            vision=vision,
        )

    def observation(self, answers: Sequence[Sequence[str | Image]], *, row: str) -> list[int]:
        """The collapsed ids between the end of the model's turn and its next one, by the chat template.

        `answers` are the texts and images of each tool's answer. DataError where the template cannot show them.
        """
        marker, images = "mm-grpo-turn", sum(not isinstance(part, str) for parts in answers for part in parts)
        before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": marker}]

        def render(messages: Sequence[Mapping[str, Any]]) -> str:
            _, _, rest = self._rendered(messages, row).partition(marker)
            end = next((token for token in self._stop_texts if rest.startswith(token)), None)
            return "" if end is None else rest[len(end) :]

        for as_tool in (True, False) if knows_tools(self._template) else (False,):
            messages = [*before, *answer_messages(answers, as_tool=as_tool)]
            # what a tool says is text, whatever it says
            ids = conversation_ids(render, self.tokenizer, messages, row, "as_text")
            if ids and sum(token == self.image_token_id for token in ids) == images:
                return ids
        raise DataError(
            f"{row}: the model's chat template does not show an answer with {images} image(s) after a turn of the "
            "model that ends with a stop token; conversations of several turns need one that does (model.path)"
        )

    def max_prompt_tokens(self, messages: Sequence[Mapping[str, Any]], images: int, *, row: str) -> int:
        return len(self._collapsed(messages, row)) + images * (self.max_pixels // self.factor**2)

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def save(self, path: str | Path) -> None:
        size, self.hf.image_processor.size = self.hf.image_processor.size, self._saved_size
        try:
            self.hf.save_pretrained(str(path))
        finally:
            self.hf.image_processor.size = size

    # parts -----------------------------------------------------------------------------------

    def _collapsed(
        self, messages: Sequence[Mapping[str, Any]], row: str, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """The ids of a conversation with one token for each image."""
        given = {}
        if tools and knows_tools(self._template):
            given["tools"] = list(tools)
        elif tools:
            messages = with_tools(messages, tools)

        def render(messages: Sequence[Mapping[str, Any]]) -> str:
            return self._rendered(messages, row, **given)

        return conversation_ids(render, self.tokenizer, messages, row, self.special_tokens)

    def _rendered(self, messages: Sequence[Mapping[str, Any]], row: str, **given: Any) -> str:
        try:
            text: str = self.hf.apply_chat_template(
                [dict(m) for m in messages],
                tokenize=False,
                add_generation_prompt=True,
                **self.chat_template_kwargs,
                **given,
            )
        except TemplateError as error:
            raise DataError(
                f"{row}: the model's chat template does not take the prompt ({error}); change the prompt, or "
                "the template in model.path"
            ) from error
        return text

    def _resize(self, uid: str, index: int, image: Any) -> Any:
        try:
            return resize_once(
                image, factor=self.factor, min_pixels=self.min_pixels, max_pixels=self.max_pixels
            )
        except NoFixedPoint as error:
            raise DataError(
                f"{uid}: image {index} cannot be brought to a stable size: {error}; legal are aspect ratios "
                "up to 200 and an area that fits data.min_pixels and data.max_pixels; crop the image or widen them"
            ) from error

    def _check_placeholders(self, uid: str, token_ids: Sequence[int], images: int) -> None:
        """The text must hold one image token per image and no other media token but the boundaries."""
        found = sum(token == self.image_token_id for token in token_ids)
        if found != images:
            raise DataError(
                f"{uid}: the prompt has {found} image token(s) for {images} image(s); do not type "
                f"'{self.hf.image_token}' into the text: each image part of the messages makes one"
            )
        boundary = self.tokenizer.convert_tokens_to_ids("<|vision_start|>")
        starts = sum(token == boundary for token in token_ids)
        video = sum(token == self.config.video_token_id for token in token_ids)
        if starts != images or video:
            raise DataError(
                f"{uid}: the prompt's text holds a media token of its own ({starts} '<|vision_start|>' for {images} "
                f"image(s), {video} '{self.hf.video_token}'); remove it from the row's text"
            )

    def _pixels(self, images: Sequence[Image]) -> dict[str, Tensor]:
        if not images:
            return {}
        features = self.hf.image_processor(list(images), do_resize=False, return_tensors="pt")
        return {"pixel_values": features["pixel_values"], "image_grid_thw": features["image_grid_thw"]}

    def _expanded(self, token_ids: Sequence[int], vision: Mapping[str, Tensor]) -> list[int]:
        """One image token for each merged patch of each image, in place of the one that stands for it."""
        merge = self.hf.image_processor.merge_size**2
        counts = (int(n) // merge for n in vision["image_grid_thw"].prod(-1)) if vision else iter(())
        return [
            same
            for token in token_ids
            for same in [token] * (next(counts) if token == self.image_token_id else 1)
        ]

    def _positions(self, token_ids: Sequence[int], grid: Tensor | None) -> Tensor:
        ids = torch.tensor([token_ids])
        kinds = (ids == self.image_token_id).int()
        positions: Tensor = self._rope.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grid)[0]
        return positions[:, 0].contiguous()

    def _media_ids(self) -> frozenset[int]:
        ids = {self.image_token_id, int(self.config.video_token_id)}
        ids |= {int(self.config.vision_start_token_id), int(self.config.vision_end_token_id)}
        known = self.tokenizer.get_vocab()
        return frozenset(ids | {known[token] for token in _BOUNDARIES if token in known})

    def _stop_ids(self, path: str) -> frozenset[int]:
        """The end tokens of the model's generation config, and the tokenizer's own."""
        try:
            eos = GenerationConfig.from_pretrained(path).eos_token_id
        except OSError:
            eos = None
        ids = set(eos if isinstance(eos, list) else [eos]) | {self.tokenizer.eos_token_id}
        return frozenset(int(i) for i in ids if i is not None)


class NoFixedPoint(ValueError):
    """The resize rule never settles for this image under these limits."""


def fixed_size(height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """(height, width) in pixels that the rule maps to itself, reached from the given size.

    Raises NoFixedPoint when the rule refuses the size (aspect ratio above 200) or does not settle.
    """
    size = (height, width)
    for _ in range(MAX_WALK):
        try:
            following = smart_resize(*size, factor=factor, min_pixels=min_pixels, max_pixels=max_pixels)
        except ValueError as error:
            raise NoFixedPoint(f"{width}x{height}: {error}") from error
        if following == size:
            return size
        size = following
    raise NoFixedPoint(
        f"{width}x{height} pixels: no size with sides in multiples of {factor} has an area between "
        f"min_pixels {min_pixels} and max_pixels {max_pixels} at this aspect ratio"
    )


def resize_once(image: Image, *, factor: int, min_pixels: int, max_pixels: int) -> Image:
    """The image at its fixed size, by bicubic resampling; the same object when it is there already."""
    from PIL.Image import Resampling

    height, width = fixed_size(
        image.height, image.width, factor=factor, min_pixels=min_pixels, max_pixels=max_pixels
    )
    if (image.height, image.width) == (height, width):
        return image
    return image.resize((width, height), Resampling.BICUBIC)
