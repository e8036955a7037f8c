"""Whether the Hugging Face hub answers: huggingface_hub would ask for minutes, once for each file."""

from __future__ import annotations

import threading
import time

NAME_LOOKUP = 2.0
"""Seconds beyond HF_HUB_ETAG_TIMEOUT that the hub's host name may take to be found: no time-out of HTTP bounds that."""


def hub_fault(name: str, *, dataset: bool = False) -> str:
    """Why the hub cannot be reached for a repository; "" where it answers, be it that it has no such one.

    A connection that fails at once is tried once more. Raises HFValidationError for what is no name of the hub.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(name, "README.md", repo_type="dataset") if dataset else hf_hub_url(name, "config.json")
    limit = float(constants.HF_HUB_ETAG_TIMEOUT)
    began = time.monotonic()
    found: list[str] = []

    def ask() -> None:
        try:
            get_hf_file_metadata(url, timeout=limit)
        except Exception as error:  # httpx's, or httpx2's; any other is an answer, or the libraries tell it
            if any(kind.__name__ == "TransportError" for kind in type(error).__mro__):
                found.append(f"{' '.join(str(error).split())[:300]} [{type(error).__name__}]")
                return
        found.append("")

    def ask_twice() -> None:
        ask()
        if found[0] and time.monotonic() - began < limit / 2:
            time.sleep(limit / 10)
            ask()

    thread = threading.Thread(target=ask_twice, name="hub", daemon=True)
    thread.start()
    thread.join(limit + NAME_LOOKUP)
    why = found[-1] if found else f"no answer within {limit + NAME_LOOKUP:g} s, see HF_HUB_ETAG_TIMEOUT"
    return why and f"{constants.ENDPOINT} cannot be reached ({why})"
