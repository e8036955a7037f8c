"""Where a row holds its prompt and its answer, as TRL, OpenAI, verl, EasyR1, ms-swift, LLaVA and R1-V write it.

    column          prompt                                        answer (our column `answer`)
    prompt          a string, or messages of role and content     a column, else reward_model.ground_truth (verl)
    messages        messages                                      the reply at the end, else a column
    conversations   turns of from and value (LLaVA), as above     the reply at the end, else a column
    problem         a string                                      a column, else <answer> of `solution` (R1-V)

`image`, `images`, `video` and `videos` are the same in all. A row with two of these columns is refused: nothing is
guessed. A column that `data.columns.prompt` names is the prompt in any case. A reply at the end is never part of the
prompt. Messages may be kept as JSON text. Before a string come the turns of `history` (ms-swift: pairs of a question
and its answer), and before all the text of `system`.

Not here: where media stand in the messages, and what a message may hold (rows.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain, cycle
from typing import Any

from mm_grpo.data.columns import brief, quoted
from mm_grpo.errors import DataError

PROMPT_COLUMNS = ("prompt", "messages", "conversations", "problem")
"""Every column that a prompt is read from."""
_SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant"), "assistant"),
    "system": "system",
    **dict.fromkeys(("observation", "tool"), "tool"),
}
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_LIST = re.compile(r"\s*\[\s*\{\s*['\"](\w+)['\"]\s*:")
"""The start of a text that may be a list of mappings, to the first key."""
_OBJECT_TAG = re.compile("<ref-object>|<bbox>")


class MissingPrompt(DataError):
    """A row has no column that a prompt could be read from."""


@dataclass(frozen=True)
class RowConversation:
    """A row's prompt, with media as its column holds them."""

    column: str
    """Our name of the prompt's column."""
    prompt: Any
    """A string or a list of messages."""
    used: dict[str, str]
    """Columns that prompt and answer were made of, and for what: "prompt", "system" or "answer"."""
    answers: Mapping[str, Any]
    """The column `answer`, if the row has it in another place; else empty."""
    conversational: bool
    """True when the column held messages, not a string."""


def read_conversation(
    values: Mapping[str, Any], row_name: str, columns: Mapping[str, str], names: Iterable[Any] = ()
) -> RowConversation:
    """Find the prompt and the answer of a row; its `values` are under our names.

    `columns` is `data.columns`, `names` are the dataset's columns for messages. Raises MissingPrompt if no column holds
    a prompt, DataError if two columns do, or if a column's value does not have its form.
    """
    mapped = columns.get("prompt")
    candidates = ("prompt",) if mapped else PROMPT_COLUMNS
    filled = [column for column in candidates if values.get(column) is not None]
    if not filled:
        raise _missing(values, names, row_name, candidates, mapped)
    column, *rivals = [name for name in filled if isinstance(values[name], str | list | tuple)] or filled[:1]
    if rivals:
        raise DataError(
            f"{row_name}: the columns {column!r} and {rivals[0]!r} may both be the prompt. Set data.columns.prompt="
            f"{column} or data.columns.prompt={rivals[0]}"
        )
    prompt, dataset_name, used = values[column], mapped or column, {column: "prompt"}
    prompt = from_json(prompt, f"{row_name}: {column!r}", {"role", "content"}, {"from", "value"})
    conversational, answer = not isinstance(prompt, str), None
    if isinstance(values.get("objects"), Mapping) and (tag := _OBJECT_TAG.search(str(prompt))):
        raise DataError(
            f"{row_name}: {column!r} holds {tag[0]!r}, which ms-swift replaces by what 'objects' holds and mm_grpo "
            "does not; write the text and the numbers in its place"
        )
    turns = dataset_name == "conversations" or _has_speakers(prompt)
    if turns:
        prompt = _as_messages(prompt, column, row_name)
    if isinstance(prompt, str) and _is_history(values.get("history")):
        texts, roles = [*chain(*values["history"]), prompt], cycle(("user", "assistant"))
        prompt = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        used["history"] = "prompt"
    if "system" in values and isinstance(prompt, str | list | tuple):
        prompt = _with_system(prompt, values["system"], row_name)
        used["system"] = "system"
    last = prompt[-1] if isinstance(prompt, list | tuple) and prompt else None
    may_reply = turns or dataset_name == "messages"
    if may_reply and isinstance(last, Mapping) and last.get("role") == "assistant":
        prompt = list(prompt)[:-1]
        answer = _answer_of(last, column, values, row_name, "answer" in columns)
    if answer is None and values.get("answer") is None:
        source, answer = _other_answer(values, dataset_name)
        used |= {} if answer is None else {source: "answer"}
    return RowConversation(column, prompt, used, {} if answer is None else {"answer": answer}, conversational)


