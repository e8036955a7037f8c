"""The sections `rollout.vllm` and `rollout.server`: what vLLM is started with, and of servers where they are, how
weights get there, and how long is waited for what.

Their fields are here because `sections.py` is full.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from mm_grpo.config.messages import Accepts, FieldError, RelativeToFile, Section
from mm_grpo.config.values import Number, PathText

SCHEMES = ("http://", "https://", "unix://")


class VLLMConfig(Section):
    """vLLM, in the trainer's process (`rollout.engine: vllm`) and in servers of `mm-grpo serve`."""

    where: ClassVar[str] = "rollout.vllm"
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt and completion together, in tokens, >= 2; null is what the rows need. Default: null."""
    max_images: int | None = Field(default=None, ge=1)
    """Most images in one prompt, >= 1; null is what the rows have. Default: null."""
    gpu_memory_utilization: Number = Field(default=0.3, gt=0, le=1)
    """Share of a GPU's memory that vLLM may hold, > 0 and <= 1. Default: 0.3."""
    sleep_level: Literal[0, 1, 2] = 2
    """What a GPU engine frees while the learner works: 0 nothing; 1 its caches are dropped, and its weights wait in the
    host's memory; 2 its weights are dropped too, and sent again. Default: 2."""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vllm.LLM, as {name: value}. Default: {}."""


class ServerConfig(Section):
    """vLLM servers (`rollout.engine: vllm_server`)."""

    where: ClassVar[str] = "rollout.server"
    urls: Annotated[list[str], Accepts("a list of urls, such as [http://127.0.0.1:8000]")] = Field(
        default_factory=list
    )
    """The servers (docs/served.md), as http://host:port, https://... or unix:///path/of/socket; [] where
    `mm-grpo train --serve` starts them. Default: []."""
    transfer: Literal["auto", "file", "gloo", "nccl"] = "auto"
    """How weights get to the servers: file (a folder that both sides see), gloo (over the network, through the hosts'
    memory), nccl (from GPU to GPU) or auto, which is nccl for a learner on a GPU without rollout.server.folder, else
    file. Default: auto."""
    folder: Annotated[PathText | None, RelativeToFile()] = None
    """Folder for transfer: file, which the servers have to see under the same path; null is a temporary one of this
    machine. Default: null."""
    timeout: Number = Field(default=600.0, gt=0)
    """Seconds without one answer after which a server that has requests counts as hung, although it answers /health;
    its requests go to another one, > 0; the longest completions have to be done in it. A call of a weight update has as
    long and at most 300 s, an answer to /health a third and at most 30 s. Default: 600.0."""
    wait_timeout: Number = Field(default=300.0, gt=0)
    """Seconds that is waited for a server to come, or to come back, when there is none, > 0; then the run ends.
    Default: 300.0."""

    @field_validator("urls")
    @classmethod
    def _are_addresses(cls, value: list[str]) -> list[str]:
        for url in value:
            scheme = next((s for s in SCHEMES if url.startswith(s)), None)
            if scheme is None or len(url) == len(scheme):
                raise FieldError(f"holds {url!r}, which is no http://127.0.0.1:8000 or unix:///run/vllm.sock")
            if "@" in url and scheme != "unix://":
                raise FieldError("holds a url with a password in it; set MM_GRPO_SERVER_KEY instead")
        cleaned = [url.rstrip("/") for url in value]
        if twice := next((url for url in cleaned if cleaned.count(url) > 1), None):
            raise FieldError(f"holds {twice!r} twice; name each server once")
        return cleaned
