"""The bodies of requests to a vLLM server, and its answers: ids, log-probs, weight versions.

Three ways to send a prompt, by what the server has (dialect.py):

    ids and images   `content_parts` beside collapsed ids: what vLLM's in-process engine is given, over JSON
    chat             a text that becomes the ids again, with a chat template that only repeats it; the answer has the
                     ids that were run, which the engine compares
    features         the server's own processing of the images (`render`), beside expanded ids; for what is no text
                     of its own: a scored completion, a conversation that goes on

Images go as PNG, which changes no pixel. Media tokens get a logit bias of -1e30, which JSON can carry: the softmax is
in float32, where that leaves exactly 0 and the others' sum exact. A chat would clamp it to -100, so there the tokens
are `bad_words`, which vLLM sets to -inf.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING, Any

from mm_grpo.errors import ConfigError, EngineError
from mm_grpo.rollout.served.client import reading
from mm_grpo.rollout.served.dialect import CHAT, GENERATE, RENDER

if TYPE_CHECKING:
    from PIL.Image import Image

    from mm_grpo.rollout.served.client import ServerClient
    from mm_grpo.rollout.served.dialect import Dialect

MASKED = -1e30
"""Logit bias of a token that is never to be sampled."""
REPEAT = (
    "{%- for message in messages -%}{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}"
    "{%- for part in message['content'] -%}{%- if part['type'] == 'text' -%}{{ part['text'] }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{%- endfor -%}"
)
"""A chat template that repeats the text of its message: the text holds a placeholder for each image already."""


@dataclass(frozen=True)
class Work:
    """One request: collapsed `token_ids` and images, the `expanded` ids that they stand for, and vLLM's sampling
    parameters for its `n` generations. `uid` names the row in messages. `text` becomes the collapsed ids when it is
    tokenized, "" where no text does. `media` are the media tokens, as vLLM's tokenizer writes them, by id. Of
    requests that wait, one of lower `priority` goes first on servers that schedule by it."""

    uid: str
    token_ids: Sequence[int]
    images: Sequence[Image]
    expanded: Sequence[int]
    params: Mapping[str, Any]
    text: str = ""
    media: Mapping[int, str] = field(default_factory=dict)
    priority: int = 0

    @property
    def sequences(self) -> int:
        return int(self.params.get("n", 1))


@dataclass(frozen=True)
class Sampled:
    """One sampled sequence. `versions` are (first token, name of the weights) spans, () where the server has none."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str | None
    versions: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Answer:
    """A server's answer to one `Work`: the ids it ran, its sequences by generation, log-probs of the prompt."""

    prompt_token_ids: tuple[int, ...]
    sequences: tuple[Sampled, ...]
    prompt_logprobs: tuple[float | None, ...] = ()


async def ask(client: ServerClient, dialect: Dialect, work: Work, timeout: float) -> Answer:
    """Send `work` to one server. Raises ServerUnreachable, ServerRefused, and ConfigError for a prompt that its
    version cannot be sent."""
    if dialect.images_by_ids or not work.images:
        body = await client.request(GENERATE, lambda: _by_ids(work, dialect), timeout=timeout)
        sent = None if dialect.images_by_ids else tuple(work.token_ids)
        with reading(client.url, GENERATE):
            return read_generated(body, sent, "prompt_logprobs" in work.params)
    if work.text and "prompt_logprobs" not in work.params:
        body = await client.request(CHAT, lambda: _chat(work, dialect), timeout=timeout)
        with reading(client.url, CHAT):
            return read_chat(body)
    rendered = await client.request(RENDER, lambda: _images_alone(work, dialect), timeout=timeout)
    placed, features = _placed(rendered, work, dialect, client.url)
    body = await client.request(GENERATE, lambda: _by_ids(work, dialect, placed, features), timeout=timeout)
    with reading(client.url, GENERATE):
        return read_generated(body, placed, "prompt_logprobs" in work.params)


# bodies --------------------------------------------------------------------------------------


def data_url(image: Image) -> str:
    """The image as a PNG in a data URL: no pixel changes."""
    held = io.BytesIO()
    image.save(held, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(held.getvalue()).decode("ascii")


def _by_ids(
    work: Work, dialect: Dialect, token_ids: Sequence[int] | None = None, features: Any = None
) -> dict[str, Any]:
    body: dict[str, Any] = {
        "token_ids": list(work.token_ids if token_ids is None else token_ids),
        "sampling_params": _params(work),
        "model": dialect.model,
    }
    if features is not None:
        body["features"] = features
    elif work.images:
        body["content_parts"] = [{"type": "image_url", "url": data_url(image)} for image in work.images]
    if dialect.images_by_ids:
        body["return_token_ids"] = True
    return body | _priority(work, dialect)


def _priority(work: Work, dialect: Dialect) -> dict[str, int]:
    return {"priority": work.priority} if work.priority and dialect.priorities else {}


def _params(work: Work) -> dict[str, Any]:
    bias = {str(token): MASKED for token in sorted(work.media)}
    return {**work.params, **({"logit_bias": bias} if bias else {})}


def _chat(work: Work, dialect: Dialect) -> dict[str, Any]:
    params = dict(work.params)
    for name in ("detokenize", "logprobs"):
        params.pop(name, None)
    params["max_completion_tokens"] = params.pop("max_tokens")
    return {
        **_message(work, dialect, work.text),
        **params,
        "bad_words": [work.media[token] for token in sorted(work.media)],
        "logprobs": True,
        "top_logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **_priority(work, dialect),
    }


def _images_alone(work: Work, dialect: Dialect) -> dict[str, Any]:
    """The images with nothing but their placeholders."""
    return _message(work, dialect, "".join([work.media[_placeholder(work)]] * len(work.images)))


def _message(work: Work, dialect: Dialect, text: str) -> dict[str, Any]:
    images = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in work.images]
    return {
        "model": dialect.model,
        "messages": [{"role": "user", "content": [*images, {"type": "text", "text": text}]}],
        "chat_template": REPEAT,
        "add_generation_prompt": False,
        "add_special_tokens": False,
    }


