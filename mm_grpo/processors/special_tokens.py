"""Token ids of a conversation, without special tokens that a row or a tool typed.

A chat template writes special tokens (`<|im_start|>`, `<|image_pad|>`) as text, and a tokenizer reads them
everywhere. In a row's text one would begin a turn, end it, or stand for an image: `conversation_ids` refuses such a
row. A tool's answer goes through `defused` first.

A token is special if the tokenizer says so. Tokens that are only added to its vocabulary (`<think>`) are allowed text;
so are MARKS, which rows for Qwen2-VL may hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

from mm_grpo.errors import DataError
from mm_grpo.messages import content_parts

Messages = Sequence[Mapping[str, Any]]

MARKS = frozenset(f"<|{kind}_{end}|>" for kind in ("object_ref", "box", "quad") for end in ("start", "end"))
"""Tokens around references and coordinates in a text: special in Qwen's tokenizers, and written by users."""


def conversation_ids(
    render: Callable[[list[dict[str, Any]]], str], tokenizer: Any, messages: Messages, row: str
) -> list[int]:
    """Return the ids of a conversation. DataError, naming `row`, if one of its texts holds a special token.

    `render` makes text of messages by the chat template, with its special tokens. A message has a role and a content
    that is a string or a list of parts.
    """
    for message in messages:
        for text in _texts(message):
            if (match := _pattern(tokenizer).search(text)) is not None:
                role = message["role"]
                source = ", the row's or data.system_prompt," if role == "system" else ""
                raise DataError(
                    f"{row}: a message of role '{role}'{source} holds {match[0]!r} in its text, a special token of the "
                    "model, which the chat template alone may write. Remove it from the text"
                )
    rendered = render([dict(message) for message in messages])
    ids: list[int] = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    return ids


def defused(text: str, tokenizer: Any) -> str:
    """Put a space behind the first character of each special token, which makes it ordinary text."""
    return _pattern(tokenizer).sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)


@lru_cache(maxsize=8)
def _pattern(tokenizer: Any) -> re.Pattern[str]:
    """Return a pattern of the longest special token at a place, as tokenizers read; it matches nothing without any."""
    added = tokenizer.added_tokens_decoder.values()
    tokens = {token.content for token in added if token.special} - MARKS
    longest_first = sorted(tokens, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of a message; neighbouring text parts count as one."""
    for is_text, parts in groupby(content_parts(message["content"]), key=lambda part: "text" in part):
        if is_text:
            yield "".join(part["text"] for part in parts)
    for key, value in message.items():
        if key not in ("role", "content"):  # a template may write these too: names, calls of tools
            yield from _strings(value)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strings(inner)
