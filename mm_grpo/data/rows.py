"""Parsing of a dataset row (a mapping) into `Fields`: messages, image sources, columns.

layouts.py finds the prompt: a list of chat messages, or a string, which becomes one user message. `image` or
`images` are optional. Every field of the row is a column for the rewards; `used` says which ones the prompt was made
of. Names that differ are mapped by `data.columns` (our name → the dataset's name; columns.py).

Where the images stand in the messages, in this order of preference:

    parts     {"type": "image"} stands for the next entry of `images`; a part that carries its own image
              (its key `image`, `path` or `url`, or an `image_url` part as OpenAI writes it) uses that
    tags      <image> in a message that is a string, if no message has image parts
    nowhere   all images go to the start of the first user message, as TRL does

However they are placed, the count of places must equal the count of images. Images are not opened
here (images.py); rows with videos are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mm_grpo.data.columns import (
    ABSENT,
    PROMPT_FIELDS,
    brief,
    fill_template,
    locate,
    rename,
    template_names,
    value_at,
)
from mm_grpo.data.image_columns import HOW_TO_READ, PLACEHOLDER, image_columns
from mm_grpo.data.layouts import RowConversation, read_conversation
from mm_grpo.data.row_settings import TEMPLATE_COLUMN, read_limits, read_template_kwargs, with_limits
from mm_grpo.errors import DataError, half_character

ROLES = ("system", "developer", "user", "assistant", "tool")
IMAGE_TAG = "<image>"
PROMPT_PURPOSES = ("prompt", "images", "system")
_OWN_IMAGE_KEYS = ("image", "path", "url", "image_url")

Message = dict[str, Any]


@dataclass(frozen=True)
class Fields:
    """A normalised row with closed images."""

    messages: tuple[Message, ...]
    """Role, and content: a string or a list of `{"type": "text", "text": ...}` and `{"type": "image"}` parts."""
    images: tuple[Any, ...]
    """Sources of the image parts of the conversation, in order."""
    columns: dict[str, Any]
    """All fields of the row under our names, and `answer` if the row has it in another place. A column that
    `data.columns` maps to the prompt or to images has its own name too."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template for this row."""
    used: Mapping[str, str] = field(default_factory=dict)
    """Columns that were read, and for what: PROMPT_PURPOSES, "prompt template", "chat template", "answer"."""
    conversational: bool = True
    """True when the prompt was a list of messages, not a string."""

    @property
    def prompt_columns(self) -> frozenset[str]:
        """Names of the columns that the model is shown."""
        return frozenset(name for name, purpose in self.used.items() if purpose in PROMPT_PURPOSES)

    @property
    def other_columns(self) -> dict[str, Any]:
        """The columns that the model is not shown."""
        hidden = self.prompt_columns
        return {name: value for name, value in self.columns.items() if name not in hidden}


def read_row(
    row: Any,
    *,
    row_name: str,
    columns: Mapping[str, str] | None = None,
    system_prompt: str | None = None,
    prompt_template: str | None = None,
    pixel_limits: Mapping[str, int] | None = None,
) -> Fields:
    """Read the fields of one row, which is not changed.

    `row_name` is what messages call the row, such as "train.jsonl:12"; `columns` (our name → the dataset's name),
    `system_prompt` and `prompt_template` are as in the config's section `data`. `pixel_limits` bound those of images.

    Raises:
        DataError: the row has no prompt, two of them, a prompt that is no conversation or that ends with an
            answer, videos, or a count of images other than the count of places for them.
    """
    columns = columns or {}
    row_columns = values = renamed(row, row_name, columns)
    used = {name: "prompt" if name == "prompt" else "images" for name in PROMPT_FIELDS if name in values}
    for name, column in columns.items():
        if name in used and column in row and column not in values:
            row_columns, used[column] = {**row_columns, column: values[name]}, used[name]
    if prompt_template is not None:
        named = (locate(name, values) for name in template_names(prompt_template))
        used = {column: "prompt template" for column, _ in filter(None, named)} | used
        values = {**values, "prompt": fill_template(prompt_template, values, row_name)}
        columns = {"prompt": "prompt", **columns}
    conversation = read_conversation(values, row_name, columns, names=row)
    messages = _messages(conversation.prompt, conversation.column, row_name)
    messages, images = _place(messages, _listed_images(values, row_name), row_name)
    template_kwargs, row_limits = read_template_kwargs(values.get(TEMPLATE_COLUMN), row_name)
    for limits in filter(None, (row_limits, pixel_limits)):
        messages = with_limits(messages, limits)
    used = {name: purpose for name, purpose in {**used, **conversation.used}.items() if name in row_columns}
    if row_columns.get(TEMPLATE_COLUMN) is not None:
        used[TEMPLATE_COLUMN] = "chat template"
    fields = Fields(
        tuple(messages),
        tuple(images),
        {**row_columns, **conversation.answers},
        template_kwargs,
        used,
        conversational=not isinstance(conversation.prompt, str),
    )
    _check_texts(conversation, messages, images, fields.other_columns, row_name)
    if system_prompt is not None and all(m["role"] not in ("system", "developer") for m in messages):
        return replace(fields, messages=({"role": "system", "content": system_prompt}, *messages))
    return fields


