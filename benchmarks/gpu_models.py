"""Models of published sizes with random weights, for gpu_proof.py: nothing is downloaded.

    qwen2_5_vl-3b   Qwen2.5-VL-3B: 36 layers of width 2048, a tower of 32 blocks of width 1280, patches of 14 pixels
    qwen3_vl-4b     Qwen3-VL-4B: 36 layers of width 2560, a tower of 24 blocks of width 1024, patches of 16 pixels

Tokenizer, chat template and image processor are those of mm_grpo/testing/tiny_models.py: the tokenizer knows bytes
alone, the model has the whole vocabulary. A dry run takes the tiny model of the same family.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import SIZES, Machine
from transformers import AutoModelForImageTextToText, GenerationConfig

from mm_grpo.testing.tiny_models import RECIPES, Options

MAX_PIXELS = 1024 * 1024
CONTEXT = 32768

# family, text config, vision config, base of the rotary angles
SHAPES: dict[str, tuple[str, dict[str, Any], dict[str, Any], float]] = {
    "qwen2_5_vl-3b": ("qwen2_5_vl", SIZES["3b"][0], SIZES["3b"][1], 1e6),
    "qwen3_vl-4b": (
        "qwen3_vl",
        {
            "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
            "rope_parameters": {"mrope_section": [24, 20, 20]},
        },
        {
            "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "patch_size": 16,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [5, 11, 17],
        },
        5e6,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """Where the stages run. `peak` is the FLOP/s that utilisation is a share of, and `peak_from` says whose figure it
    is; a `dry` run takes tiny models and few repetitions."""

    machine: Machine
    peak: float
    peak_from: str
    dry: bool

    def of(self, whole: Any, dry: Any) -> Any:
        """`whole`, or in a dry run `dry`."""
        return dry if self.dry else whole


def config_and_processor(name: str, setting: Setting) -> tuple[Any, Any]:
    """The transformers config of a model in SHAPES and a processor that fits it."""
    family, text, vision, theta = SHAPES[name]
    config, processor = RECIPES[family](Options(family, True, MAX_PIXELS, CONTEXT, 16))
    if setting.dry:
        return config, processor
    given = config.to_dict()
    rope = given["text_config"]["rope_parameters"] | text["rope_parameters"] | {"rope_theta": theta}
    given["text_config"] |= text | {"rope_parameters": rope}
    for made in ("layer_types", "max_window_layers"):  # from the number of layers, anew
        given["text_config"].pop(made, None)
    given["vision_config"] |= vision | {"out_hidden_size": text["hidden_size"]}
    return type(config).from_dict(given), processor


def make_model(config: Any, processor: Any, machine: Machine) -> Any:
    """A model of `config` with random weights on the machine's device."""
    torch.manual_seed(0)
    with machine.device:
        model = AutoModelForImageTextToText.from_config(config, dtype=machine.dtype)
    tokenizer = processor.tokenizer
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model.to(machine.device).train()


def write_without_weights(config: Any, processor: Any, folder: Path) -> None:
    """Config and processor, as `load_processor` reads them."""
    config.save_pretrained(folder)
    processor.save_pretrained(folder)
