"""Tiny random models of the families that have a processor, written in a second and without any download.

`build(family, path)` writes a model folder of about 100,000 parameters that AutoProcessor and
AutoModelForImageTextToText load: real classes of transformers at small sizes, a tokenizer of bytes, so that it can
encode any text, chat templates of our own in the family's format, random weights. For `mm-grpo train --smoke` and the
tests; such a model answers with noise.

To add a family: a function that makes its config and processor, a line in RECIPES, and a word of its published names in
`_NAMES` if they do not contain the family's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForImageTextToText, GenerationConfig, Qwen2Tokenizer, Qwen2VLImageProcessor

from mm_grpo.errors import ConfigError
from mm_grpo.learner.transformers_patches import save_pretrained
from mm_grpo.processors import smolvlm
from mm_grpo.processors.model_folder import read_config

_SMALL_WEIGHTS = ("embed_tokens", "in_proj_qkv", "in_proj_a", "in_proj_b", "linear_attn.conv1d")
"""Weights that are not scaled up, because layers of linear attention lose digits if they are large."""


def family_of(path: str) -> str:
    """Return the family of the model at `path`, from its config in a folder, else from its name.

    Raises ConfigError if neither tells.

    >>> family_of("Qwen/Qwen2.5-VL-3B-Instruct")
    'qwen2_5_vl'
    """
    if (Path(path) / "config.json").is_file():
        name = str(read_config(path).model_type)
        families = [name] if name in RECIPES else []
    else:
        plain = re.sub(r"[._-]", "", path.rstrip("/").split("/")[-1].lower())
        families = [family for family, word in _NAMES.items() if re.search(word, plain)]
        families = [family for family in families if f"{family}_moe" not in families]
    if len(families) != 1:
        raise ConfigError(
            f"model.path = {path!r}: a tiny stand-in can be built for {', '.join(RECIPES)}, and this path "
            "tells none of them; give a model folder, or a name such as Qwen/Qwen2.5-VL-3B-Instruct"
        )
    return families[0]


def build(family: str, path: Path, *, seed: int = 0, **options: Any) -> Path:
    """Write a tiny model of the family to `path` and return it; the options are fields of `Options`."""
    config, processor = RECIPES[family](Options(family, **options))
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # large enough that answers depend on the images, and are not uniform
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and not parameter.any():  # projectors and positions that start at 0
                parameter.normal_(std=0.1)
            elif parameter.ndim >= 2 and not any(part in name for part in _SMALL_WEIGHTS):
                parameter.mul_(4.0)
            if name.endswith("A_log"):  # a state that lasts for a prompt, not for two tokens
                parameter.sub_(6.0)
    tokenizer = processor.tokenizer
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    save_pretrained(model, path)
    processor.save_pretrained(path)
    return path


@dataclass(frozen=True)
class Options:
    """Settings of a tiny model."""

    family: str
    tie: bool = True  # embeddings and output layer share their weights
    max_pixels: int = 28 * 28 * 64  # of an image after the resize
    context: int = 2048  # tokens of a prompt and its completion
    experts: int = 4  # of a layer
    chosen: int = 2  # of a token
    expert_width: int = 48
    linear_width: int = 16  # width of keys and values in linear attention; vLLM on a CPU runs only 128


TILE, PATCH = 56, 14
"""Sides of a tile and a patch in pixels, in families that cut images into tiles."""
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}IMAGE{% elif p.type == 'video' %}VIDEO"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Format of Qwen's chats, with IMAGE and VIDEO as the placeholders of an image and a video."""
CHAT_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_QWEN = (
    "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
_QWEN_CLASSES: Mapping[str, tuple[str, str, str]] = {
    "qwen2_vl": ("Qwen2VLConfig", "Qwen2VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", "Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen3_vl": ("Qwen3VLConfig", "Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
    "qwen3_5": ("Qwen3_5Config", "Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
    "qwen3_vl_moe": ("Qwen3VLMoeConfig", "Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
    "qwen3_5_moe": ("Qwen3_5MoeConfig", "Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
}
"""Classes by name, because a version of transformers may lack some."""


def _tokenizer(*special: str, **attributes: str) -> Any:
    """Return a tokenizer of bytes and special tokens; `attributes` are also its attributes, such as `image_token`."""
    count = len(CHAT_TOKENS) + len(special) + len(attributes)
    return Qwen2Tokenizer(
        eos_token="<|im_end|>", pad_token="<|endoftext|>", model_specific_special_tokens=attributes
    ).train_new_from_iterator(
        ["what is in the picture"] * 2,
        vocab_size=272 + count,
        new_special_tokens=[*CHAT_TOKENS[1:], *special],
        show_progress=False,
    )


def _text(options: Options, tokenizer: Any) -> dict[str, Any]:
    """Return the fields of a small text model that Qwen2, Qwen3, Llama and Gemma configs share."""
    return {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": options.context,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.pad_token_id, "tie_word_embeddings": options.tie,
    }  # fmt: skip


# Qwen-VL -------------------------------------------------------------------------------------


def _qwen(options: Options) -> tuple[Any, Any]:
    names = _QWEN_CLASSES[options.family]
    config_class, processor_class, video_class = (getattr(transformers, name) for name in names)
    patch = 16 if options.family.startswith("qwen3") else 14
    tokenizer = _tokenizer(*_QWEN)
    sizes = {
        "size": {"shortest_edge": (2 * patch) ** 2, "longest_edge": options.max_pixels},
        "patch_size": patch,
        "merge_size": 2,
        "image_mean": video_class.image_mean,
        "image_std": video_class.image_std,
    }
    processor = processor_class(
        image_processor=Qwen2VLImageProcessor(**sizes),
        video_processor=video_class(**sizes),
        tokenizer=tokenizer,
        chat_template=CHATML.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>").replace(
            "VIDEO", "<|vision_start|><|video_pad|><|vision_end|>"
        ),
    )
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in _QWEN}
    config = config_class(
        text_config=_qwen_text(options, tokenizer),
        vision_config=_qwen_vision(options.family, patch),
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=options.tie,
    )
    return config, processor


def _qwen_text(options: Options, tokenizer: Any) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    text = {**_text(options, tokenizer), "rope_parameters": rope}
    if options.family.startswith("qwen3"):
        text["head_dim"] = 32
        rope["mrope_interleaved"] = True
    if options.family.endswith("_moe"):
        text |= {
            "num_experts": options.experts,
            "num_experts_per_tok": options.chosen,
            "norm_topk_prob": True,
        }
        text["moe_intermediate_size"] = options.expert_width
    if options.family == "qwen3_5_moe":
        text["shared_expert_intermediate_size"] = 32
    if options.family.startswith("qwen3_5"):
        text["layer_types"] = ["linear_attention", "full_attention", "linear_attention"]
        text |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
        text |= {"linear_key_head_dim": options.linear_width, "linear_value_head_dim": options.linear_width}
        rope |= {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
    return text


def _qwen_vision(family: str, patch: int) -> dict[str, Any]:
    common = {
        "depth": 2, "num_heads": 2, "hidden_size": 64, "patch_size": patch, "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }  # fmt: skip
    if family == "qwen2_vl":
        return {**common, "embed_dim": 64, "mlp_ratio": 2}
    common |= {"out_hidden_size": 64, "intermediate_size": 96}
    if family == "qwen2_5_vl":
        return {**common, "window_size": 112, "fullatt_block_indexes": [1]}
    common["num_position_embeddings"] = 64
    return common if family.startswith("qwen3_5") else {**common, "deepstack_visual_indexes": [0]}


# families of tiles ---------------------------------------------------------------------------


def _internvl(options: Options) -> tuple[Any, Any]:
    tokenizer = _tokenizer(
        start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>", video_token="<video>"
    )  # fmt: skip
    images = transformers.GotOcr2ImageProcessor(
        size={"height": TILE, "width": TILE}, max_patches=max(1, options.max_pixels // TILE**2)
    )
    processor = transformers.InternVLProcessor(
        image_processor=images,
        video_processor=transformers.InternVLVideoProcessor(size={"height": TILE, "width": TILE}),
        tokenizer=tokenizer,
        chat_template=CHATML.replace("IMAGE", "<IMG_CONTEXT>\n").replace("VIDEO", "<video>\n"),
        image_seq_length=(TILE // PATCH // 2) ** 2,
    )
    config = transformers.InternVLConfig(
        text_config={**_text(options, tokenizer), "model_type": "qwen3", "head_dim": 32},
        vision_config={
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
            "attention_bias": True, "image_size": [TILE, TILE], "patch_size": [PATCH, PATCH],
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=processor.image_seq_length,
        tie_word_embeddings=options.tie,
    )  # fmt: skip
    return config, processor


def _smolvlm(options: Options) -> tuple[Any, Any]:
    longest = max(1, min(4, math.isqrt(options.max_pixels) // TILE)) * TILE
    places = [f"<row_{r}_col_{c}>" for r in range(1, 5) for c in range(1, 5)]
    tokenizer = _tokenizer(
        *places,
        fake_image_token="<fake_token_around_image>",
        image_token="<image>",
        global_image_token="<global-img>",
        end_of_utterance_token="<end_of_utterance>",
    )
    tokenizer.eos_token = "<end_of_utterance>"
    sizes = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": TILE}}
    template = (
        "<|im_start|>{% for m in messages %}{{ m.role | capitalize }}"
        "{{ ':' if m.content[0].type == 'image' else ': ' }}"
        "{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}<end_of_utterance>\n"
        "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
    )
    parts: dict[str, Any] = {"tokenizer": tokenizer, "image_seq_len": 4, "chat_template": template}
    prefix = "Idefics3" if options.family == "idefics3" else "SmolVLM"
    parts["image_processor"] = getattr(transformers, f"{prefix}ImageProcessor")(**sizes)
    if options.family == "smolvlm":
        smolvlm.allow_without_num2words()
        parts["video_processor"] = transformers.SmolVLMVideoProcessor(**sizes)
    processor = getattr(transformers, f"{prefix}Processor")(**parts)
    config = getattr(transformers, f"{prefix}Config")(
        text_config={**_text(options, tokenizer), "model_type": "llama"},
        vision_config=_siglip(f"{options.family}_vision"),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=options.tie,
    )
    return config, processor


def _siglip(model_type: str) -> dict[str, Any]:
    return {
        "model_type": model_type, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": TILE, "patch_size": PATCH,
    }  # fmt: skip


def _llava_onevision(options: Options) -> tuple[Any, Any]:
    tokenizer = _tokenizer(image_token="<image>", video_token="<video>")
    most, sides = max(options.max_pixels // TILE**2, 1), range(1, 4)
    pinpoints = [[h * TILE, w * TILE] for h in sides for w in sides if h * w <= most]
    sizes = {"size": {"height": TILE, "width": TILE}}
    processor = transformers.LlavaOnevisionProcessor(
        image_processor=transformers.LlavaOnevisionImageProcessor(**sizes, image_grid_pinpoints=pinpoints),
        video_processor=transformers.LlavaOnevisionVideoProcessor(**sizes),
        tokenizer=tokenizer,
        chat_template=CHATML.replace("IMAGE", "<image>").replace("VIDEO", "<video>"),
        num_image_tokens=(TILE // PATCH) ** 2,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_4",
    )
    config = transformers.LlavaOnevisionConfig(
        text_config={**_text(options, tokenizer), "model_type": "qwen2"},
        vision_config={**_siglip("siglip_vision_model"), "vision_use_head": False},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=pinpoints,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_4",
        tie_word_embeddings=options.tie,
    )
    return config, processor


# Gemma --------------------------------------------------------------------------------------


def _gemma3(options: Options) -> tuple[Any, Any]:
    image_tokens = {
        "boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"
    }  # fmt: skip
    turns = ["<start_of_turn>", "<end_of_turn>"]
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *turns, *image_tokens.values()]
    words = [*(f"<0x{byte:02X}>" for byte in range(256)), *("\n" * n for n in range(1, 5)), "\u2581"]
    words += [chr(c) for c in range(33, 127)]
    merges = [("\n", "\n"), ("\n\n", "\n"), ("\n\n", "\n\n")]
    gemma: Any = transformers.GemmaTokenizer
    tokenizer = gemma(
        vocab={word: i for i, word in enumerate([*special, *words])},
        merges=merges,
        model_specific_special_tokens=image_tokens,
        extra_special_tokens=turns,
    )
    tokenizer.eos_token = "<end_of_turn>"
    template = (
        "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{% for p in m.content %}{{ '<start_of_image>' if p.type == 'image' else p.text | trim }}{% endfor %}"
        "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    )
    processor = transformers.Gemma3Processor(
        image_processor=transformers.Gemma3ImageProcessor(size={"height": TILE, "width": TILE}),
        tokenizer=tokenizer,
        chat_template=template,
        image_seq_length=4,
    )
    text = {
        **_text(options, tokenizer), "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "bos_token_id": tokenizer.bos_token_id,
    }  # fmt: skip
    config_class: Any = transformers.Gemma3Config
    config = config_class(
        text_config=text,
        vision_config={**_siglip("siglip_vision_model"), "vision_use_head": False},
        mm_tokens_per_image=4,
        image_token_index=tokenizer.convert_tokens_to_ids("<image_soft_token>"),
        boi_token_index=tokenizer.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<end_of_image>"),
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=options.tie,
    )
    return config, processor


RECIPES: Mapping[str, Callable[[Options], tuple[Any, Any]]] = {
    **dict.fromkeys(_QWEN_CLASSES, _qwen),
    "internvl": _internvl,
    "smolvlm": _smolvlm,
    "idefics3": _smolvlm,
    "llava_onevision": _llava_onevision,
    "gemma3": _gemma3,
}
"""By model type, the function that makes the config and the processor of a tiny model."""
_NAMES = {family: family.replace("_moe", r".*\dba\d+b").replace("_", "") for family in RECIPES}
_NAMES["internvl"] = "internvl3"  # InternVL 2 is another architecture
"""Patterns of models' published names, without dots, dashes and underscores, as in Qwen/Qwen3-VL-30B-A3B-Instruct."""