def renamed(row: Any, row_name: str, columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a row under our names, without columns that the row lacks."""
    if not isinstance(row, Mapping):
        raise DataError(f"{row_name}: a row is a mapping of columns to values, not a {type(row).__name__}")
    if not columns:
        return dict(row)
    values = {
        our: value_at(row, their, f"{row_name}: data.columns.{our}") if our in columns else row[their]
        for our, their in rename(row, columns).items()
    }
    return {name: value for name, value in values.items() if value is not ABSENT}


def _listed_images(values: Mapping[str, Any], row_name: str) -> list[Any]:
    """Return the sources of `image` or `images`, in order. DataError if both are set, or a video is."""
    listed: dict[str, list[Any]] = {}
    for name in ("image", "images", "video", "videos"):
        value = values.get(name)
        if value is not None and not (isinstance(value, list | tuple) and not value):
            listed[name] = list(value) if isinstance(value, list | tuple) else [value]
    if len(listed) > 1 or not listed.keys() <= {"image", "images"}:
        names = " and ".join(map(repr, listed))
        raise DataError(f"{row_name}: has {names}; legal is 'image' or 'images', and no videos")
    name, images = next(iter(listed.items()), ("", []))
    for at, image in enumerate(images):
        if image is None:
            raise DataError(f"{row_name}: {name}[{at}] is null; list the images that the row has, or none")
    return images


def _messages(prompt: Any, column: str, row_name: str) -> list[Message]:
    """Copy the conversation to new dicts with a role, a content, and all other keys that are not null."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list | tuple) or not all(isinstance(message, Mapping) for message in prompt):
        raise DataError(
            f"{row_name}: {column!r} is a {type(prompt).__name__}; legal is a string, or a list of messages "
            'such as {"role": "user", "content": "..."}'
        )
    messages = [_message(message, f"{row_name}: {column}[{at}]") for at, message in enumerate(prompt)]
    if all(message["role"] != "user" for message in messages):
        raise DataError(f"{row_name}: {column!r} has no message of role 'user'; add one")
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{row_name}: {column!r} ends with a message of role 'assistant', which the model is to write; "
            "move it to a column of its own, such as 'answer', or if it is the answer set data.columns.messages to "
            "this column's name"
        )
    return messages


def _message(message: Mapping[str, Any], where: str) -> Message:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise DataError(f"{where}: the role is {brief(role)}; legal is one of {', '.join(ROLES)}")
    if isinstance(content, list | tuple):
        content = [_part(part, f"{where}.content[{at}]") for at, part in enumerate(content)]
    elif not isinstance(content, str):
        kind = type(content).__name__
        raise DataError(f"{where}: the content is a {kind}; legal is a string or a list of parts")
    # Arrow gives every message the keys of all messages, with null for a key that the message does not have
    filled = {key: value for key, value in message.items() if value is not None}
    return filled | {"role": role, "content": content}