def _placeholder(work: Work) -> int:
    """The token that stands for an image in the collapsed ids: the media token that is there once for each."""
    counts = {token: list(work.token_ids).count(token) for token in work.media}
    grown = {t for t in counts if list(work.expanded).count(t) > counts[t]}
    found = [t for t, n in counts.items() if n == len(work.images) and (t in grown or not grown)]
    if len(found) != 1:
        raise ConfigError(
            f"{work.uid}: the prompt has no single token for each of its {len(work.images)} images, as vLLM before "
            "0.32 needs them where a conversation goes on or is scored; use vLLM 0.32 servers, or rollout.engine=vllm"
        )
    return found[0]


def _placed(
    rendered: Mapping[str, Any], work: Work, dialect: Dialect, url: str
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The expanded ids as the server expands the images, and its features with their places in these ids."""
    token = _placeholder(work)
    features = dict(rendered.get("features") or {})
    places = (features.get("mm_placeholders") or {}).get("image") or []
    ids = rendered.get("token_ids") or []
    runs = [ids[p["offset"] : p["offset"] + p["length"]] for p in places]
    if len(runs) != len(work.images):
        raise EngineError(f"{url}: {RENDER} found {len(runs)} images where {len(work.images)} were sent")
    if any(set(run) != {token} for run in runs):
        raise ConfigError(
            f"{work.uid}: vLLM {dialect.version} at {url} cannot be sent images of this family beside ids, because "
            "they become more than one kind of token; use vLLM 0.32 servers, or rollout.engine=vllm"
        )
    placed: list[int] = []
    found: list[dict[str, int]] = []
    for each in work.token_ids:
        if each == token:
            run = runs[len(found)]
            found.append({"offset": len(placed), "length": len(run)})
            placed += run
        else:
            placed.append(each)
    features["mm_placeholders"] = {"image": found}
    return tuple(placed), features


# answers -------------------------------------------------------------------------------------


def read_generated(body: Any, sent: tuple[int, ...] | None, scored: bool) -> Answer:
    """An answer of `/inference/v1/generate`; `sent` are the prompt's ids where the server does not return them.

    As the other readers here it raises what `reading` makes an error of the server's.
    """
    ids = tuple(map(_token, body["prompt_token_ids"])) if sent is None else sent
    logprobs = _chosen(body["prompt_logprobs"], ids) if scored else ()
    return Answer(ids, _sequences(body["choices"]), logprobs)


def read_chat(body: Any) -> Answer:
    """An answer of `/v1/chat/completions` with `return_token_ids`."""
    return Answer(tuple(map(_token, body["prompt_token_ids"])), _sequences(body["choices"]))


def _sequences(choices: Sequence[Mapping[str, Any]]) -> tuple[Sampled, ...]:
    by_index = {choice["index"]: choice for choice in choices}
    return tuple(_sampled(by_index[generation]) for generation in range(len(choices)))


def _sampled(choice: Mapping[str, Any]) -> Sampled:
    spans = tuple(
        (index(span["start"]), str(span["version"])) for span in choice.get("weight_versions") or ()
    )
    starts = [start for start, _ in spans]
    if starts and (starts[0] != 0 or starts != sorted(set(starts))):
        raise ValueError(f"weight_versions start at tokens {starts}")
    return Sampled(
        tuple(map(_token, choice["token_ids"])),
        tuple(_logprob(entry) for entry in (choice.get("logprobs") or {}).get("content") or ()),
        choice.get("finish_reason"),
        spans,
    )


def _chosen(entries: Sequence[Any], ids: Sequence[int]) -> tuple[float | None, ...]:
    """The log-prob of each token of the prompt; that of the first is None."""
    if len(entries) != len(ids):
        raise ValueError(f"{len(entries)} prompt_logprobs for {len(ids)} tokens")
    return (None, *(_logprob(entry[str(token)]) for entry, token in zip(entries[1:], ids[1:], strict=True)))


def _token(value: Any) -> int:
    if not 0 <= index(value) < 1 << 31:
        raise ValueError(f"{value} is no token")
    return index(value)


def _logprob(entry: Mapping[str, Any]) -> float:
    value = entry["logprob"]
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no log-prob")
    return float(value)
