"""Layouts of rows, as six ecosystems write them: which column holds the prompt, in which form, and where the answer is.

    name      prompt                                                  answer (our column `answer`)
    trl       `prompt` or `messages`: a string, or role and content   a column
    openai    `messages` or `prompt` with image_url parts             the reply at the end
    verl      `prompt` or `problem` (EasyR1), <image> tags            a column, else reward_model.ground_truth
    ms_swift  `messages`: <image>, <ref-object>, <bbox>; `objects`    the reply at the end
    sharegpt  `conversations` of from and value (LLaVA)               the reply at the end
    r1v       `problem`                                               a column, else <answer> of `solution`

`image` and `images` are the same in all. `data.layout` names one; without it each row is read by what it holds
(`_detect`). A row whose columns would give different prompts is refused: nothing is guessed. A column that
`data.columns.prompt` names is the prompt in any case. A reply at the end is never part of the prompt;
`data.answer_from` says whether it, or a column, is the answer.

Not here: where images stand in the messages, and what a message may hold (rows.py). To add one: its line in `LAYOUTS`,
its mark in `_detect`, and its name in `data.layout`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mm_grpo.data.columns import brief, quoted
from mm_grpo.data.object_tags import BOX, REF, fill_tags, has_tags, is_objects
from mm_grpo.errors import DataError

_SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant"), "assistant"),
    "system": "system",
    **dict.fromkeys(("observation", "tool"), "tool"),
}
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class MissingPrompt(DataError):
    """A row has no column that a prompt could be read from."""


@dataclass(frozen=True)
class Conversation:
    """A row's prompt, still as its layout holds images: `prompt` is a string or a list of messages.

    `column` is our name of the column that it was in, `used` are the columns that it took up, and `answers` holds the
    column `answer` where it is not one of the row's own. `boxes` says that the prompt holds boxes of `objects`.
    """

    layout: str
    column: str
    prompt: Any
    used: tuple[str, ...]
    answers: Mapping[str, Any]
    boxes: bool


@dataclass(frozen=True)
class Layout:
    """One layout: the columns that may hold the prompt, whether a reply at its end is the answer, and what reads it."""

    columns: tuple[str, ...]
    ends_with_answer: bool = False
    messages: Callable[[Any, str, Mapping[str, Any], str], Any] = lambda value, *_: value
    """From the column's value, its name, all values of the row and the row's name to a string or messages."""
    answer: Callable[[Mapping[str, Any]], Any] = lambda _: None
    """From all values of the row to the answer, None where it has none."""
    also_reads: tuple[str, ...] = ()


def read_conversation(
    values: Mapping[str, Any],
    row_name: str,
    *,
    names: Iterable[Any] = (),
    mapped: str | None = None,
    layout: str | None = None,
    answer_from: str | None = None,
) -> Conversation:
    """The prompt and the answer of a row, whose `values` are under our names.

    `names` are the dataset's columns for messages, `mapped` is the one that `data.columns.prompt` names; the others are
    as of `rows.read_row`. MissingPrompt: no column holds a prompt. DataError: two columns give different ones, or what
    one holds is not of its layout.
    """
    known = ("prompt",) if mapped else LAYOUTS[layout].columns if layout else PROMPT_COLUMNS
    filled = [column for column in known if values.get(column) is not None]
    if not filled:
        raise _missing(values, names, row_name, known, mapped)
    candidates = [column for column in filled if isinstance(values[column], str | list | tuple)] or filled
    named = [(column, layout or _detect(column, mapped, values)) for column in candidates]
    column, name = named[0]
    found = _read(column, name, values, row_name, answer_from)
    for other, other_name in named[1:]:
        same = False
        with suppress(DataError):
            second = _read(other, other_name, values, row_name, answer_from)
            same = _as_messages(second.prompt) == _as_messages(found.prompt)
        if not same:
            fields = f"data.columns.prompt={column} or data.columns.prompt={other}"
            if name != other_name:
                fields = f"data.layout={name} or data.layout={other_name} (or {fields})"
            raise DataError(
                f"{row_name}: the columns {column!r} (layout {name}) and {other!r} (layout {other_name}) give "
                f"different prompts. Set {fields}"
            )
    return found


def _read(
    column: str, name: str, values: Mapping[str, Any], row_name: str, answer_from: str | None
) -> Conversation:
    layout = LAYOUTS[name]
    prompt = layout.messages(values[column], column, values, row_name)
    reply = _reply(prompt) if layout.ends_with_answer or answer_from is not None else None
    answers: dict[str, Any] = {}
    if answer_from == "last_turn" and reply is None:
        raise DataError(
            f"{row_name}: data.answer_from is last_turn, and {column!r} does not end with a turn of the assistant; "
            "write the answer there, or leave data.answer_from out"
        )
    if reply is not None:
        prompt = list(prompt)[:-1]
        if answer_from != "column":
            answer = _text(reply, f"{row_name}: {column}[{len(prompt)}]")
            own = values.get("answer")
            if own is not None and str(own).strip() != answer.strip() and answer_from is None:
                raise DataError(
                    f"{row_name}: the row has the column 'answer', and {column!r} ends with a reply, which is the "
                    f"answer in the layout {name}. Set data.answer_from=column or data.answer_from=last_turn"
                )
            answers["answer"] = answer
    if not answers and values.get("answer") is None:
        answer = layout.answer(values)
        answers = {} if answer is None else {"answer": answer}
    boxes = name == "ms_swift" and BOX in str(values[column] if reply is None else values[column][:-1])
    return Conversation(name, column, prompt, (column, *layout.also_reads), answers, boxes)


def _detect(column: str, mapped: str | None, values: Mapping[str, Any]) -> str:
    """The layout that a column is written in, by its name, its shape and what stands beside it."""
    value, known_as = values[column], mapped or column
    turns = value if isinstance(value, list | tuple) else []
    turns = [turn for turn in turns if isinstance(turn, Mapping)]
    if known_as == "conversations" or any(turn.get("from") is not None for turn in turns):
        return "sharegpt"
    if known_as == "problem":
        solution = values.get("solution")
        return "r1v" if isinstance(solution, str) and _ANSWER.search(solution) else "verl"
    contents = [turn.get("content") for turn in turns]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    if any(isinstance(part, Mapping) and part.get("type") == "image_url" for part in parts):
        return "openai" if known_as == "messages" else "trl"
    if known_as == "messages" and turns and all(isinstance(content, str) for content in contents):
        tags = has_tags(contents, REF) or (is_objects(values.get("objects")) and has_tags(contents))
        if tags or turns[-1].get("role") == "assistant" or any("<image>" in text for text in contents):
            return "ms_swift"
    return "verl" if known_as == "prompt" and isinstance(values.get("reward_model"), Mapping) else "trl"


def _missing(
    values: Mapping[str, Any], names: Iterable[Any], row_name: str, known: Sequence[str], mapped: str | None
) -> DataError:
    column = next((column for column in known if column in values), None)
    if column is not None:
        return DataError(f"{row_name}: {(mapped or column)!r} is null; write a prompt or leave the row out")
    often = ("question", "query", "instruction", "conversation", *PROMPT_COLUMNS, "text")
    likely = next((name for name in often if name in values), "COLUMN")
    wanted = " or ".join(map(repr, [mapped] if mapped else known))
    return MissingPrompt(
        f"{row_name}: no column {wanted} (data.layout, data.columns.prompt); it has: {quoted(names)}. Name the one "
        f"that holds the prompt, as in data.columns.prompt={likely}"
    )


def _as_messages(prompt: Any) -> Any:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return list(prompt) if isinstance(prompt, tuple) else prompt


def _reply(prompt: Any) -> Mapping[str, Any] | None:
    """The turn of the assistant that a conversation ends with."""
    last = prompt[-1] if isinstance(prompt, list | tuple) and prompt else None
    return last if isinstance(last, Mapping) and last.get("role") == "assistant" else None


def _text(reply: Mapping[str, Any], where: str) -> str:
    """Return the text of a reply."""
    content = reply.get("content")
    parts = content if isinstance(content, list | tuple) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    text = "".join(text for text in texts if isinstance(text, str))
    if not all(isinstance(text, str) for text in texts) or not text.strip():
        raise DataError(
            f"{where}: the reply at the end, which is the row's answer, is {brief(content)}; legal is text that is not "
            "empty. Write it, or set data.answer_from=column to leave replies out"
        )
    return text


# What reads the column of a layout


def _with_system(messages: list[Any], values: Mapping[str, Any], row_name: str) -> list[Any]:
    """The messages behind the text of the column `system`, where there is one and they begin without."""
    system = values.get("system")
    if not system:
        return messages
    if not isinstance(system, str) or any(message.get("role") == "system" for message in messages):
        raise DataError(
            f"{row_name}: 'system' is {brief(system)}; legal is text, or null where a message has the role 'system'"
        )
    return [{"role": "system", "content": system}, *messages]


def _sharegpt(turns: Any, column: str, values: Mapping[str, Any], row_name: str) -> list[Any]:
    """Turns of `from` and `value` as messages of role and content."""
    messages: list[Any] = []
    for at, turn in enumerate(turns if isinstance(turns, list | tuple) else [turns]):
        given = turn if isinstance(turn, Mapping) else {}
        keys = ("from", "value") if given.get("from") is not None else ("role", "content")
        speaker, text = (given.get(key) for key in keys)
        if not isinstance(speaker, str) or speaker not in _SPEAKERS or not isinstance(text, str):
            raise DataError(
                f"{row_name}: {column}[{at}] is {brief(turn)}; legal is a turn such as "
                f'{{"from": "human", "value": "..."}}, whose speaker is one of {", ".join(_SPEAKERS)}'
            )
        messages.append({"role": _SPEAKERS[speaker], "content": text})
    return _with_system(messages, values, row_name)


def _ms_swift(messages: Any, column: str, values: Mapping[str, Any], row_name: str) -> Any:
    """Messages with the tags of objects replaced, behind the column `system`."""
    if not isinstance(messages, list | tuple) or not all(isinstance(each, Mapping) for each in messages):
        return messages  # rows.py says what is legal
    contents = [message.get("content") for message in messages]
    if has_tags(contents):
        texts = [content for content in contents if isinstance(content, str)]
        filled = iter(fill_tags(texts, values.get("objects"), row_name, whole=_reply(messages) is not None))
        messages = [
            {**m, "content": next(filled)} if isinstance(m.get("content"), str) else m for m in messages
        ]
    return _with_system(list(messages), values, row_name)


def _verl_answer(values: Mapping[str, Any]) -> Any:
    graded_by = values.get("reward_model")
    return graded_by.get("ground_truth") if isinstance(graded_by, Mapping) else None


def _r1v_answer(values: Mapping[str, Any]) -> Any:
    solution = values.get("solution")
    if not isinstance(solution, str):
        return solution
    tagged = _ANSWER.search(solution)
    return (tagged[1] if tagged else solution).strip()


LAYOUTS: Mapping[str, Layout] = {
    "trl": Layout(("prompt", "messages")),
    "openai": Layout(("messages", "prompt"), ends_with_answer=True),
    "verl": Layout(("prompt", "problem"), answer=_verl_answer),
    "ms_swift": Layout(("messages",), ends_with_answer=True, messages=_ms_swift, also_reads=("system",)),
    "sharegpt": Layout(("conversations",), ends_with_answer=True, messages=_sharegpt, also_reads=("system",)),
    "r1v": Layout(("problem",), answer=_r1v_answer),
}
PROMPT_COLUMNS = ("prompt", "messages", "conversations", "problem")
"""Every column that a layout reads the prompt from; the earlier one is read where two give the same."""
