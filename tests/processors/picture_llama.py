"""A family that mm_grpo does not ship, in one file outside the package: a CLIP tower, a projector and Llama (LLaVA).

Positions count tokens, every image is of one size, and the tower has a layer that its features do not come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from mm_grpo.errors import DataError
from mm_grpo.processors.family import Family
from mm_grpo.types import EnginePrompt, Prompt, Sample

IMAGE, STOP = "<image>", "<stop>"


class PictureLlamaConfig(LlavaConfig):
    model_type = "picture_llama"


class PictureLlama(LlavaForConditionalGeneration):
    config_class = PictureLlamaConfig


AutoConfig.register("picture_llama", PictureLlamaConfig, exist_ok=True)
AutoModelForImageTextToText.register(PictureLlamaConfig, PictureLlama, exist_ok=True)


class PictureLlamaFamily(Family):
    def blank(self, model: Any) -> dict[str, Tensor]:
        side = model.config.vision_config.image_size
        return {"pixel_values": torch.zeros(1, 3, side, side)}


class PictureLlamaProcessor:
    family = PictureLlamaFamily()
    layout: Literal["shared_prefix", "unshared"] = "shared_prefix"

    def __init__(self, path: str, config: Any, *, min_pixels: int | None, max_pixels: int | None) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self.side = config.vision_config.image_size
        self.features = (self.side // config.vision_config.patch_size) ** 2
        self.min_pixels = self.max_pixels = self.side**2
        self.image_token_id = config.image_token_id
        self.media_token_ids = frozenset({self.image_token_id})
        self.stop_token_ids = frozenset({self.tokenizer.eos_token_id})

    def prompt(self, sample: Sample) -> Prompt:
        collapsed = self._collapsed(sample.messages)
        if collapsed.count(self.image_token_id) != len(sample.images):
            raise DataError(f"{sample.uid}: {IMAGE} is typed into the text")
        images = tuple(image.resize((self.side, self.side)) for image in sample.images)
        lengths = {self.image_token_id: self.features}
        ids = [t for token in collapsed for t in [token] * lengths.get(token, 1)]
        pixels = [torch.from_numpy(np.array(image, dtype=np.float32)).permute(2, 0, 1) for image in images]
        return Prompt(
            sample=sample,
            token_ids=tuple(ids),
            engine_prompt=EnginePrompt(tuple(collapsed), images),
            position_ids=torch.arange(len(ids)),
            vision={"pixel_values": torch.stack(pixels) / 127.5 - 1} if pixels else {},
        )

    def max_prompt_tokens(self, sample: Sample, images: int) -> int:
        return len(self._collapsed(sample.messages)) + images * self.features

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def _collapsed(self, messages: Sequence[Any]) -> list[int]:
        text = "".join(part for message in messages for part in texts(message["content"]))
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def save(self, path: str | Path) -> None:
        self.tokenizer.save_pretrained(str(path))


def texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [IMAGE if part["type"] == "image" else part["text"] for part in content]


def build(path: Path) -> Path:
    """Write a tiny model with random weights to `path` and return it."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"unused {i}" for i in range(14))]
    words = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    special: Any = {"eos_token": STOP, "additional_special_tokens": [IMAGE]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    config = PictureLlamaConfig(
        vision_config={
            "model_type": "clip_vision_model", "num_hidden_layers": 3, "image_size": 28, "patch_size": 14, **sizes,
        },
        text_config={
            "model_type": "llama", "num_hidden_layers": 2, "num_key_value_heads": 1, "vocab_size": len(tokenizer),
            "max_position_embeddings": 512, "eos_token_id": tokenizer.eos_token_id, **sizes,
        },
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = PictureLlama(config)
    with torch.no_grad():  # large enough that answers depend on the images, and are not uniform
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                parameter.mul_(6.0)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
