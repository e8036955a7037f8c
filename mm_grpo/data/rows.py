"""Row layouts: one dataset row (a mapping) becomes `Fields`: messages, image sources, columns.

The layout is TRL's. `prompt` is a list of chat messages, or a string, which becomes one user message.
`image` or `images` are optional, and every other field of the row is a column for the rewards. Names
that differ are mapped by `data.columns` (our name → the dataset's name).

Where the images stand in the messages, in this order of preference:

    parts     {"type": "image"} stands for the next entry of `images`; a part that carries its own image
              (its key `image`, `path` or `url`, or an `image_url` part as OpenAI writes it) uses that
    tags      <image> in a message that is a string, where no message has image parts
    nowhere   all images go to the start of the first user message, as TRL does

However they are placed, the count of places must equal the count of images. Images are not opened
here (images.py); rows with videos are refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mm_grpo.data.image_columns import PLACEHOLDER, image_columns
from mm_grpo.errors import DataError

PROMPT_FIELDS = ("prompt", "image", "images", "video", "videos")
ROLES = ("system", "developer", "user", "assistant", "tool")
IMAGE_TAG = "<image>"
LONGEST_TEXT = 4_000_000
"""Characters of one message; the longest contexts are of some 1,000,000 tokens."""
_DEEPEST = 100
_OFTEN_THE_PROMPT = ("problem", "question", "messages", "conversations", "query", "instruction", "text")
_OWN_IMAGE_KEYS = ("image", "path", "url", "image_url")

Message = dict[str, Any]


@dataclass(frozen=True)
class Fields:
    """A normalised row whose images are still closed.

    `messages` have a role and a content that is a string or a list of `{"type": "text", "text": ...}` and
    `{"type": "image"}` parts; the i-th image part of the conversation stands for `images[i]`. `columns` are
    the row's other fields under our names.
    """

    messages: tuple[Message, ...]
    images: tuple[Any, ...]
    columns: dict[str, Any]


def check_columns(columns: Mapping[str, str], available: Collection[str], dataset: str) -> None:
    """Refuse a mapping to a column that the dataset lacks, and a misspelt `prompt` or `images`, naming the nearest one.

    Raises:
        DataError: with the field of the config, the column and all the columns there are.
    """
    for ours, theirs in columns.items():
        near = difflib.get_close_matches(ours.strip().casefold(), PROMPT_FIELDS, n=1, cutoff=0.8)
        if near and ours not in PROMPT_FIELDS and not ours.startswith(f"{near[0]}_"):
            raise DataError(
                f"data.columns.{ours} = {theirs!r}: nothing reads {ours!r} (did you mean {near[0]!r}?). Legal keys are "
                f"{quoted(PROMPT_FIELDS)} and the columns that rewards ask for"
            )
        if theirs not in available:
            raise DataError(
                f"data.columns.{ours} is {theirs!r}, and {dataset} has no such column"
                f"{did_you_mean(theirs, available)}. It has: {quoted(available)}"
            )


def rename(names: Iterable[str], columns: Mapping[str, str]) -> dict[str, str]:
    """Which dataset column fills each of our names: our name → dataset's column.

    A mapped column is known by our name alone; a column that already bears that name gives way to it.

    >>> rename(["problem", "answer", "solution"], {"prompt": "problem", "answer": "solution"})
    {'prompt': 'problem', 'answer': 'solution'}
    """
    present = list(names)
    ours = {our: their for our, their in columns.items() if their in present}
    mapped = set(ours.values())
    return ours | {name: name for name in present if name not in mapped and name not in columns}


def read_row(
    row: Any, *, row_name: str, columns: Mapping[str, str] | None = None, system_prompt: str | None = None
) -> Fields:
    """The fields of one row.

    Args:
        row: a mapping from column to value; it is not changed.
        row_name: what messages call the row, such as "train.jsonl:12".
        columns: our name → the dataset's name. A column that this row lacks is left out.
        system_prompt: a system message for rows that have none.

    Raises:
        DataError: the row has no prompt, a prompt that is no conversation or that ends with an answer,
            videos, or a count of images other than the count of places for them.
    """
    if not isinstance(row, Mapping):
        raise DataError(
            f"{row_name}: a row is a mapping of columns to values; this is a {type(row).__name__}"
        )
    values = {our: row[their] for our, their in rename(row, columns or {}).items()}
    _refuse_endless(values, row_name)
    _refuse_videos(values, row_name)
    if values.get("prompt") is None:
        raise _no_prompt(row, "prompt" in values, row_name, columns or {})
    messages = _messages(values["prompt"], row_name)
    _refuse_long_texts(messages, row_name)
    messages, images = _place(messages, _listed_images(values, row_name), row_name)
    if not images:
        _refuse_placeholders(messages, values, row_name)
    _refuse_empty_prompt(values["prompt"], messages, row_name)
    if system_prompt is not None and all(m["role"] not in ("system", "developer") for m in messages):
        messages = [{"role": "system", "content": system_prompt}, *messages]
    others = {name: value for name, value in values.items() if name not in PROMPT_FIELDS}
    return Fields(tuple(messages), tuple(images), others)


def quoted(names: Iterable[Any]) -> str:
    """Names as a message lists them."""
    return ", ".join(repr(name) for name in names) or "nothing"


def did_you_mean(name: str, legal: Iterable[str]) -> str:
    """The nearest of the legal names as the end of a clause; nothing when none is near."""
    near = difflib.get_close_matches(name, list(legal), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _no_prompt(row: Mapping[str, Any], is_none: bool, row_name: str, columns: Mapping[str, str]) -> DataError:
    if is_none:
        column = columns.get("prompt", "prompt")
        return DataError(f"{row_name}: {column!r} is null; write a prompt or leave the row out")
    if "prompt" in columns:
        return DataError(
            f"{row_name}: no column {columns['prompt']!r}, which data.columns.prompt names. "
            f"The row has: {quoted(row)}"
        )
    likely = next((name for name in _OFTEN_THE_PROMPT if name in row), "COLUMN")
    return DataError(
        f"{row_name}: no column 'prompt'. The row has: {quoted(row)}. "
        f"Name the one that holds the prompt, as in data.columns.prompt={likely}"
    )


def _refuse_videos(values: Mapping[str, Any], row_name: str) -> None:
    for name in ("video", "videos"):
        value = values.get(name)
        if value is not None and not (isinstance(value, Sequence) and len(value) == 0):
            raise DataError(
                f"{row_name}: {name!r} is set, but videos are not supported in this version; leave it out"
            )


def _listed_images(values: Mapping[str, Any], row_name: str) -> list[Any]:
    """The image sources of `image` or `images`, in order."""
    given = [name for name in ("image", "images") if values.get(name) is not None]
    if len(given) == 2:
        if _as_list(values["images"]) == []:
            given = ["image"]
        else:
            raise DataError(f"{row_name}: both 'image' and 'images' are set; keep one of them")
    if not given:
        return []
    images = _as_list(values[given[0]])
    if any(image is None for image in images):
        at = next(i for i, image in enumerate(images) if image is None)
        raise DataError(f"{row_name}: {given[0]}[{at}] is null; list the images that the row has, or none")
    return images


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _messages(prompt: Any, row_name: str) -> list[Message]:
    """The conversation as fresh dicts with a role, a content, and whatever else is not null."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list | tuple) or not all(isinstance(message, Mapping) for message in prompt):
        raise DataError(
            f"{row_name}: 'prompt' is a {type(prompt).__name__}; legal is a string, or a list of messages "
            'such as {"role": "user", "content": "..."}'
        )
    messages = [_message(message, f"{row_name}: prompt[{at}]") for at, message in enumerate(prompt)]
    if all(message["role"] != "user" for message in messages):
        raise DataError(f"{row_name}: 'prompt' has no message of role 'user'; add one")
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{row_name}: 'prompt' ends with a message of role 'assistant', which the model is to write; "
            "move it to a column of its own, such as 'answer'"
        )
    return messages


