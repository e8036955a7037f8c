"""The protocol of vLLM servers, as of vLLM 0.32: endpoints, bodies of requests, and their answers.

A prompt goes to `/inference/v1/generate` as collapsed ids with its media (`content_parts`), as in the in-process
engine. The answer has the ids that were run, log-probs, and the name of the weights. Images and frames go as PNG, which
changes no pixel.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from operator import index
from typing import Any

from pydantic import BaseModel, ConfigDict

from mm_grpo.errors import ConfigError
from mm_grpo.files import data_url, encoded_image
from mm_grpo.rollout.served import videos
from mm_grpo.rollout.served.client import ServerClient, ServerError, ServerRefused, reading
from mm_grpo.rollout.vllm.requests import EngineAnswer, EngineRequest, Sampled
from mm_grpo.types import Video

GENERATE = "/inference/v1/generate"
RPC = "/collective_rpc"
RECEIVED = "mm_grpo_received"
"""Method of the worker extension that returns a `WorkerAccount` (plugin.py)."""
ADAPTER_LAYERS = "mm_grpo_adapter_layers"
"""Method of the worker extension that returns the layers whose adapters it can run."""
INFO = "/weight_info"
ENDPOINTS = (
    GENERATE, INFO, RPC, "/pause", "/resume", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights",
    "/finish_weight_update", "/update_weight_version", "/reset_prefix_cache", "/reset_encoder_cache",
)  # fmt: skip
"""Endpoints that a run needs and not every vLLM server has."""
SLEEP = ("/sleep", "/wake_up", "/is_sleeping")
"""Endpoints of servers on the learner's GPUs."""
SIZES = ("model_type", "_size", "_layers", "_heads", "depth", "embed_dim")
"""Ends of the config fields that decide whether weights fit a model."""
MASKED = -1e30
"""Logit bias of a token that must not be sampled. JSON can carry it, and the float32 softmax makes exactly 0 of it."""


@dataclass(frozen=True)
class ServerLimits:
    """Deadlines of `rollout.server`, in seconds, and a run's requirements of a server."""

    timeout: float = 600.0
    probe_timeout: float = 30.0
    wait_timeout: float = 300.0
    max_model_len: int = 0
    """Tokens of the longest sequence."""
    lora_rank: int = 0
    """Rank of the learner's adapters; 0 without."""
    sleep_level: int = 0
    """Level of vLLM's sleep while the learner works on the same GPUs; 0 on others."""
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """`model_sizes` of the learner's model."""


class WorkerAccount(BaseModel):
    """Record of what a server's worker received (plugin.py)."""

    model_config = ConfigDict(strict=True, extra="ignore")

    digests: dict[str, str] = {}
    """Digests of the last update's tensors, by name; empty strings while it runs."""
    finished: bool = True
    """False during an update, and after one that was aborted."""
    group: str = ""
    """Name of the worker's group."""
    model: dict[str, Any] = {}
    """`model_sizes` of the server's model."""
    logprobs_mode: str = ""
    replaced: bool = False
    """It was sent weights, not factors alone, since it read the model's folder."""
    sleep_mode: bool = False
    """It can free its GPU, or has none."""


def model_sizes(config: Any) -> dict[str, Any]:
    """Return the fields of a transformers config that decide which weights fit, those of a part as PART.FIELD."""
    fields = dict(config.to_dict())
    for part in ("text_config", "vision_config"):
        fields |= {f"{part}.{name}": value for name, value in (fields.get(part) or {}).items()}
    return {k: v for k, v in fields.items() if k.endswith(SIZES) and isinstance(v, (int, str))}


def probe(client: ServerClient, limits: ServerLimits) -> str:
    """Return the name of a server's model.

    Raises ServerUnreachable, and ConfigError if it lacks what a run needs, saying how to start it.
    """
    where, timeout = f"rollout.server.urls: {client.url}", limits.probe_timeout
    paths = ("/openapi.json", "/v1/models")
    try:
        listed, models = [client.call(path, method="GET", timeout=timeout) for path in paths]
        with reading(client.url, ", ".join(paths)):
            served = models["data"][0]
            model, length = str(served["id"]), index(served["max_model_len"])
            required = (*ENDPOINTS, *(SLEEP if limits.sleep_level else ()))
            missing = [path for path in required if path not in dict(listed["paths"])]
        if missing:
            raise ConfigError(
                f"{where} has no {', '.join(missing)}; start it with `mm-grpo serve`, or `vllm serve` of "
                "vLLM 0.32 or newer with --enable-scale-out, --weight-transfer-config, and VLLM_SERVER_DEV_MODE=1 in "
                "its environment"
            )
        account = accounts(client, timeout)[0]
    except ServerRefused as error:
        if error.status in (401, 403):
            raise ConfigError(key_refused(client.url, error.reason)) from None
        raise ConfigError(
            f"{where} is no vLLM server that lists its endpoints ({error.reason}); start it with `mm-grpo serve`, or "
            "`vllm serve` without --disable-fastapi-docs"
        ) from None
    if length < limits.max_model_len:
        raise ConfigError(
            f"{where} was started for sequences of {length} tokens, and this run needs {limits.max_model_len} "
            f"(rollout.vllm.max_model_len); start it with --max-model-len {limits.max_model_len}, or lower "
            "rollout.max_completion_length or data.max_pixels"
        )
    if account.logprobs_mode != "processed_logprobs":
        raise ConfigError(
            f"{where} reports log-probs from before temperature and masks, but tokens are sampled after them; start it "
            "with --logprobs-mode processed_logprobs"
        )
    if limits.sleep_level and not account.sleep_mode:
        raise ConfigError(
            f"{where} was started without sleep mode, and would keep the memory of the learner's GPU "
            "(rollout.server.share_gpus); start it with `mm-grpo serve` and that setting, or `vllm serve` with "
            "--enable-sleep-mode"
        )
    for field_name, size in limits.sizes.items():
        if (served_size := account.model.get(field_name, size)) != size:
            raise ConfigError(
                f"{where} serves another model: its {field_name} is {served_size!r}, and that of model.path is "
                f"{size!r}; name a server that was started for this model"
            )
    return model


