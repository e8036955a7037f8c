"""Checks of a model's folder before its weights: a config that is whole, of known code, and not quantised.

Everything that needs a model's config gets it from `read_config`, so that code which a model brings along
(`auto_map`) is run where `model.trust_remote_code` says so and nowhere else, and nobody is asked at a terminal.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from mm_grpo.errors import ConfigError, did_you_mean, shorten
from mm_grpo.files import read_json
from mm_grpo.hub import hub_fault

logger = logging.getLogger("mm_grpo")
LONGEST = 300
"""Characters of another library's message that are quoted."""
_REACHED: set[str] = set()
"""Models for which the hub answered, whatever it said: it is not asked again."""


def read_config(path: str, *, trust_remote_code: bool = False) -> Any:
    """The transformers config of the model at `path`, a folder or hub name.

    Raises ConfigError for JSON files that are not whole, for a hub that cannot be reached, for code of the model's own
    that is not trusted, and for quantised weights, which cannot be trained or saved as they are.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    _refuse_broken_json(path)
    _refuse_unreachable(path)
    try:
        config: Any = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        refuse_own_code(path, error, trust_remote_code)
        raise ConfigError(
            f"model.path = '{path}': no model config can be read there ({quoted(error)}); "
            "give a folder that save_pretrained wrote, or a hub name that this machine can reach"
        ) from None
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
    """Name the quantisation of a model with this transformers config; None where there is none."""
    for part in (config, config.get_text_config()):
        if found := getattr(part, "quantization_config", None):
            method = found.get("quant_method") if isinstance(found, dict) else found.quant_method
            return str(getattr(method, "value", method) or "quantization_config")
    return None


def quoted(error: BaseException) -> str:
    """An error's message on one line."""
    return shorten(error, LONGEST) or type(error).__name__


def _refuse_broken_json(path: str) -> None:
    """transformers takes a generation_config.json that it cannot read for one that is not there."""
    for file in sorted(Path(path).glob("*.json")) if Path(path).is_dir() else ():
        try:
            read_json(file, dict if file.name.endswith("config.json") else object)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"model.path = '{path}': {file.name} cannot be read ({quoted(error)}); it is not whole: copy or "
                "download the model again"
            ) from None


def _refuse_unreachable(path: str) -> None:
    """Ask the hub once, shortly, for a model that is no folder here, unless HF_HUB_OFFLINE is set.

    Where it cannot be reached, a model in the cache is used as with HF_HUB_OFFLINE; for another, ConfigError.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if path in _REACHED or os.path.exists(path):
        return
    try:
        cached, offline = (
            isinstance(try_to_load_from_cache(path, "config.json"), str),
            constants.HF_HUB_OFFLINE,
        )
        fault = "HF_HUB_OFFLINE is set, and the model is not in the cache" if offline else hub_fault(path)
    except HFValidationError:
        cached, offline, fault = False, False, "that is no name of a model there"
    if fault and cached and not offline:
        constants.HF_HUB_OFFLINE = True  # each file that is not in the cache would be asked for over minutes
        logger.warning("model.path = '%s': %s; the files in the cache are used", path, fault)
    elif not fault:
        _REACHED.add(path)
    if not fault or cached:
        return
    folder = Path(path).parent
    near = [str(each) for each in folder.iterdir() if each.is_dir()] if folder.is_dir() else []
    raise ConfigError(
        f"model.path = '{path}': there is no folder of that name beside the config or in '{Path.cwd()}', and no such "
        f"model can be got from the hub: {fault}. {did_you_mean(path, near)}Give a model's folder; `hf download {path} "
        "--local-dir FOLDER` makes one on a machine that reaches the hub"
    )
