"""An export, sent to the Hugging Face Hub: private unless asked otherwise, and no repository of somebody else's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mm_grpo.errors import ConfigError
from mm_grpo.export.write import MARK
from mm_grpo.processors.model_folder import quoted


def check_hub(name: str, *, overwrite: bool = False) -> str:
    """The full name of the repository that `name` will be, asked of the Hub before any work.

    Raises ConfigError without a token, offline, for a name that is none, and for a repository that is there already:
    it may be replaced with `overwrite` where an export was pushed there.
    """
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"--push {name}: HF_HUB_OFFLINE is set; unset it, or leave --push out")
    if not get_token():
        raise ConfigError(
            f"--push {name}: there is no token of the Hub; log in with `hf auth login`, or set HF_TOKEN to one that "
            "may write"
        )
    with _as_config_error(name):
        validate_repo_id(name)
        api = HfApi()
        full = name if "/" in name else f"{api.whoami()['name']}/{name}"
        if not api.repo_exists(full):
            return full
        if not api.file_exists(full, MARK):
            raise ConfigError(
                f"--push {name}: '{full}' is there already, and no export of mm_grpo was pushed to it; name another"
            )
    if not overwrite:
        raise ConfigError(
            f"--push {name}: '{full}' holds an export; name another, or replace it with --overwrite"
        )
    return full


def push(folder: Path, name: str, *, private: bool = True) -> str:
    """Upload the export in `folder` to the repository `name`, made where there is none; the commit's address.

    One that is there keeps its visibility. Raises ConfigError when the Hub refuses or cannot be reached; the folder
    stays.
    """
    from huggingface_hub import HfApi

    with _as_config_error(name):
        api = HfApi()
        api.create_repo(name, private=private, exist_ok=True)
        found = api.upload_folder(
            repo_id=name,
            folder_path=str(folder),
            commit_message="mm_grpo export",
            delete_patterns="*.safetensors",
        )
    return str(found)


@contextmanager
def _as_config_error(name: str) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # the hub's, httpx's or requests', by the version of huggingface_hub
        raise ConfigError(
            f"--push {name}: the Hub cannot be used ({type(error).__name__}: {quoted(error)}); mend the connection, "
            "the token or the name, or leave it out: a folder that was written stays"
        ) from error