def _part(part: Any, where: str) -> Message:
    """Return a text part, or an image part with the key `image` and limits, if it has them."""
    if isinstance(part, str):
        part = {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise DataError(f"{where}: a text part needs a string in 'text', not {brief(part.get('text'))}")
        return {"type": "text", "text": part["text"]}
    if kind not in ("image", "image_url"):
        raise DataError(f"{where}: a part of type {brief(kind)}; legal are 'text', 'image' and 'image_url'")
    source = next((part[key] for key in _OWN_IMAGE_KEYS if part.get(key) is not None), None)
    if kind == "image_url":
        source = source.get("url") if isinstance(source, Mapping) else source
        if source is None:
            raise DataError(f"{where}: an 'image_url' part has no url; legal is {{'url': ...}}")
    return {"type": "image", **({} if source is None else {"image": source}), **read_limits(part, where)}


def _check_texts(
    conversation: RowConversation,
    messages: list[Message],
    images: list[Any],
    other_columns: Mapping[str, Any],
    row_name: str,
) -> None:
    """DataError for a text with a placeholder of an image that is missing, and for a prompt that asks nothing."""
    asks = False
    for message in messages:
        text = "".join(_texts(message))
        if half := half_character(text):
            raise DataError(f"{row_name}: {conversation.column!r} {half}")
        if not images and (place := PLACEHOLDER.search(text)):
            unread = "".join(
                f" (the column {name!r} looks like images)" for name in image_columns(other_columns)
            )
            raise DataError(
                f"{row_name}: the prompt holds {place[0]!r}, and the row has no image{unread}. {HOW_TO_READ}; give the "
                f"row its image, or remove {place[0]!r}"
            )
        has_image = not isinstance(conversation.prompt, str) and len(_texts(message)) < len(_parts(message))
        asks = asks or (message["role"] == "user" and (has_image or bool(text.strip())))
    if not asks:
        raise DataError(
            f"{row_name}: {conversation.column!r} is empty; write a question, or leave the row out"
        )


def _parts(message: Message) -> list[Message]:
    """Return the parts of a message; none if its content is a string."""
    return [] if isinstance(message["content"], str) else message["content"]


def _texts(message: Message) -> list[str]:
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]


def _place(messages: list[Message], listed: list[Any], row_name: str) -> tuple[list[Message], list[Any]]:
    """Return messages with one image part per image, and the images in the order of the parts."""
    kind, parts = "image parts", _image_parts(messages)
    if not parts:
        tags = sum(m["content"].count(IMAGE_TAG) for m in messages if isinstance(m["content"], str))
        if tags:
            kind, placed = f"{IMAGE_TAG} tags", tags
            messages = [_split_tags(message) for message in messages]
        else:
            messages, placed = _add_image_parts(messages, len(listed))
        parts = [{"type": "image"}] * placed
    free = sum("image" not in part for part in parts)
    if free != len(listed):
        raise DataError(
            f"{row_name}: {kind} in the prompt: {free}; images in the row: {len(listed)}. Write one for each image. "
            + HOW_TO_READ
        )
    remaining = iter(listed)
    images = [part["image"] if "image" in part else next(remaining) for part in parts]
    return [_without_images(message) for message in messages], images


def _image_parts(messages: list[Message]) -> list[Message]:
    """Return the image parts of a conversation, in order."""
    if not any(map(_parts, messages)):
        return []
    from qwen_vl_utils import extract_vision_info  # imports torch, which rows of plain text do not need

    parts: list[Message] = extract_vision_info(messages)
    return parts


def _without_images(message: Message) -> Message:
    bare = [{key: value for key, value in part.items() if key != "image"} for part in _parts(message)]
    return message | {"content": bare} if bare else message


def _split_tags(message: Message) -> Message:
    """Split a string at its <image> tags into image parts and text parts."""
    content = message["content"]
    if not isinstance(content, str) or IMAGE_TAG not in content:
        return message
    first, *texts = content.split(IMAGE_TAG)
    parts = [{"type": "text", "text": first}]
    for text in texts:
        parts += [{"type": "image"}, {"type": "text", "text": text}]
    return message | {"content": [part for part in parts if part.get("text") != ""]}


def _add_image_parts(messages: list[Message], count: int) -> tuple[list[Message], int]:
    """Put `count` image parts before the text of the first user message; return the messages and the parts added.

    None are added to a message that is a list of parts.
    """
    at = next(i for i, message in enumerate(messages) if message["role"] == "user")
    content = messages[at]["content"]
    if count == 0 or not isinstance(content, str):
        return messages, 0
    parts = [*({"type": "image"} for _ in range(count)), {"type": "text", "text": content}]
    return [*messages[:at], messages[at] | {"content": parts}, *messages[at + 1 :]], count
