"""Parsing of a dataset row (a mapping) into `Fields`: messages, image sources, columns.

layouts.py finds the prompt: a list of chat messages, or a string, which becomes one user message. The media of a row
are its images (`image` or `images`) and its videos (`video` or `videos`); it may have none. Every field of the row is a
column for the rewards; `used` says which ones the prompt was made of. Names that differ are mapped by `data.columns`
(our name → the dataset's name; columns.py).

Where the media stand in the messages, in this order of preference:

    parts     {"type": "image"} stands for the next entry of `images`, {"type": "video"} for the next of `videos`; a
              part that carries its own medium (its key `image` or `video`, `path` or `url`, or an `image_url` or
              `video_url` part as OpenAI writes it) uses that; `index` is the number of its entry, from 0
    tags      <image> and <video> in a message that is a string, if no message has such parts; tags with numbers
              (<image 1>, <|video_2|>) stand for the media of these numbers; if a row without images has as many tags
              <image> as videos, and no other tag, these stand for its videos (LLaVA-Video)
    nowhere   all images, then all videos go to the start of the first user message, as TRL does

However they are placed, each medium has its place. The columns `image_1`, `image_2`, ... are the images of a row that
has no others, and so are `video_1`, ... its videos. In `video` a list of images is one video of these frames. Nothing
is opened here (images.py, videos.py); tags of other models (media_columns.py) are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from itertools import chain
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
from mm_grpo.data.layouts import RowConversation, from_json, read_conversation
from mm_grpo.data.media_columns import (
    HOW_TO_READ,
    IMAGE_PLACE,
    IMAGE_TAG,
    MEDIA_PLACE,
    looks_like_frame,
    media_columns,
    numbered_columns,
    unread_tag,
)
from mm_grpo.data.row_settings import (
    TEMPLATE_COLUMN,
    VIDEO_KEYS,
    read_limits,
    read_template_kwargs,
    read_video,
)
from mm_grpo.data.videos import VideoSource
from mm_grpo.errors import DataError, half_character
from mm_grpo.messages import MEDIA_TYPES, PIXEL_LIMITS, media_parts, messages_text, with_limits

ROLES = ("system", "developer", "user", "assistant", "tool")
PROMPT_PURPOSES = ("prompt", "images", "videos", "system")
ALIAS = "alias"
"""Purpose of a column under the dataset's name, if it is there under our name too."""
_SOURCE_KEYS = {medium: (medium, "path", "url", f"{medium}_url") for medium in MEDIA_TYPES}
"""Keys of a part's own image or video."""
_PART_KEYS: dict[str, tuple[str, ...]] = {"text": ("text",)} | {
    kind: (*_SOURCE_KEYS[medium], *PIXEL_LIMITS, *(VIDEO_KEYS if medium == "video" else ()))
    for medium in MEDIA_TYPES
    for kind in (medium, f"{medium}_url")
}
"""Keys of a part by its type."""

Message = dict[str, Any]
Media = dict[str, list[Any]]
"""Something for each image and each video, by their types."""


