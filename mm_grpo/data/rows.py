"""Parsing of a dataset row (a mapping) into `Fields`: messages, image sources, columns.

layouts.py finds the prompt: a list of chat messages, or a string, which becomes one user message. `image` or
`images` are optional. Every field of the row is a column for the rewards; `used` says which ones the prompt was made
of. Names that differ are mapped by `data.columns` (our name → the dataset's name; columns.py).

Where the images stand in the messages, in this order of preference:

    parts     {"type": "image"} stands for the next entry of `images`; a part that carries its own image
              (its key `image`, `path` or `url`, or an `image_url` part as OpenAI writes it) uses that; `index` is the
              number of its image in `images`, from 0
    tags      <image> in a message that is a string, if no message has image parts; tags with numbers (<image 1>,
              <|image_2|>) stand for the images of these numbers
    nowhere   all images go to the start of the first user message, as TRL does

However they are placed, each image has its place. The columns `image_1`, `image_2`, ... are the images of a row that
has no others. Images are not opened here (images.py); rows with videos and tags of other models (image_columns.py) are
refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mm_grpo.data.columns import (
    ABSENT,
    PROMPT_FIELDS,
    brief,
    fill_template,
    locate,
    quoted,
    rename,
    template_names,
    value_at,
)
from mm_grpo.data.image_columns import (
    HOW_TO_READ,
    IMAGE_PLACE,
    IMAGE_TAG,
    image_columns,
    numbered_images,
    unread_tag,
)
from mm_grpo.data.layouts import RowConversation, from_json, read_conversation
from mm_grpo.data.row_settings import TEMPLATE_COLUMN, read_limits, read_template_kwargs
from mm_grpo.data.videos import VideoSource
from mm_grpo.errors import DataError, half_character
from mm_grpo.types import PIXEL_LIMITS, messages_text, with_limits

ROLES = ("system", "developer", "user", "assistant", "tool")
PROMPT_PURPOSES = ("prompt", "images", "system")
ALIAS = "alias"
"""Purpose of a column under the dataset's name, if it is there under our name too."""
_OWN_IMAGE_KEYS = ("image", "path", "url", "image_url")
_IMAGE_KEYS = (*_OWN_IMAGE_KEYS, *PIXEL_LIMITS)
_PART_KEYS = {"text": ("text",), "image": _IMAGE_KEYS, "image_url": _IMAGE_KEYS}
"""Keys of a part by its type."""

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
    `data.columns` maps has its own name too, because rewards may ask for it by either."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template for this row."""
    used: Mapping[str, str] = field(default_factory=dict)
    """Columns and their purposes: PROMPT_PURPOSES, ALIAS, "prompt template", "chat template", "answer"."""
    conversational: bool = True
    """True when the prompt was a list of messages, not a string."""
    videos: tuple[VideoSource, ...] = ()
    """Sources of the video parts of the conversation, in order."""

    @property
    def media(self) -> tuple[Any, ...]:
        """Sources of images, then of videos."""
        return self.images + self.videos

    @property
    def other_columns(self) -> dict[str, Any]:
        """The columns that the model is not shown, each by one name."""
        hidden = (*PROMPT_PURPOSES, ALIAS)
        return {name: value for name, value in self.columns.items() if self.used.get(name) not in hidden}


