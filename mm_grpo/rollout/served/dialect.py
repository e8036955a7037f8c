"""What a vLLM server can do, by version, and how that is found out when a run starts.

| part                                              | 0.25.1                            | 0.32                 |
|---------------------------------------------------|-----------------------------------|----------------------|
| ids in, ids out: `/inference/v1/generate`         | always there                      | `--enable-scale-out` |
| images beside ids there (`content_parts`)         | no: by chat text, ids compared    | yes                  |
| the ids of the prompt, expanded, in its answer    | no: in that of a chat             | yes                  |
| which weights a token was sampled under           | no: asked for after each answer   | `weight_versions`    |
| checks before samples (`priority`)                | `--scheduling-policy priority`    | the same             |
| the version's name (`/weight_info`)               | no: the worker's own record       | yes                  |
| weight transfer, pause, caches, `/collective_rpc` | `VLLM_SERVER_DEV_MODE=1`          | the same             |

Nothing compares versions: `probe` reads the server's own list of endpoints (`/openapi.json`), so a version in between
is served by what it has. 0.32 has been run, 0.25.1 has been read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mm_grpo.errors import ConfigError
from mm_grpo.rollout.served.client import ServerRefused

if TYPE_CHECKING:
    from mm_grpo.rollout.served.client import ServerClient

GENERATE = "/inference/v1/generate"
CHAT = "/v1/chat/completions"
RENDER = "/v1/chat/completions/render"
RPC = "/collective_rpc"
RECEIVED = "mm_grpo_received"
"""Method of the worker extension: what each worker received, see plugin_engines.py."""
INFO = "/weight_info"
WEIGHTS_NAME = "mm_grpo_weights_name"
"""Method of the worker extension: the name of the weights that it received last, None before any."""
CONTROL = (
    "/pause",
    "/resume",
    "/is_paused",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache",
    "/reset_encoder_cache",
    RPC,
)
"""What every server needs beside what samples."""
ENDPOINTS = frozenset(
    (
        *CONTROL,
        GENERATE,
        CHAT,
        RENDER,
        INFO,
        "/health",
        "/version",
        "/openapi.json",
        "/v1/models",
        "/get_world_size",
    )
)
"""All that a run asks of a server; one of ours answers nothing else."""
SIZES = ("model_type", "_size", "_layers", "_heads", "depth", "embed_dim")
"""How those fields of a model's config end by which its weights fit another model."""


@dataclass(frozen=True)
class Dialect:
    """What one server has. `model` is the name that it serves, `max_model_len` its longest sequence in tokens, None
    where it does not say; `sizes` are those of its model (`model_sizes`), {} where it does not say."""

    version: str
    images_by_ids: bool
    spans: bool
    named_versions: bool
    priorities: bool
    model: str
    max_model_len: int | None = None
    sizes: Mapping[str, Any] = field(default_factory=dict)


def model_sizes(config: Any) -> dict[str, Any]:
    """What weights a model takes, by its transformers config: the fields of SIZES, those of a part as PART.FIELD."""
    fields = dict(config.to_dict())
    for part in ("text_config", "vision_config"):
        fields |= {f"{part}.{name}": value for name, value in (fields.get(part) or {}).items()}
    return {k: v for k, v in fields.items() if k.endswith(SIZES) and isinstance(v, (int, str))}


def probe(client: ServerClient, timeout: float = 10.0) -> Dialect:
    """Ask a server what it has. Raises ConfigError for one that lacks what a run needs, with how to start it, and
    ServerUnreachable."""
    try:
        version = client.call("/version", method="GET", timeout=timeout)
        listed = client.call("/openapi.json", method="GET", timeout=timeout)
        models = client.call("/v1/models", method="GET", timeout=timeout)
    except ServerRefused as error:
        if error.status in (401, 403):
            raise ConfigError(key_refused(client.url, error.reason)) from None
        raise ConfigError(
            f"rollout.server.urls: {client.url} is no vLLM server that lists its endpoints ({error.reason}); start it "
            "with `mm-grpo serve`, or `vllm serve` without --disable-fastapi-docs"
        ) from None
    paths = listed.get("paths", {}) if isinstance(listed, Mapping) else {}
    schemas = listed.get("components", {}).get("schemas", {}) if isinstance(listed, Mapping) else {}
    fields = schemas.get("GenerateRequest", {}).get("properties", {})
    images_by_ids = "content_parts" in fields
    require(client.url, paths, images_by_ids)
    workers = client.call(RPC, {"method": RECEIVED}, timeout=timeout)
    served: Mapping[str, Any] = next(iter(models.get("data", ())), {})
    return Dialect(
        version=str(version.get("version", "unknown")),
        images_by_ids=images_by_ids,
        spans=INFO in paths,
        named_versions=INFO in paths,
        priorities="priority" in fields,
        model=str(served.get("id", "")),
        max_model_len=served.get("max_model_len"),
        sizes=workers["results"][0].get("model", {}),
    )


async def weights_name(client: ServerClient, dialect: Dialect, timeout: float) -> str | None:
    """The name of the weights that a server holds, which is another one after a restart."""
    if dialect.named_versions:
        found = await client.request(INFO, method="GET", timeout=timeout)
        return None if found is None else str(found["weight_version"])
    found = await client.request(RPC, {"method": WEIGHTS_NAME}, timeout=timeout)
    names = set(found["results"])
    return str(names.pop()) if len(names) == 1 and None not in names else None


async def is_paused(client: ServerClient, timeout: float) -> bool:
    """Whether a server samples nothing because weights are being sent to it."""
    answer = await client.request("/is_paused", method="GET", timeout=timeout)
    return bool(answer["is_paused"])


def require(url: str, paths: Mapping[str, Any], images_by_ids: bool) -> None:
    """ConfigError where a server lacks an endpoint, naming what it was started without."""
    if GENERATE not in paths:
        raise ConfigError(
            f"rollout.server.urls: {url} has no {GENERATE}; start it with `mm-grpo serve`, or give `vllm serve` "
            "--enable-scale-out (vLLM 0.25.1 or newer)"
        )
    if missing := [path for path in CONTROL if path not in paths]:
        raise ConfigError(
            f"rollout.server.urls: {url} has no {', '.join(missing)}, so it can take no weights; start it with "
            "`mm-grpo serve`, or `vllm serve` with VLLM_SERVER_DEV_MODE=1 in its environment and "
            "--weight-transfer-config"
        )
    if not images_by_ids and (missing := [path for path in (CHAT, RENDER) if path not in paths]):
        raise ConfigError(
            f"rollout.server.urls: {url} takes no images beside ids, and has no {', '.join(missing)} to send them by; "
            "use vLLM 0.25.1 or newer"
        )


def key_refused(url: str, reason: str) -> str:
    """The message of a server that wants another key."""
    return (
        f"rollout.server.urls: {url} refuses the key ({reason}); put the server's key into the environment variable "
        "MM_GRPO_SERVER_KEY (what `mm-grpo serve` keeps at 127.0.0.1 is found by the same user alone)"
    )