def _missing(
    values: Mapping[str, Any],
    names: Iterable[Any],
    row_name: str,
    candidates: Sequence[str],
    mapped: str | None,
) -> DataError:
    column = next((column for column in candidates if column in values), None)
    if column is not None:
        return DataError(f"{row_name}: {(mapped or column)!r} is null; write a prompt or leave the row out")
    common = ("question", "query", "instruction", "conversation", *PROMPT_COLUMNS, "text")
    texts = (name for name, value in values.items() if isinstance(value, str) and " " in value.strip())
    likely = next(chain((name for name in common if name in values), texts), "COLUMN")
    expected = " or ".join(map(repr, [mapped] if mapped else candidates))
    return MissingPrompt(
        f"{row_name}: no column {expected} (data.columns.prompt); it has: {quoted(names)}. Name the one that holds the "
        f"prompt: write the source as {{path: ..., columns: {{prompt: {likely}}}}}, or for all sources "
        f"data.columns.prompt={likely}; or make it of columns with data.prompt_template"
    )


def _has_speakers(prompt: Any) -> bool:
    """True for turns of from and value."""
    turns = prompt if isinstance(prompt, list | tuple) else []
    return any(isinstance(turn, Mapping) and turn.get("from") is not None for turn in turns)


def _as_messages(turns: Any, column: str, row_name: str) -> list[Any]:
    """Convert turns of `from` and `value`, or of role and content, to messages."""
    messages: list[Any] = []
    for at, turn in enumerate(turns if isinstance(turns, list | tuple) else [turns]):
        mapping = turn if isinstance(turn, Mapping) else {}
        keys = ("from", "value") if mapping.get("from") is not None else ("role", "content")
        speaker, text = (mapping.get(key) for key in keys)
        if not isinstance(speaker, str) or speaker not in _SPEAKERS or not isinstance(text, str):
            raise DataError(
                f"{row_name}: {column}[{at}] is {brief(turn)}; legal is a turn such as "
                f'{{"from": "human", "value": "..."}}, whose speaker is one of {", ".join(_SPEAKERS)}'
            )
        messages.append({"role": _SPEAKERS[speaker], "content": text})
    return messages


def from_json(value: Any, where: str, *kinds: Set[str]) -> Any:
    """Return the list for a text that holds one as JSON, of mappings that all have the keys of one of `kinds`.

    Any other value is returned. DataError for a text that only looks like such a list.
    """
    head = _LIST.match(value) if isinstance(value, str) and value.rstrip().endswith("]") else None
    if head is None:
        return value
    try:
        content = json.loads(value)
        hits = max(sum(isinstance(m, dict) and m.keys() >= kind for m in content) for kind in kinds)
    except (ValueError, RecursionError):
        content, hits = [], head[1] in set().union(*kinds)
    if hits and hits != len(content):
        raise DataError(
            f"{where} is {brief(value)}, which looks like a list of messages or parts and is no JSON list of them"
        )
    return content if hits else value


def holds_question(name: str, value: Any) -> bool:
    """Return True for a column of messages or turns with one of the user's, and for a history."""
    turns = value if isinstance(value, list | tuple) else []
    speakers = [turn.get(key) for turn in turns if isinstance(turn, Mapping) for key in ("role", "from")]
    return "user" in speakers or "human" in speakers or (name == "history" and _is_history(value))


def _is_history(value: Any) -> bool:
    """Return True for pairs of a question and its answer, as ms-swift writes earlier turns."""
    pairs = value if isinstance(value, list | tuple) else []
    return bool(pairs) and all(isinstance(p, list | tuple) and [*map(type, p)] == [str, str] for p in pairs)


def _with_system(prompt: Any, system: Any, row_name: str) -> Any:
    """Put the text of the column `system`, if there is one, before the prompt."""
    if not system:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    has_system = any(isinstance(message, Mapping) and message.get("role") == "system" for message in messages)
    if not isinstance(system, str) or has_system:
        raise DataError(
            f"{row_name}: 'system' is {brief(system)}; legal is text, or null if a message has the role 'system'. A "
            "column of another meaning needs another name: data.columns.NAME=system"
        )
    return [{"role": "system", "content": system}, *messages]


def _answer_of(
    reply: Mapping[str, Any], column: str, values: Mapping[str, Any], row_name: str, mapped: bool
) -> str | None:
    """Return the text of a reply; None if `data.columns` names another answer. DataError if it is not clear which."""
    column_answer = values.get("answer")
    if mapped and column_answer is not None:
        return None
    content = reply.get("content")
    parts = content if isinstance(content, list | tuple) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    text = "".join(text for text in texts if isinstance(text, str))
    if not all(isinstance(text, str) for text in texts) or not text.strip():
        raise DataError(
            f"{row_name}: the reply at the end of {column!r}, which is the row's answer, is {brief(content)}; legal is "
            "text that is not empty. Write it, or name the answer's column in data.columns.answer"
        )
    if column_answer is not None and str(column_answer).strip() != text.strip():
        raise DataError(
            f"{row_name}: the row has the column 'answer', and {column!r} ends with a reply, which is another one. Set "
            "data.columns.answer=answer to take the column, or rename it to take the reply"
        )
    return text


def _other_answer(values: Mapping[str, Any], dataset_name: str) -> tuple[str, Any]:
    """Return the column of R1-V or verl that may hold the answer, and the answer; None if it does not."""
    graded_by, solution = values.get("reward_model"), values.get("solution")
    if dataset_name == "problem" and isinstance(solution, str) and (tagged := _ANSWER.search(solution)):
        return "solution", tagged[1].strip()
    return "reward_model", graded_by.get("ground_truth") if isinstance(graded_by, Mapping) else None
