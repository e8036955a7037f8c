"""Tiny random vision-language models of three families, and rows to feed them.

`build(family, path)` writes a model folder of about 100,000 parameters that AutoProcessor and
AutoModelForImageTextToText load: real architecture, byte-level tokenizer, random weights.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    GenerationConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLConfig,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from mm_grpo.types import Sample

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CLASSES: Mapping[str, tuple[Any, Any, Any]] = {
    "qwen2_vl": (Qwen2VLConfig, Qwen2VLProcessor, Qwen2VLVideoProcessor),
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLProcessor, Qwen2VLVideoProcessor),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLProcessor, Qwen3VLVideoProcessor),
}


def build(
    family: str, path: Path, *, seed: int = 0, tie: bool = True, max_pixels: int = 28 * 28 * 64
) -> Path:
    """Write a tiny model of the family to `path` and return it."""
    config_class, processor_class, video_class = _CLASSES[family]
    patch = 16 if family == "qwen3_vl" else 14
    tokenizer = Qwen2Tokenizer(eos_token="<|im_end|>", pad_token="<|endoftext|>").train_new_from_iterator(
        ["what is in the picture"] * 2, vocab_size=280, new_special_tokens=SPECIAL[1:]
    )
    sizes = {
        "size": {"shortest_edge": (2 * patch) ** 2, "longest_edge": max_pixels},
        "patch_size": patch,
        "merge_size": 2,
    }
    processor = processor_class(
        image_processor=Qwen2VLImageProcessor(**sizes),
        video_processor=video_class(**sizes),
        tokenizer=tokenizer,
        chat_template=TEMPLATE,
    )
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    config = config_class(
        text_config=_text(family, len(tokenizer), ids, tie),
        vision_config=_vision(family, patch),
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=tie,
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # large enough that answers depend on the images, and are not uniform
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "embed_tokens" not in name:
                parameter.mul_(4.0)
    model.generation_config = GenerationConfig(
        eos_token_id=ids["<|im_end|>"], pad_token_id=ids["<|endoftext|>"]
    )
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return path


def _text(family: str, vocab: int, ids: Mapping[str, int], tie: bool) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    text = {
        "vocab_size": vocab,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "bos_token_id": ids["<|endoftext|>"],
        "rope_parameters": rope,
        "tie_word_embeddings": tie,
    }
    if family == "qwen3_vl":
        text["head_dim"] = 32
        rope["mrope_interleaved"] = True
    return text


def _vision(family: str, patch: int) -> dict[str, Any]:
    common = {
        "depth": 2,
        "num_heads": 2,
        "patch_size": patch,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    if family == "qwen2_vl":
        return {**common, "embed_dim": 64, "hidden_size": 64, "mlp_ratio": 2}
    if family == "qwen2_5_vl":
        shape = {"hidden_size": 64, "out_hidden_size": 64, "intermediate_size": 96}
        return {**common, **shape, "window_size": 112, "fullatt_block_indexes": [1]}
    shape = {"hidden_size": 64, "out_hidden_size": 64, "intermediate_size": 96}
    return {**common, **shape, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}


def picture(seed: int, width: int = 84, height: int = 84) -> Image.Image:
    """A picture of random coloured blocks, different for every seed."""
    rng = random.Random(seed)
    image = Image.new("RGB", (width, height), tuple(rng.randrange(256) for _ in range(3)))
    for _ in range(4):
        x, y = rng.randrange(width), rng.randrange(height)
        image.paste(tuple(rng.randrange(256) for _ in range(3)), (x // 2, y // 2, x // 2 + 20, y // 2 + 24))
    return image


def sample(
    uid: str, text: str = "what is it", images: tuple[Image.Image, ...] = (), **columns: Any
) -> Sample:
    """A sample whose images stand before its text."""
    parts = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
    return Sample(uid=uid, messages=[{"role": "user", "content": parts}], images=images, columns=columns)