@dataclass(frozen=True)
class Fields:
    """A normalised row with closed media."""

    messages: tuple[Message, ...]
    """Role, and content: a string or a list of parts `{"type": "text", "text": ...}`, `{"type": "image"}`, `{"type":
    "video"}`."""
    images: tuple[Any, ...]
    """Sources of the image parts of the conversation, in order."""
    videos: tuple[VideoSource, ...]
    """The same of its video parts."""
    columns: dict[str, Any]
    """All fields of the row under our names, and `answer` if the row has it in another place. A column that
    `data.columns` maps has its own name too, because rewards may ask for it by either."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template for this row."""
    used: Mapping[str, str] = field(default_factory=dict)
    """Columns and their purposes: PROMPT_PURPOSES, ALIAS, "prompt template", "chat template", "answer"."""
    conversational: bool = True
    """True when the prompt was a list of messages, not a string."""

    @property
    def media(self) -> tuple[Any, ...]:
        """Sources of images, then of videos."""
        return self.images + self.videos

    @property
    def sources(self) -> Media:
        """Sources of all images, also of the frames of videos that are lists, and of all videos."""
        videos = [video.source for video in self.videos]
        frames = chain(*(source for source in videos if isinstance(source, list | tuple)))
        return {"image": [*self.images, *frames], "video": videos}

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
            answer, or a count of images or videos other than the count of places for them.
    """
    columns = columns or {}
    values = renamed(row, row_name, columns)
    aliases = {theirs: ours for ours, theirs in columns.items() if theirs in row and theirs not in values}
    row_columns = values
    used = {name: name if name in PROMPT_PURPOSES else f"{name}s" for name in PROMPT_FIELDS if name in values}
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
    used |= conversation.used
    if "prompt" not in row_columns:  # a template's prompt is no column
        used.pop("prompt", None)
    shown = {part["type"] for part in media_parts(messages) if part["type"] in part}
    listed, numbered = _listed_media(values, columns.keys() | shown, row_name)
    shown |= {medium for medium in MEDIA_TYPES if listed[medium]}
    used |= numbered
    template_kwargs, limits = dict[str, Any](), [pixel_limits]
    if values.get(TEMPLATE_COLUMN) is not None:
        used[TEMPLATE_COLUMN] = "chat template"
        template_kwargs, row_limits = read_template_kwargs(values[TEMPLATE_COLUMN], row_name)
        limits = [row_limits, pixel_limits]
    unread = None
    if not shown:
        others = {n: v for n, v in row_columns.items() if used.get(n) not in PROMPT_PURPOSES}
        hints = (
            f" (the column {n!r} looks like {m}s: data.columns.{m}s={n})" for n, m in media_columns(others)
        )
        unread = "".join(hints)
    places = MEDIA_PLACE if "video" in shown else IMAGE_PLACE
    _check_texts(conversation, messages, places, unread, row_name, text_only)
    messages, media = _place(messages, listed, places, row_name, unread)
    for bounds in filter(None, limits):
        messages = with_limits(messages, bounds)
    if system_prompt is not None and all(m["role"] not in ("system", "developer") for m in messages):
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return Fields(
        tuple(messages),
        tuple(media["image"]),
        tuple(media["video"]),
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


def _listed_media(
    values: Mapping[str, Any], elsewhere: Set[str], row_name: str
) -> tuple[Media, dict[str, str]]:
    """Return the entries of `image` or `images` and `video` or `videos` as parts, and purposes of numbered columns.

    Those are read in the place of both names, unless one is in `elsewhere`. DataError if both are set.
    """
    listed: Media = {}
    used: dict[str, str] = {}
    for medium in MEDIA_TYPES:
        entries: dict[str, Any] = {}
        for name in (medium, f"{medium}s"):
            value: Any = values.get(name)
            column = [*value] if isinstance(value, list | tuple) else [] if value is None else [value]
            if (
                isinstance(value, list | tuple)
                and name == "video"
                and {*map(looks_like_frame, value)} == {True}
            ):
                column = [value]
            if entries and column:
                raise DataError(f"{row_name}: has {medium!r} and {name!r}; legal is one of them")
            entries |= {f"{name}[{at}]": entry for at, entry in enumerate(column)}
        if not entries and not {medium, f"{medium}s"} & elsewhere:
            numbered = numbered_columns(values, medium, row_name)
            used |= dict.fromkeys(numbered, f"{medium}s")
            entries = {name: value for name, value in numbered.items() if value is not None}
        listed[medium] = [_entry(medium, value, f"{row_name}: {name}") for name, value in entries.items()]
    return listed, used


def _entry(medium: str, value: Any, where: str) -> Message:
    """Return an entry of a column as a part with its own source."""
    if value is None:
        raise DataError(f"{where} is null; list the {medium}s that the row has, or none")
    if isinstance(value, Mapping) and not value.keys() <= {
        "bytes",
        "path",
        "width",
        "height",
        "size",
        "format",
    }:
        return _part({**value, "type": f"{medium}_url"}, where)
    return {"type": medium, medium: value, "where": where}


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
    """Return a text part, or an image or video part: its own source or the number of its entry, and its settings."""
    if isinstance(part, str):
        part = {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if not isinstance(kind, str) or kind not in _PART_KEYS:
        raise DataError(f"{where}: a part of type {brief(kind)}; legal are {quoted(_PART_KEYS)}")
    medium = kind.removesuffix("_url")
    if isinstance(url := part.get(f"{medium}_url"), Mapping):
        part = {**part, f"{medium}_url": None, **url}
    values = {key: value for key, value in part.items() if key != "type" and value is not None}
    for key, value in values.items():
        if key in _PART_KEYS[kind] or (key == "index" and isinstance(value, int | float)):
            continue
        # some writers fill keys with empty values, and OpenAI's `detail` is the whole picture unless it is "low"
        is_default = str(value) in ("", "[]", "{}", *(("auto", "high") if key == "detail" else ()))
        if not is_default:
            legal = quoted(_PART_KEYS[kind])
            raise DataError(
                f"{where}: nothing reads {key!r} ({brief(value)}); remove it. Legal beside 'type': {legal}"
            )
    if kind == "text":
        if not isinstance(values.get("text"), str):
            raise DataError(f"{where}: a text part needs a string in 'text', not {brief(values.get('text'))}")
        return {"type": "text", "text": values["text"]}
    sources = [values[key] for key in _SOURCE_KEYS[medium] if key in values]
    if len(sources) > 1 or (kind != medium and not sources):
        raise DataError(
            f"{where}: {len(sources)} {medium}s in a part; legal is one of {quoted(_SOURCE_KEYS[medium])}"
        )
    source = {medium: sources[0]} if sources else {}
    settings = {key: value for key, value in values.items() if key not in _SOURCE_KEYS[medium]}
    return {"type": medium, **settings, **source, "where": where}


def _check_texts(
    conversation: RowConversation,
    messages: list[Message],
    places: re.Pattern[str],
    unread: str | None,
    row_name: str,
    text_only: bool,
) -> None:
    """DataError for a tag of an image, a video or a sound that is not read, and for a prompt that asks nothing.

    `places` are the tags that are read. `unread` names the columns of a row without media that look like media; None if
    the row has media.
    """
    asks, has_parts = False, bool(media_parts(messages))
    for message in messages:
        text, in_parts = messages_text([message]), has_parts or isinstance(message["content"], list)
        if half := half_character(text):
            raise DataError(f"{row_name}: {conversation.column!r} {half}")
        reads_markup = text_only and unread == ""
        if tag := unread_tag(text, places=None if in_parts else places, reads_markup=reads_markup):
            medium = "video" if "video" in tag.lower() else "image"
            place = f"a part {{'type': {medium!r}}}" if in_parts else f"<{medium}>"
            why = f"which would stay text. Write {place} where the {medium} stands"
            if unread is not None or (medium == "video" and places is IMAGE_PLACE):
                why = f"and the row has no {medium}{unread or ''}. {HOW_TO_READ}; give the row its {medium}"
            raise DataError(f"{row_name}: the prompt holds {tag!r}, {why}, remove it, or put a space into it")
        has_question = bool(places.sub("", text).strip())
        has_medium = conversation.conversational and unread is None
        asks = asks or (message["role"] == "user" and (has_question or has_medium))
    if not asks:
        raise DataError(f"{row_name}: {conversation.column!r} is empty; write a question or drop the row")


def _place(
    messages: list[Message],
    listed: Media,
    places: re.Pattern[str],
    row_name: str,
    unread: str | None,
) -> tuple[list[Message], Media]:
    """Return messages with one part per place of a medium, and the media in the order of their parts."""
    form, has_parts = "{} parts", bool(media_parts(messages))
    texts = [m["content"] for m in messages if isinstance(m["content"], str) and not has_parts]
    if tags := [match[0] for text in texts for match in places.finditer(text)]:
        # LLaVA's sets write <image> for a video too
        of_videos = not listed["image"] and tags == [IMAGE_TAG] * len(listed["video"])
        form, messages = "<{}> tags", [_split_tags(message, places, of_videos) for message in messages]
    elif not has_parts:
        messages = _add_parts(messages, [{"type": m} for m in MEDIA_TYPES for _ in listed[m]])
    entries: dict[str, Iterator[Message]] = {}
    for medium, of_row in listed.items():
        of_type = [part for part in media_parts(messages) if part["type"] == medium]
        numbers = [part.get("index") for part in of_type if medium not in part]
        indices: list[Any] = list(range(len(numbers))) if {*numbers} == {None} else numbers
        if "tags" in form and None not in numbers and 0 not in numbers:  # tags are numbered from 1, or from 0
            indices = [index - 1 for index in indices]
        if {*indices} != {*range(len(of_row))}:
            tagged = f" (numbers {', '.join(map(str, numbers))})" if any(numbers) else ""
            raise DataError(
                f"{row_name}: {form.format(medium)} in the prompt: {len(numbers)}{tagged}; {medium}s in the row: "
                f"{len(of_row)}{unread or ''}. Write one for each {medium}. {HOW_TO_READ}"
            )
        entries[medium] = iter([of_row[int(index)] for index in indices])
    media: Media = {medium: [] for medium in MEDIA_TYPES}

    def read(part: Message) -> Message:
        medium = part["type"]
        if medium == "text":
            return part
        values = part if medium in part else next(entries[medium]) | part
        source = values[medium]
        media[medium].append(source if medium == "image" else read_video(source, values, values["where"]))
        return {"type": medium, **read_limits(values, values["where"])}

    contents = [
        m["content"] if isinstance(m["content"], str) else [*map(read, m["content"])] for m in messages
    ]
    return [m | {"content": content} for m, content in zip(messages, contents, strict=True)], media


def _split_tags(message: Message, places: re.Pattern[str], of_videos: bool) -> Message:
    """Split a string at its tags into media parts and text parts; with `of_videos` each tag is a video's."""
    content = message["content"]
    if not isinstance(content, str) or not places.search(content):
        return message
    first, *pieces = places.split(content)
    parts = [{"type": "text", "text": first}]
    for tag, number, text in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
        medium = "video" if of_videos or "video" in tag.lower() else "image"
        index = None if number is None else int(number)
        parts += [{"type": medium, "index": index}, {"type": "text", "text": text}]
    return message | {"content": [part for part in parts if part.get("text") != ""]}


def _add_parts(messages: list[Message], parts: list[Message]) -> list[Message]:
    """Put parts before the text of the first user message; nothing is added to a message that is a list of parts."""
    at = next(i for i, message in enumerate(messages) if message["role"] == "user")
    content = messages[at]["content"]
    if not parts or not isinstance(content, str):
        return messages
    content = [*parts, {"type": "text", "text": content}]
    return [*messages[:at], messages[at] | {"content": content}, *messages[at + 1 :]]