def _message(message: Mapping[str, Any], where: str) -> Message:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise DataError(f"{where}: the role is {role!r}; legal is one of {', '.join(ROLES)}")
    if isinstance(content, list | tuple):
        content = [_part(part, f"{where}.content[{at}]") for at, part in enumerate(content)]
    elif not isinstance(content, str):
        found = type(content).__name__
        raise DataError(f"{where}: the content is a {found}; legal is a string or a list of parts")
    else:
        _refuse_half_characters(content, where)
    # Arrow gives every message the keys of all; those that are null were never written.
    rest = {key: value for key, value in message.items() if value is not None}
    return rest | {"role": role, "content": content}


def _part(part: Any, where: str) -> Message:
    """A text part, or an image part with at most the key `image`."""
    if isinstance(part, str):
        part = {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise DataError(f"{where}: a text part needs a string in 'text'; it has {part.get('text')!r}")
        _refuse_half_characters(part["text"], where)
        return {"type": "text", "text": part["text"]}
    if kind in ("image", "image_url"):
        own = next((part[key] for key in _OWN_IMAGE_KEYS if part.get(key) is not None), None)
        if kind == "image_url":
            own = own.get("url") if isinstance(own, Mapping) else own
            if own is None:
                raise DataError(f"{where}: an 'image_url' part has no url; legal is {{'url': ...}}")
        return {"type": "image"} if own is None else {"type": "image", "image": own}
    if isinstance(kind, str) and "video" in kind:
        raise DataError(f"{where}: a part of type {kind!r}: videos are not supported in this version")
    raise DataError(f"{where}: a part of type {kind!r}; legal are 'text', 'image' and 'image_url'")


def _refuse_placeholders(messages: list[Message], values: Mapping[str, Any], row_name: str) -> None:
    """A row without images says that it has some: they stand in a column that is not read, or got lost."""
    for message in messages:
        found = next(filter(None, map(PLACEHOLDER.search, _texts(message))), None)
        if found is not None:
            others = {name: value for name, value in values.items() if name not in PROMPT_FIELDS}
            unread = next(image_columns(others), None)
            hint = "" if unread is None else f" (the column {unread!r} looks like images and is not read)"
            raise DataError(
                f"{row_name}: the prompt holds {found[0]!r}, and the row has no image{hint}. Images are read from the "
                "column 'image' or 'images', or what data.columns.images names; give the row its image, or remove "
                f"{found[0]!r} from the text"
            )


def _refuse_endless(values: Mapping[str, Any], row_name: str) -> None:
    """Rows given in Python may hold lists and mappings that hold themselves; whatever walks through them never ends."""
    finished: set[int] = set()

    def walk(value: Any, name: str, outer: tuple[int, ...]) -> None:
        if not isinstance(value, list | tuple | Mapping) or id(value) in finished:
            return
        if id(value) in outer or len(outer) > _DEEPEST:
            what = "holds itself" if id(value) in outer else f"is nested more than {_DEEPEST} levels deep"
            raise DataError(f"{row_name}: the column {name!r} {what}; write it without")
        for inner in value.values() if isinstance(value, Mapping) else value:
            walk(inner, name, (*outer, id(value)))
        finished.add(id(value))

    for name, value in values.items():
        walk(value, str(name), ())


def _refuse_long_texts(messages: list[Message], row_name: str) -> None:
    """A text that no model's context holds is refused by its length: making tokens of it takes minutes."""
    for message in messages:
        length = sum(map(len, _texts(message)))
        if length > LONGEST_TEXT:
            raise DataError(
                f"{row_name}: a message of the prompt has {length} characters; at most {LONGEST_TEXT} are read, far "
                "more than a model's context; shorten it or leave the row out"
            )


def _refuse_empty_prompt(prompt: Any, messages: list[Message], row_name: str) -> None:
    """A prompt that asks nothing: a text that is empty, or messages of the user without a text and an image."""
    asked = [message for message in messages if message["role"] == "user"]
    parts = [part for m in asked if not isinstance(m["content"], str) for part in m["content"]]
    shown = any(part["type"] == "image" for part in parts) and not isinstance(prompt, str)
    if not shown and not any(text.strip() for message in asked for text in _texts(message)):
        raise DataError(f"{row_name}: 'prompt' is empty; write what the model is asked, or leave the row out")


def _texts(message: Message) -> list[str]:
    """The texts of a message."""
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]


