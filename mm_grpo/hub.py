"""A quick check that the Hugging Face hub answers: huggingface_hub would retry for minutes, once for each file."""

from __future__ import annotations

from mm_grpo.errors import shorten


def hub_fault(name: str, *, dataset: bool = False) -> str:
    """Return why the hub cannot be reached for a repository; "" if it answers, even with 404.

    Raises HFValidationError if the name is not legal on the hub.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(name, "README.md", repo_type="dataset") if dataset else hf_hub_url(name, "config.json")
    try:
        get_hf_file_metadata(url, timeout=float(constants.HF_HUB_ETAG_TIMEOUT))
    except Exception as error:  # httpx's, or httpx2's; any other is an answer, or the libraries tell it
        if any(kind.__name__ == "TransportError" for kind in type(error).__mro__):
            why = f"{shorten(error, 300)} [{type(error).__name__}]"
            return f"{constants.ENDPOINT} cannot be reached ({why})"
    return ""
