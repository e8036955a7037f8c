"""Checks of a model's folder before its weights are loaded: a readable config, of trusted code, and not quantised.

Every config of a model is read by `read_config`, so that code in a model's folder (`auto_map`) runs only with
`model.trust_remote_code`, and nobody is asked at a terminal.
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
MAX_QUOTE = 300
"""Most characters of another library's message that are quoted."""
_REACHED: set[str] = set()
"""Models for which the hub answered, even with an error: it is not asked again."""


def read_config(path: str, *, trust_remote_code: bool = False) -> Any:
    """Read the transformers config of the model at `path`, a folder or hub name.

    Raises ConfigError if a JSON file is not complete, the hub cannot be reached, the model has code of its own that is
    not trusted, or the weights are quantised, which cannot be trained or saved as they are.
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
    """Warn that a model's own code (`auto_map`) is not run, because transformers has classes for its type."""
    if names := getattr(config, "auto_map", None):
        logger.warning(
            "model.path = '%s' brings code of its own (auto_map: %s), which is not run: transformers' own %s is taken; "
            "set model.trust_remote_code=true to run the model's code",
            path,
            ", ".join(sorted(names)),
            config.model_type,
        )


def refuse_own_code(path: str, error: Exception, trusted: bool) -> None:
    """Raise ConfigError if `error` is transformers' refusal to run code in a model's folder."""
    if not trusted and "trust_remote_code" in str(error):
        raise ConfigError(
            f"model.path = '{path}' brings code of its own (auto_map), which is not run without being asked for; read "
            "it, and set model.trust_remote_code=true if you trust it"
        ) from error


def quantization_of(config: Any) -> str | None:
    """Return the name of the quantisation in a transformers config; None if there is none."""
    for part in (config, config.get_text_config()):
        if options := getattr(part, "quantization_config", None):
            method = options.get("quant_method") if isinstance(options, dict) else options.quant_method
            return str(getattr(method, "value", method) or "quantization_config")
    return None


def quoted(error: BaseException) -> str:
    """Return an error's message on one line."""
    return shorten(error, MAX_QUOTE) or type(error).__name__


def _refuse_broken_json(path: str) -> None:
    """Refuse unreadable JSON; transformers would silently ignore such a generation_config.json."""
    for file in sorted(Path(path).glob("*.json")) if Path(path).is_dir() else ():
        try:
            read_json(file, dict if file.name.endswith("config.json") else object)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"model.path = '{path}': {file.name} cannot be read ({quoted(error)}); it is not complete: copy or "
                "download the model again"
            ) from None


def _refuse_unreachable(path: str) -> None:
    """Ask the hub once for a model that is no local folder, unless HF_HUB_OFFLINE is set.

    If the hub does not answer, a model in the cache is used as with HF_HUB_OFFLINE. ConfigError for any other model.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if path in _REACHED or os.path.exists(path):
        return
    download = f"; `hf download {path} --local-dir FOLDER` makes one on a machine that reaches the hub"
    try:
        cached = isinstance(try_to_load_from_cache(path, "config.json"), str)
        offline = constants.HF_HUB_OFFLINE
        fault = "HF_HUB_OFFLINE is set, and the model is not in the cache" if offline else hub_fault(path)
    except HFValidationError:
        cached, offline, fault, download = False, False, "that is no name of a model there", ""
    if fault and cached and not offline:
        constants.HF_HUB_OFFLINE = True  # else each file that is not in the cache is asked for over minutes
        logger.warning("model.path = '%s': %s; the files in the cache are used", path, fault)
    elif not fault:
        _REACHED.add(path)
    if not fault or cached:
        return
    folder = Path(path).parent
    near = [str(entry) for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []
    raise ConfigError(
        f"model.path = '{path}': there is no folder of that name beside the config or in '{Path.cwd()}', and no such "
        f"model can be got from the hub: {fault}. {did_you_mean(path, near)}Give a model's folder" + download
    )