def _refuse_half_characters(text: str, where: str) -> None:
    """No tokenizer takes a lone surrogate, which JSON can write: what cutting an emoji in two leaves."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: the text holds half a character ({text[error.start]!r} at {error.start}); write the whole "
            "character or remove it"
        ) from error


def _place(messages: list[Message], listed: list[Any], row_name: str) -> tuple[list[Message], list[Any]]:
    """Messages with one image part per image, and the images in the order of those parts."""
    kind, parts = "image parts", _media_parts(messages)
    if not parts:
        tags = sum(m["content"].count(IMAGE_TAG) for m in messages if isinstance(m["content"], str))
        if tags:
            kind, placed = f"{IMAGE_TAG} tags", tags
            messages = [_split_tags(message) for message in messages]
        else:
            messages, placed = _put_first(messages, len(listed))
        parts = [{"type": "image"}] * placed
    free = sum("image" not in part for part in parts)
    if free != len(listed):
        raise DataError(
            f"{row_name}: {kind} in the prompt: {free}; images in the row: {len(listed)}. Write one for each "
            "image. Images are read from the column 'image' or 'images', or what data.columns.images names"
        )
    remaining = iter(listed)
    images = [part["image"] if "image" in part else next(remaining) for part in parts]
    return [_without_images(message) for message in messages], images


def _media_parts(messages: list[Message]) -> list[Message]:
    """The image parts of a conversation, in order."""
    if all(isinstance(message["content"], str) for message in messages):
        return []
    from qwen_vl_utils import extract_vision_info  # imports torch, which rows of plain text do not need

    parts: list[Message] = extract_vision_info(messages)
    return parts


def _without_images(message: Message) -> Message:
    if isinstance(message["content"], str):
        return message
    bare = [{"type": "image"} if part["type"] == "image" else part for part in message["content"]]
    return message | {"content": bare}


def _split_tags(message: Message) -> Message:
    """A string with <image> tags as parts: the tags become image parts, the text between stays as it is."""
    content = message["content"]
    if not isinstance(content, str) or IMAGE_TAG not in content:
        return message
    first, *rest = content.split(IMAGE_TAG)
    parts = [{"type": "text", "text": first}]
    for text in rest:
        parts += [{"type": "image"}, {"type": "text", "text": text}]
    return message | {"content": [part for part in parts if part.get("text") != ""]}


def _put_first(messages: list[Message], count: int) -> tuple[list[Message], int]:
    """Image parts before the text of the first user message, and how many: 0 where it is a list of parts."""
    at = next(i for i, message in enumerate(messages) if message["role"] == "user")
    content = messages[at]["content"]
    if count == 0 or not isinstance(content, str):
        return messages, 0
    placed = [*({"type": "image"} for _ in range(count)), {"type": "text", "text": content}]
    return [*messages[:at], messages[at] | {"content": placed}, *messages[at + 1 :]], count
