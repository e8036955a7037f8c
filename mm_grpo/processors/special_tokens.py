"""A conversation as token ids, whose row cannot type the model's special tokens.

A chat template writes special tokens (`<|im_start|>`, `<|image_pad|>`) as text, and a tokenizer reads them wherever
they stand: a row whose text holds one would begin a turn, end it, or stand for an image. `conversation_ids` refuses the
row or, with `data.special_tokens: as_text` and for what tools say, makes ordinary text of them: the template is
rendered with a character that nobody wrote in their place, what it wrote itself is split at its special tokens, and the
text between is encoded with special tokens off.

Special is what the tokenizer calls so. Tokens that are only added to its vocabulary (`<think>`) are text that has an
id, and are left alone; so are MARKS, which Qwen2-VL's rows are meant to hold, unless they are asked for as text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal
from weakref import WeakKeyDictionary

from mm_grpo.errors import ConfigError, DataError

SpecialTokensMode = Literal["refuse", "as_text"]
Messages = Sequence[Mapping[str, Any]]

MARKS = frozenset(f"<|{what}_{end}|>" for what in ("object_ref", "box", "quad") for end in ("start", "end"))
"""Tokens around references and coordinates in a text: special in Qwen's tokenizers, and written by users."""
_PLACEHOLDERS = range(0xE000, 0xF8FF)
"""Characters of Unicode's private use area, which stand for a row's typed tokens while a template is rendered."""
_KNOWN: WeakKeyDictionary[Any, _Specials] = WeakKeyDictionary()
"""By tokenizer, whose special tokens do not change."""


def set_special_tokens(processor: Any, mode: SpecialTokensMode) -> None:
    """Give a processor `data.special_tokens`, which it reads from its attribute `special_tokens`.

    Raises ConfigError when a class of the user's own has no such attribute, and is asked for what it does not do.
    """
    if hasattr(processor, "special_tokens"):
        processor.special_tokens = mode
    elif mode != "refuse":
        raise ConfigError(
            f"data.special_tokens = {mode}: {type(processor).__qualname__} has no attribute special_tokens, so it "
            "does not follow this; give it one and call mm_grpo.processors.special_tokens.conversation_ids, or leave "
            "data.special_tokens out"
        )


def conversation_ids(
    render: Callable[[list[dict[str, Any]]], str],
    tokenizer: Any,
    messages: Messages,
    row: str,
    mode: SpecialTokensMode = "refuse",
) -> list[int]:
    """The ids of a conversation.

    Args:
        render: the chat template, from messages to text with the special tokens that belong there.
        tokenizer: of transformers.
        messages: with a role and a content that is a string or a list of parts.
        row: what messages to the user call the row.
        mode: what is done about special tokens that the row's texts hold.

    Raises:
        DataError: the row's text holds a special token and `mode` is "refuse", or it is made of two parts.
        ConfigError: this tokenizer cannot read them as text.
    """
    specials = _specials_of(tokenizer)
    found = list(_typed(specials.refused if mode == "refuse" else specials.all, messages))
    if not found:
        return _encode(tokenizer, render([dict(message) for message in messages]))
    if mode == "as_text":
        return _as_text(render, tokenizer, specials, messages, {token for _, token in found}, row)
    role, token = found[0]
    source = ", the row's or data.system_prompt," if role == "system" else ""
    raise DataError(
        f"{row}: a message of role '{role}'{source} holds {token!r} in its text, a special token of the model, which "
        "the chat template alone may write. Remove it from the text, or set data.special_tokens=as_text to give it to "
        "the model as ordinary text"
    )


@dataclass(frozen=True)
class _Specials:
    """A tokenizer's special tokens, text → id, and patterns that find all of them, and those that are refused."""

    tokens: Mapping[str, int]
    all: re.Pattern[str]
    refused: re.Pattern[str]


