"""The one dialect of vLLM servers that is spoken here, that of 0.32: endpoints, bodies of requests, and their answers.

A prompt goes to `/inference/v1/generate` as collapsed ids with its images beside them (`content_parts`), as vLLM's
in-process engine is given it, and comes back with the ids that were run, log-probs, and the name of the weights that
they were sampled under. Images go as PNG, which changes no pixel. Media tokens get a logit bias of -1e30, which
JSON can carry: the softmax is in float32, where that leaves exactly 0 and the others' sum exact.

`probe` reads a server's own list of endpoints (`/openapi.json`): one that lacks some of these is refused at the start.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from operator import index
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from mm_grpo.errors import ConfigError
from mm_grpo.rollout.served.client import ServerRefused, reading
from mm_grpo.rollout.vllm.requests import EngineAnswer, EngineRequest, Sampled

if TYPE_CHECKING:
    from PIL.Image import Image

    from mm_grpo.rollout.served.client import ServerClient

GENERATE = "/inference/v1/generate"
RPC = "/collective_rpc"
RECEIVED = "mm_grpo_received"
"""Method of the worker extension: what each worker received, see plugin.py."""
ADAPTER_LAYERS = "mm_grpo_adapter_layers"
"""Another: the layers that it can run adapters of."""
INFO = "/weight_info"
NEEDED = (
    GENERATE,
    INFO,
    "/pause",
    "/resume",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/update_weight_version",
    "/reset_prefix_cache",
    "/reset_encoder_cache",
    RPC,
)
"""What not every vLLM server has."""
SIZES = ("model_type", "_size", "_layers", "_heads", "depth", "embed_dim")
"""How those fields of a model's config end by which its weights fit another model."""
MASKED = -1e30
"""Logit bias of a token that is never to be sampled."""


@dataclass(frozen=True)
class Limits:
    """Limits of `rollout.server`, in seconds, and what a run needs of a server.

    `max_model_len` is the longest sequence that a server has to take, in tokens; `lora_rank` is that of the learner's
    adapters, 0 without; `sizes` are its model's.
    """

    timeout: float = 600.0
    probe_timeout: float = 30.0
    wait_timeout: float = 300.0
    max_model_len: int = 0
    lora_rank: int = 0
    sizes: Mapping[str, Any] = field(default_factory=dict)


class WorkerAccount(BaseModel):
    """What a worker of a server received (plugin.py): `digests` are those of the last update, of one under way they
    have the names alone.

    `finished` is false while an update is under way, and after one that was given up. `group` names the group that the
    worker is in, `model` is what `model_sizes` says of the server's, `logprobs_mode` which log-probs it reports.
    """

    model_config = ConfigDict(strict=True, extra="ignore")

    digests: dict[str, str] = {}
    finished: bool = True
    group: str = ""
    model: dict[str, Any] = {}
    logprobs_mode: str = ""


# what a server is ----------------------------------------------------------------------------


def model_sizes(config: Any) -> dict[str, Any]:
    """What weights a model takes, by its transformers config: the fields of SIZES, those of a part as PART.FIELD."""
    fields = dict(config.to_dict())
    for part in ("text_config", "vision_config"):
        fields |= {f"{part}.{name}": value for name, value in (fields.get(part) or {}).items()}
    return {k: v for k, v in fields.items() if k.endswith(SIZES) and isinstance(v, (int, str))}


def probe(client: ServerClient, limits: Limits) -> str:
    """The name of the model that a server serves. Raises ConfigError for one that lacks what a run needs, with how to
    start it, and ServerUnreachable."""
    where, timeout = f"rollout.server.urls: {client.url}", limits.probe_timeout
    paths = ("/openapi.json", "/v1/models")
    try:
        listed, models = [client.call(path, method="GET", timeout=timeout) for path in paths]
        with reading(client.url, ", ".join(paths)):
            served = models["data"][0]
            model, length = str(served["id"]), index(served["max_model_len"])
            missing = [path for path in NEEDED if path not in dict(listed["paths"])]
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
            f"{where} reports log-probs from before temperature and masks, which are not those that tokens are drawn "
            "by; start it with --logprobs-mode processed_logprobs"
        )
    for field_name, own in limits.sizes.items():
        if (other := account.model.get(field_name, own)) != own:
            raise ConfigError(
                f"{where} serves another model: its {field_name} is {other!r}, and that of model.path is {own!r}; name "
                "a server that was started for this model"
            )
    return model


