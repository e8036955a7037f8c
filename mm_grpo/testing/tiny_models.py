"""Tiny random models of the families that have a processor, written in a second and without any download.

`build(family, path)` writes a model folder of about 100,000 parameters that AutoProcessor and
AutoModelForImageTextToText load: the family's real architecture, a byte-level tokenizer, random weights.
For `mm-grpo train --smoke` and the tests; such a model answers with noise.

To add a family: the names of its config, processor and video processor in `_CLASSES`, its shapes in `_text` and
`_vision`, and a word of its published names in `_NAMES`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForImageTextToText, GenerationConfig, Qwen2Tokenizer, Qwen2VLImageProcessor

from mm_grpo.errors import ConfigError
from mm_grpo.processors.model_folder import read_config

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Those whose text layers are all of full attention."""
HYBRID = "qwen3_5"
"""The family with layers of linear attention beside."""
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
_NAMES = {"qwen2_vl": "qwen2vl", "qwen2_5_vl": "qwen25vl", "qwen3_vl": "qwen3vl", "qwen3_5": "qwen35"}
"""What stands in a model's published name, without its dots, dashes and underscores."""
_CLASSES: Mapping[str, tuple[str, str, str]] = {
    "qwen2_vl": ("Qwen2VLConfig", "Qwen2VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", "Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen3_vl": ("Qwen3VLConfig", "Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
    "qwen3_5": ("Qwen3_5Config", "Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
}
"""By name, for a version of transformers may lack some."""
_AS_DRAWN = ("embed_tokens", "in_proj_qkv", "in_proj_a", "in_proj_b", "linear_attn.conv1d")
"""Weights that are left as they are drawn: layers of linear attention lose digits where these are large."""


def family_of(path: str) -> str:
    """The family of the model at `path`: from its config in a folder, else from its name.

    Raises ConfigError when neither tells.

    >>> family_of("Qwen/Qwen2.5-VL-3B-Instruct")
    'qwen2_5_vl'
    """
    if (Path(path) / "config.json").is_file():
        name = str(read_config(path).model_type)
        found = [name] if name in _CLASSES else []
    else:
        plain = re.sub(r"[._-]", "", path.rstrip("/").split("/")[-1].lower())
        found = [family for family, word in _NAMES.items() if word in plain]
    if len(found) != 1:
        raise ConfigError(
            f"model.path = {path!r}: a tiny stand-in can be built for {', '.join(_CLASSES)}, and this path "
            "tells none of them; give a model folder, or a name such as Qwen/Qwen2.5-VL-3B-Instruct"
        )
    return found[0]


def build(
    family: str,
    path: Path,
    *,
    seed: int = 0,
    tie: bool = True,
    max_pixels: int = 28 * 28 * 64,
    context: int = 2048,
    linear_width: int = 16,
) -> Path:
    """Write a tiny model of the family to `path` and return it.

    `max_pixels` bounds an image's area after the resize, `context` is the most tokens of a prompt and its
    completion, `tie` shares the weights of the embeddings and the output layer, `linear_width` is that of keys and
    values in layers of linear attention (vLLM on a CPU runs them at 128 alone).
    """
    config_class, processor_class, video_class = (getattr(transformers, name) for name in _CLASSES[family])
    patch = 16 if family in ("qwen3_vl", "qwen3_5") else 14
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
        text_config=_text(family, len(tokenizer), ids, tie, context, linear_width),
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
            if parameter.ndim >= 2 and not any(part in name for part in _AS_DRAWN):
                parameter.mul_(4.0)
            if name.endswith("A_log"):  # a state that lasts for a prompt, not for two tokens
                parameter.sub_(6.0)
    model.generation_config = GenerationConfig(
        eos_token_id=ids["<|im_end|>"], pad_token_id=ids["<|endoftext|>"]
    )
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return path


def _text(
    family: str, vocab: int, ids: Mapping[str, int], tie: bool, context: int, linear_width: int
) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    text = {
        "vocab_size": vocab,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": context,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "bos_token_id": ids["<|endoftext|>"],
        "rope_parameters": rope,
        "tie_word_embeddings": tie,
    }
    if family in ("qwen3_vl", "qwen3_5"):
        text["head_dim"] = 32
        rope["mrope_interleaved"] = True
    if family == "qwen3_5":
        text["layer_types"] = ["linear_attention", "full_attention", "linear_attention"]
        text |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
        text |= {"linear_key_head_dim": linear_width, "linear_value_head_dim": linear_width}
        rope |= {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
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
    if family == "qwen3_5":
        return {**common, **shape, "num_position_embeddings": 64}
    return {**common, **shape, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