def _specials_of(tokenizer: Any) -> _Specials:
    if tokenizer not in _KNOWN:
        added = tokenizer.added_tokens_decoder.items()
        tokens = {token.content: id_ for id_, token in added if token.special}
        _KNOWN[tokenizer] = _Specials(tokens, _pattern(tokens), _pattern(set(tokens) - MARKS))
    return _KNOWN[tokenizer]


def _pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Finds the longest of the tokens at a place, as tokenizers do; nothing without tokens."""
    longest_first = sorted(tokens, key=lambda token: (-len(token), token))
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def _typed(pattern: re.Pattern[str], messages: Messages) -> Iterator[tuple[str, str]]:
    """(role, token) for each special token in the messages' texts; neighbouring text parts count as one text."""
    for message in messages:
        for text in _texts(message):
            for match in pattern.finditer(text):
                yield str(message["role"]), match[0]


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    content = message["content"]
    if isinstance(content, str):
        yield content
    else:
        for is_text, parts in groupby(content, key=lambda part: "text" in part):
            if is_text:
                yield "".join(part["text"] for part in parts)
    for key, value in message.items():
        if key not in ("role", "content"):  # what a template may write too: names, calls of tools
            yield from _strings(value)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strings(inner)


def _as_text(
    render: Callable[[list[dict[str, Any]]], str],
    tokenizer: Any,
    specials: _Specials,
    messages: Messages,
    typed: set[str],
    row: str,
) -> list[int]:
    written = "".join(text for message in messages for text in _texts(message))
    free = (chr(code) for code in _PLACEHOLDERS if chr(code) not in written)
    placeholders = dict(zip(sorted(typed), free, strict=False))
    hidden = [_hidden(message, specials.all, placeholders) for message in messages]
    if (left := next(_typed(specials.all, hidden), None)) is not None:
        raise DataError(
            f"{row}: two text parts of a message of role '{left[0]}' make {left[1]!r} together, a special token of the "
            "model; write them as one part (data.special_tokens is as_text), or remove it"
        )
    rendered = render(hidden)
    back = {ord(placeholder): token for token, placeholder in placeholders.items()}
    ids = _encode_parts(tokenizer, specials, rendered, back)
    # A tokenizer may treat the beginning of a text in its own way, take up the space beside a special token, or have no
    # way to leave special tokens be.
    plain = dict.fromkeys(back, "x")
    same = _encode_parts(tokenizer, specials, rendered, plain) == _encode(
        tokenizer, rendered.translate(plain)
    )
    of_template = len(specials.all.findall(rendered))
    if not same or sum(id_ in specials.tokens.values() for id_ in ids) != of_template:
        raise ConfigError(
            f"{row}: data.special_tokens is as_text, and the model's tokenizer ({type(tokenizer).__qualname__}) cannot "
            "encode the parts of a text one by one with special tokens off; remove such tokens from the rows"
        )
    return ids


def _hidden(value: Any, pattern: re.Pattern[str], placeholders: Mapping[str, str]) -> Any:
    """The value with each special token in its texts replaced."""
    if isinstance(value, str):
        return pattern.sub(lambda match: placeholders[match[0]], value)
    if isinstance(value, Mapping):
        return {
            _hidden(key, pattern, placeholders): _hidden(inner, pattern, placeholders)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_hidden(inner, pattern, placeholders) for inner in value]
    return value


def _encode_parts(tokenizer: Any, specials: _Specials, rendered: str, back: Mapping[int, str]) -> list[int]:
    """The ids of a rendered conversation whose placeholders are put `back` as text, between its special tokens."""
    ids: list[int] = []
    for at, part in enumerate(specials.all.split(rendered)):
        if at % 2:
            ids.append(specials.tokens[part])
        elif part:
            ids += _encode(tokenizer, part.translate(back), split_special_tokens=True)
    return ids


def _encode(tokenizer: Any, text: str, **options: Any) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, **options)["input_ids"]
    return ids
