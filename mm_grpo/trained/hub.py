"""Upload an export to the Hugging Face Hub: private by default, and never over a repository that is no export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from mm_grpo.errors import ConfigError
from mm_grpo.files import temporary_folder
from mm_grpo.trained.export import MARK, write_export
from mm_grpo.trained.model import Trained, as_config_error


def check_hub(name: str, *, overwrite: bool = False) -> str:
    """Return the full name of the repository `name`, checked with the Hub before any work.

    Raises ConfigError without a token, offline, if the name is illegal, and if the repository exists, unless it is an
    export and `overwrite` is set.
    """
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise ConfigError(f"--push {name}: HF_HUB_OFFLINE is set; unset it, or leave --push out")
    if not huggingface_hub.get_token():
        raise ConfigError(
            f"--push {name}: there is no token of the Hub; run `hf auth login`, or set HF_TOKEN"
        )
    with as_config_error(f"--push {name}: the Hub cannot be used"):
        validate_repo_id(name)
        api = huggingface_hub.HfApi()
        full = name if "/" in name else f"{api.whoami()['name']}/{name}"
        if not api.repo_exists(full):
            return full
        if not api.file_exists(full, MARK):
            raise ConfigError(
                f"--push {name}: '{full}' is there already and no export of mm_grpo; name another"
            )
    if not overwrite:
        raise ConfigError(f"--push {name}: '{full}' holds an export; name another, or give --overwrite")
    return full


def push(folder: Path, name: str, *, private: bool = True) -> str:
    """Upload the export in `folder` to the repository `name`, created if needed; return the commit's address.

    An existing repository keeps its visibility. Raises ConfigError if the Hub refuses or cannot be reached.
    """
    with as_config_error(f"--push {name}: the Hub cannot be used, and '{folder}' stays"):
        api = huggingface_hub.HfApi()
        api.create_repo(name, private=private, exist_ok=True)
        options: Any = {"commit_message": "mm_grpo export", "delete_patterns": "*.safetensors"}
        return str(api.upload_folder(repo_id=name, folder_path=str(folder), **options))


def push_trained(name: str, trained: Trained, *, private: bool, adapter: bool, overwrite: bool) -> str:
    """Export a trainer's model to a temporary folder and push it; return the commit's address."""
    if adapter and trained.config.model.lora is None:
        raise ConfigError("adapter=True: the run trained no adapters (model.lora is null)")
    full = check_hub(name, overwrite=overwrite)
    with temporary_folder("push") as folder:
        write_export(trained, folder / "export", adapter=adapter)
        return push(folder / "export", full, private=private)
