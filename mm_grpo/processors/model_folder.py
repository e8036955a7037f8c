"""What is read of a model's folder before its weights: a config that is whole, of known code, and not quantised.

Everything that needs a model's config gets it from `read_config`, so that code which a model brings along
(`auto_map`) is run where `model.trust_remote_code` says so and nowhere else, and nobody is asked at a terminal.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from mm_grpo.errors import ConfigError

logger = logging.getLogger("mm_grpo")
LONGEST = 300
"""Characters of another library's message that are quoted."""


def read_config(path: str, *, trust_remote_code: bool = False) -> Any:
    """The transformers config of the model at `path`, a folder or hub name.

    Raises ConfigError for JSON files that are not whole, for code of the model's own that is not trusted, and for
    quantised weights, which cannot be trained or saved as they are.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    _refuse_broken_json(path)
    try:
        config: Any = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        refuse_own_code(path, error, trust_remote_code)
        raise ConfigError(
            f"model.path = '{path}': no model config can be read there ({quoted(error)}); "
            "give a folder that save_pretrained wrote, or a hub name that this machine can reach"
        ) from error
    if (method := quantization_of(config)) is not None:
        raise ConfigError(
            f"model.path = '{path}': its weights are quantised ({method}), and quantised weights cannot be trained; "
            "give the model that they were made from"
        )
    return config


def warn_of_unread_code(path: str, config: Any) -> None:
    """Say that a model's own code (`auto_map`) is not run, where transformers has classes for its type."""
    if names := getattr(config, "auto_map", None):
        logger.warning(
            "model.path = '%s' brings code of its own (auto_map: %s), which is not run: transformers' own %s is taken; "
            "set model.trust_remote_code=true to run the model's code",
            path,
            ", ".join(sorted(names)),
            config.model_type,
        )


def refuse_own_code(path: str, error: Exception, trusted: bool) -> None:
    """Raise ConfigError where `error` is transformers' refusal to run code that a model brings along."""
    if not trusted and "trust_remote_code" in str(error):
        raise ConfigError(
            f"model.path = '{path}' brings code of its own (auto_map), which is not run without being asked for; read "
            "it, and set model.trust_remote_code=true if you trust it"
        ) from error


def quantization_of(config: Any) -> str | None:
    """How the weights of a model with this transformers config are quantised; None where they are not."""
    for part in (config, config.get_text_config()):
        if found := getattr(part, "quantization_config", None):
            method = found.get("quant_method") if isinstance(found, dict) else found.quant_method
            return str(getattr(method, "value", method) or "quantization_config")
    return None


def quoted(error: BaseException) -> str:
    """An error's message on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def _refuse_broken_json(path: str) -> None:
    """transformers takes a generation_config.json that it cannot read for one that is not there."""
    for file in sorted(Path(path).glob("*.json")) if Path(path).is_dir() else ():
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"model.path = '{path}': {file.name} cannot be read ({quoted(error)}); it is not whole: copy or "
                "download the model again"
            ) from error
        if file.name.endswith("config.json") and not isinstance(content, dict):
            raise ConfigError(f"model.path = '{path}': {file.name} holds no mapping; copy the model again")