def key_refused(url: str, reason: str) -> str:
    """The message of a server that wants another key."""
    return (
        f"rollout.server.urls: {url} refuses the key ({reason}); put the server's key into the environment variable "
        "MM_GRPO_SERVER_KEY"
    )


def accounts(client: ServerClient, timeout: float) -> list[WorkerAccount]:
    """What each worker of a server received, one at least."""
    answer = client.call(RPC, {"method": RECEIVED}, timeout=timeout)
    with reading(client.url, f"{RPC} for {RECEIVED}"):
        first, *others = [WorkerAccount.model_validate(each) for each in answer["results"]]
        return [first, *others]


def adapter_layers(client: ServerClient, layers: Iterable[str], rank: int, timeout: float) -> frozenset[str]:
    """Those of the learner's `layers` for which all workers of a server have LoRA layers of at least `rank`."""
    answer = client.call(
        RPC, {"method": ADAPTER_LAYERS, "args": [json.dumps([sorted(layers), rank])]}, timeout=timeout
    )
    with reading(client.url, f"{RPC} for {ADAPTER_LAYERS}"):
        return frozenset.intersection(*map(frozenset, answer["results"]))


async def weights_name(client: ServerClient, timeout: float) -> str:
    """The name of the weights that a server holds, which is another one after a restart."""
    answer = await client.request(INFO, method="GET", timeout=timeout)
    with reading(client.url, INFO):
        return str(answer["weight_version"])


# one request ---------------------------------------------------------------------------------


async def ask(client: ServerClient, model: str, work: EngineRequest, timeout: float) -> EngineAnswer:
    """Send `work` to one server, which serves `model`. Raises ServerUnreachable and ServerRefused."""
    answer = await client.request(GENERATE, lambda: _body(work, model), timeout=timeout)
    with reading(client.url, GENERATE):
        return _answer(client.url, answer, scored="prompt_logprobs" in work.params)


def data_url(image: Image) -> str:
    """The image as a PNG in a data URL: no pixel changes."""
    held = io.BytesIO()
    image.save(held, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(held.getvalue()).decode("ascii")


def _body(work: EngineRequest, model: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "token_ids": list(work.token_ids),
        "sampling_params": dict(work.params),
        "model": model,
        "return_token_ids": True,
    }
    if work.images:
        body["content_parts"] = [{"type": "image_url", "url": data_url(image)} for image in work.images]
    return body


def _answer(url: str, body: Any, *, scored: bool) -> EngineAnswer:
    """An answer of GENERATE; what fails here is made an error of the server's by `reading`."""
    ids, choices = tuple(body["prompt_token_ids"]), body["choices"]
    by_index = {choice["index"]: choice for choice in choices}
    sequences = tuple(_sampled(by_index[generation]) for generation in range(len(choices)))
    (weights,) = {str(span["version"]) for choice in choices for span in choice["weight_versions"]}
    chosen: tuple[float | None, ...] = ()
    if scored:  # there is none of the first token
        entries = zip(body["prompt_logprobs"], ids, strict=True)
        chosen = (None, *(float(entry[str(token)]["logprob"]) for entry, token in islice(entries, 1, None)))
    return EngineAnswer(ids, sequences, chosen, url, weights)


def _sampled(choice: Mapping[str, Any]) -> Sampled:
    content = (choice.get("logprobs") or {}).get("content") or ()
    logprobs = tuple(float(entry["logprob"]) for entry in content)
    return Sampled(tuple(choice["token_ids"]), logprobs, choice.get("finish_reason"))