def key_refused(url: str, reason: str) -> str:
    """Return the message for a server that refuses the key."""
    return (
        f"rollout.server.urls: {url} refuses the key ({reason}); put the server's key into the environment variable "
        "MM_GRPO_SERVER_KEY"
    )


def accounts(client: ServerClient, timeout: float) -> list[WorkerAccount]:
    """Return the account of each worker of a server, at least one."""
    answer = client.call(RPC, {"method": RECEIVED}, timeout=timeout)
    with reading(client.url, f"{RPC} for {RECEIVED}"):
        first, *more = [WorkerAccount.model_validate(account) for account in answer["results"]]
        return [first, *more]


def adapter_layers(client: ServerClient, layers: Iterable[str], rank: int, timeout: float) -> frozenset[str]:
    """Return the `layers` for which all workers of a server have LoRA layers of at least `rank`."""
    query = json.dumps([sorted(layers), rank])
    answer = client.call(RPC, {"method": ADAPTER_LAYERS, "args": [query]}, timeout=timeout)
    with reading(client.url, f"{RPC} for {ADAPTER_LAYERS}"):
        return frozenset.intersection(*map(frozenset, answer["results"]))


async def weights_name(client: ServerClient, timeout: float) -> str:
    """Return the name of the weights that a server holds, which a restart changes."""
    answer = await client.request(INFO, method="GET", timeout=timeout)
    with reading(client.url, INFO):
        return str(answer["weight_version"])


def require_awake(client: ServerClient, timeout: float) -> None:
    """Raise ServerError if a server sleeps or is paused."""
    answer = client.call("/is_sleeping", method="GET", timeout=timeout)
    with reading(client.url, "/is_sleeping"):
        if answer["is_sleeping"]:
            raise ServerError(client.url, "it sleeps on after /wake_up")


async def ask(client: ServerClient, model: str, work: EngineRequest, timeout: float) -> EngineAnswer:
    """Send `work` to one server for its `model`. Raises ServerUnreachable and ServerRefused."""
    answer = await client.request(GENERATE, lambda: _body(work, model), timeout=timeout)
    with reading(client.url, GENERATE):
        return _answer(client.url, answer, scored="prompt_logprobs" in work.params)


def _body(work: EngineRequest, model: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "token_ids": list(work.token_ids),
        "sampling_params": dict(work.params),
        "model": model,
        "return_token_ids": True,
    }
    if work.media:
        body["content_parts"] = [
            {"type": "video_url", "url": data_url("video/zip", videos.archive_of(medium))}
            if isinstance(medium, Video)
            else {"type": "image_url", "url": data_url("image/png", encoded_image(medium))}
            for medium in work.media
        ]
    return body


def _answer(url: str, body: Any, *, scored: bool) -> EngineAnswer:
    """Parse an answer of GENERATE; the caller's `reading` turns what fails here into a ServerUnreachable."""
    ids, choices = tuple(body["prompt_token_ids"]), body["choices"]
    by_index = {choice["index"]: choice for choice in choices}
    sequences = tuple(_sampled(by_index[generation]) for generation in range(len(choices)))
    (weights,) = {str(span["version"]) for choice in choices for span in choice["weight_versions"]}
    chosen: tuple[float | None, ...] = ()
    if scored:  # the first token has no log-prob
        entries = zip(body["prompt_logprobs"], ids, strict=True)
        chosen = (None, *(float(entry[str(token)]["logprob"]) for entry, token in islice(entries, 1, None)))
    return EngineAnswer(ids, sequences, chosen, url, weights)


def _sampled(choice: Mapping[str, Any]) -> Sampled:
    content = (choice.get("logprobs") or {}).get("content") or ()
    logprobs = tuple(float(entry["logprob"]) for entry in content)
    return Sampled(tuple(choice["token_ids"]), logprobs, choice.get("finish_reason"))
