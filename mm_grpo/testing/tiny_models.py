"""Tiny random models of the families that have a processor, written in a second and without any download.

`build(family, path)` writes a model folder of about 100,000 parameters that AutoProcessor and
AutoModelForImageTextToText load: the family's real architecture, a tokenizer of bytes, random weights.
For `mm-grpo train --smoke` and the tests; such a model answers with noise.

To add a family: a function in tiny_recipes.py that makes its config and processor, a line in its RECIPES, and a word of
its published names in `_NAMES` if they do not contain the family's.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, GenerationConfig

from mm_grpo.errors import ConfigError
from mm_grpo.processors.model_folder import read_config
from mm_grpo.terminal import quiet_libraries
from mm_grpo.testing.tiny_recipes import RECIPES, Options

_NAMES = {family: family.replace("_", "") for family in RECIPES} | {"internvl": "internvl3"}
"""Parts of models' published names, without dots, dashes and underscores; InternVL 2 is another architecture."""
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
        families = [family for family, word in _NAMES.items() if word in plain]
    if len(families) != 1:
        raise ConfigError(
            f"model.path = {path!r}: a tiny stand-in can be built for {', '.join(RECIPES)}, and this path "
            "tells none of them; give a model folder, or a name such as Qwen/Qwen2.5-VL-3B-Instruct"
        )
    return families[0]


def build(family: str, path: Path, *, seed: int = 0, **options: Any) -> Path:
    """Write a tiny model of the family to `path` and return it; the options are fields of `tiny_recipes.Options`."""
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
    with quiet_libraries():
        model.save_pretrained(path)
    processor.save_pretrained(path)
    return path