def read_row(
    row: Any,
    *,
    row_name: str,
    columns: Mapping[str, str] | None = None,
    system_prompt: str | None = None,
    prompt_template: str | None = None,
    pixel_limits: Mapping[str, int] | None = None,
    text_only: bool = False,
) -> Fields:
    """Read the fields of one row, which is not changed.

    `row_name` is what messages call the row, such as "train.jsonl:12"; `columns` (our name → the dataset's name),
    `system_prompt`, `prompt_template` and `text_only` are as in the config's section `data`. `pixel_limits` bound the
    limits of images.

    Raises:
        DataError: the row has no prompt, two of them, a prompt that is no conversation or that ends with an
            answer, videos, or a count of images other than the count of places for them.
    """
    columns = columns or {}
    values = renamed(row, row_name, columns)
    aliases = {theirs: ours for ours, theirs in columns.items() if theirs in row and theirs not in values}
    row_columns = values
    used = {name: "prompt" if name == "prompt" else "images" for name in PROMPT_FIELDS if name in values}
    if prompt_template is not None:
        named = (locate(name, values) for name in template_names(prompt_template))
        used = {column: "prompt template" for column, _ in filter(None, named)} | used
        # a template says where the texts of `system` and `history` stand
        texts = {n: v for n, v in values.items() if n not in ("system", "history") or n not in used}
        values = {**texts, "prompt": fill_template(prompt_template, values, row_name)}
        columns = {"prompt": "prompt", **columns}
    conversation = read_conversation(values, row_name, columns, names=row)
    # a text of the column `system` stands before the messages of the row
    first = -1 if "system" in conversation.used and conversation.conversational else 0
    messages = _messages(conversation.prompt, conversation.column, row_name, first)
    listed, template_kwargs, limits = _listed_images(values, row_name), dict[str, Any](), [pixel_limits]
    used |= conversation.used
    if "prompt" not in row_columns:  # a template's prompt is no column
        used.pop("prompt", None)
    has_images = bool(listed) or any("image" in part for part in _image_parts(messages))
    if not has_images and columns.keys().isdisjoint(("image", "images")):
        numbered = numbered_images(values, row_name)
        listed = [image for image in numbered.values() if image is not None]
        used |= dict.fromkeys(numbered, "images")
    if values.get(TEMPLATE_COLUMN) is not None:
        used[TEMPLATE_COLUMN] = "chat template"
        template_kwargs, row_limits = read_template_kwargs(values[TEMPLATE_COLUMN], row_name)
        limits = [row_limits, pixel_limits]
    unread = None
    if not (has_images or listed):
        unread = [
            *image_columns({n: v for n, v in row_columns.items() if used.get(n) not in PROMPT_PURPOSES})
        ]
    _check_texts(conversation, messages, unread, row_name, text_only)
    messages, images = _place(messages, listed, row_name, unread)
    for bounds in filter(None, limits):
        messages = with_limits(messages, bounds)
    if system_prompt is not None and all(m["role"] not in ("system", "developer") for m in messages):
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return Fields(
        tuple(messages),
        tuple(images),
        {**row_columns, **{theirs: row[theirs] for theirs in aliases}, **conversation.answers},
        template_kwargs,
        used | {theirs: used.get(ours, ALIAS) for theirs, ours in aliases.items()},
        conversational=conversation.conversational,
    )


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


def _messages(prompt: Any, column: str, row_name: str, first: int) -> list[Message]:
    """Copy the conversation to new dicts with a role, a content, and all other keys that are not null."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list | tuple) or not all(isinstance(message, Mapping) for message in prompt):
        raise DataError(
            f"{row_name}: {column!r} is a {type(prompt).__name__}; legal is a string, or a list of messages "
            'such as {"role": "user", "content": "..."}'
        )
    messages = [
        _message(message, f"{row_name}: {column}[{at}]") for at, message in enumerate(prompt, start=first)
    ]
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
    role, content = message.get("role"), from_json(message.get("content"), f"{where}.content", {"type"})
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
    if not isinstance(kind, str) or kind not in _PART_KEYS:
        raise DataError(f"{where}: a part of type {brief(kind)}; legal are 'text', 'image' and 'image_url'")
    if isinstance(url := part.get("image_url"), Mapping):
        part = {**part, "image_url": None, **url}
    values = {key: value for key, value in part.items() if key != "type" and value is not None}
    for key, value in values.items():
        # some writers fill keys with empty values, and OpenAI's `detail` is the whole picture unless it is "low"
        is_default = str(value) in ("", "[]", "{}", *(("auto", "high") if key == "detail" else ()))
        is_index = key == "index" and isinstance(value, int | float)
        if not (is_index or is_default or key in _PART_KEYS[kind]):
            legal = quoted(_PART_KEYS[kind])
            raise DataError(
                f"{where}: nothing reads {key!r} ({brief(value)}); remove it. Legal beside 'type': {legal}"
            )
    if kind == "text":
        if not isinstance(values.get("text"), str):
            raise DataError(f"{where}: a text part needs a string in 'text', not {brief(values.get('text'))}")
        return {"type": "text", "text": values["text"]}
    sources = [values[key] for key in _OWN_IMAGE_KEYS if key in values]
    if len(sources) > 1 or (kind == "image_url" and not sources):
        raise DataError(
            f"{where}: {len(sources)} images in a part; legal is one of {quoted(_OWN_IMAGE_KEYS)}"
        )
    own = {"image": sources[0]} if sources else {"index": values.get("index")}
    return {"type": "image", **own, **read_limits(values, where)}


def _check_texts(
    conversation: RowConversation,
    messages: list[Message],
    unread: list[str] | None,
    row_name: str,
    text_only: bool,
) -> None:
    """DataError for a tag of an image, a video or a sound that is not read, and for a prompt that asks nothing.

    `unread` are the columns of a row without images that look like images; None if the row has images.
    """
    asks, has_parts = False, bool(_image_parts(messages))
    for message in messages:
        text, in_parts = messages_text([message]), has_parts or bool(_parts(message))
        if half := half_character(text):
            raise DataError(f"{row_name}: {conversation.column!r} {half}")
        if tag := unread_tag(text, reads_tags=not in_parts, reads_markup=text_only and unread == []):
            place = "a part {'type': 'image'}" if in_parts else IMAGE_TAG
            why = f"which would stay text. Write {place} where an image stands"
            if unread is not None:
                why = f"and the row has no image{_looks(unread)}. {HOW_TO_READ}; give the row its image"
            raise DataError(f"{row_name}: the prompt holds {tag!r}, {why}, remove it, or put a space into it")
        has_question = bool(IMAGE_PLACE.sub("", text).strip())
        has_image = conversation.conversational and unread is None
        asks = asks or (message["role"] == "user" and (has_question or has_image))
    if not asks:
        raise DataError(
            f"{row_name}: {conversation.column!r} is empty; write a question, or leave the row out"
        )


def _parts(message: Message) -> list[Message]:
    """Return the parts of a message; none if its content is a string."""
    return [] if isinstance(message["content"], str) else message["content"]


def _looks(unread: Iterable[str] | None) -> str:
    return "".join(f" (the column {n!r} looks like images: data.columns.images={n})" for n in unread or ())


def _place(
    messages: list[Message], listed: list[Any], row_name: str, unread: Iterable[str] | None
) -> tuple[list[Message], list[Any]]:
    """Return messages with one image part per place of an image, and the images in the order of the parts."""
    kind, parts = "image parts", _image_parts(messages)
    if not parts and any(IMAGE_PLACE.search(m["content"]) for m in messages if isinstance(m["content"], str)):
        kind, messages = f"{IMAGE_TAG} tags", [_split_tags(message) for message in messages]
        parts = [part for message in messages for part in _parts(message) if part["type"] == "image"]
    elif not parts:
        messages, placed = _add_image_parts(messages, len(listed))
        if placed == len(listed):
            return messages, listed
        parts = [{"type": "image"}] * placed
    places = [part.get("index") for part in parts if "image" not in part]
    indices: list[Any] = list(range(len(places))) if {*places} == {None} else places
    if "tags" in kind and None not in places and 0 not in places:  # tags are numbered from 1, or from 0
        indices = [index - 1 for index in indices]
    if {*indices} != {*range(len(listed))}:
        numbers = f" (numbers {', '.join(map(str, places))})" if any(places) else ""
        raise DataError(
            f"{row_name}: {kind} in the prompt: {len(places)}{numbers}; images in the row: {len(listed)}"
            f"{_looks(unread)}. Write one for each image. {HOW_TO_READ}"
        )
    remaining = (listed[int(index)] for index in indices)
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
    bare = [{k: v for k, v in part.items() if k not in ("image", "index")} for part in _parts(message)]
    return message | {"content": bare} if bare else message


def _split_tags(message: Message) -> Message:
    """Split a string at its tags of images into image parts and text parts."""
    content = message["content"]
    if not isinstance(content, str) or not IMAGE_PLACE.search(content):
        return message
    first, *pieces = IMAGE_PLACE.split(content)
    parts = [{"type": "text", "text": first}]
    for number, text in zip(pieces[::2], pieces[1::2], strict=True):
        index = None if number is None else int(number)
        parts += [{"type": "image", "index": index}, {"type": "text", "text": text}]
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
