"""Where a row holds its prompt and its answer, as TRL, OpenAI, verl, EasyR1, ms-swift, LLaVA and R1-V write it.

    column          prompt                                        answer (our column `answer`)
    prompt          a string, or messages of role and content     a column, else reward_model.ground_truth (verl)
    messages        messages, behind the text of `system`         the reply at the end, else a column
    conversations   turns of from and value (LLaVA), as above     the reply at the end, else a column
    problem         a string                                      a column, else <answer> of `solution` (R1-V)

`image` and `images` are the same in all. A row with two of these columns is refused: nothing is guessed. A column that
`data.columns.prompt` names is the prompt in any case. A reply at the end is never part of the prompt.

Not here: where images stand in the messages, and what a message may hold (rows.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
_OBJECT_TAG = re.compile("<ref-object>|<bbox>")


class MissingPrompt(DataError):
    """A row has no column that a prompt could be read from."""


@dataclass(frozen=True)
class Conversation:
    """A row's prompt, still as its column holds images: `prompt` is a string or a list of messages.

    `column` is our name of the column that it was in, `used` are the columns that it took up, and `answers` holds the
    column `answer` where it is not one of the row's own.
    """

    column: str
    prompt: Any
    used: tuple[str, ...]
    answers: Mapping[str, Any]


def read_conversation(
    values: Mapping[str, Any], row_name: str, columns: Mapping[str, str], names: Iterable[Any] = ()
) -> Conversation:
    """The prompt and the answer of a row, whose `values` are under our names.

    `columns` is `data.columns`, `names` are the dataset's columns for messages. MissingPrompt: no column holds a
    prompt. DataError: two columns do, or what one holds is not of its form.
    """
    mapped = columns.get("prompt")
    known = ("prompt",) if mapped else PROMPT_COLUMNS
    filled = [column for column in known if values.get(column) is not None]
    if not filled:
        raise _missing(values, names, row_name, known, mapped)
    column, *others = [each for each in filled if isinstance(values[each], str | list | tuple)] or filled[:1]
    if others:
        raise DataError(
            f"{row_name}: the columns {column!r} and {others[0]!r} may both be the prompt. Set data.columns.prompt="
            f"{column} or data.columns.prompt={others[0]}"
        )
    prompt, known_as, used = values[column], mapped or column, [column]
    answer = None
    if isinstance(values.get("objects"), Mapping) and (tag := _OBJECT_TAG.search(str(prompt))):
        raise DataError(
            f"{row_name}: {column!r} holds {tag[0]!r}, which ms-swift replaces by what 'objects' holds and mm_grpo "
            "does not; write the text and the numbers in its place"
        )
    turns = known_as == "conversations" or _has_speakers(prompt)
    if turns:
        prompt = _as_messages(prompt, column, row_name)
    if turns or known_as == "messages":
        prompt, used = _with_system(prompt, values, row_name), [column, "system"]
        if (reply := _reply(prompt)) is not None:
            prompt = list(prompt)[:-1]
            answer = _answer_of(reply, column, values, row_name, "answer" in columns)
    if answer is None and values.get("answer") is None:
        answer = _other_answer(values, known_as)
    return Conversation(column, prompt, tuple(used), {} if answer is None else {"answer": answer})


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
        f"{row_name}: no column {wanted} (data.columns.prompt); it has: {quoted(names)}. Name the one that holds the "
        f"prompt, as in data.columns.prompt={likely} (of one source: {{path: ..., columns: {{prompt: {likely}}}}}), or "
        "make it of columns with data.prompt_template"
    )


def _has_speakers(prompt: Any) -> bool:
    """True for turns of from and value."""
    turns = prompt if isinstance(prompt, list | tuple) else []
    return any(isinstance(turn, Mapping) and turn.get("from") is not None for turn in turns)


def _as_messages(turns: Any, column: str, row_name: str) -> list[Any]:
    """Turns of `from` and `value`, or of role and content, as messages."""
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
    return messages


def _with_system(prompt: Any, values: Mapping[str, Any], row_name: str) -> Any:
    """The messages behind the text of the column `system`, where there is one."""
    system = values.get("system")
    if not system or not isinstance(prompt, list | tuple):
        return prompt
    own = any(isinstance(message, Mapping) and message.get("role") == "system" for message in prompt)
    if not isinstance(system, str) or own:
        raise DataError(
            f"{row_name}: 'system' is {brief(system)}; legal is text, or null where a message has the role 'system'"
        )
    return [{"role": "system", "content": system}, *prompt]


def _reply(prompt: Any) -> Mapping[str, Any] | None:
    """The turn of the assistant that a conversation ends with."""
    last = prompt[-1] if isinstance(prompt, list | tuple) and prompt else None
    return last if isinstance(last, Mapping) and last.get("role") == "assistant" else None


def _answer_of(
    reply: Mapping[str, Any], column: str, values: Mapping[str, Any], row_name: str, mapped: bool
) -> str | None:
    """The text of a reply; None where `data.columns` names another answer. DataError where the two may be meant."""
    own = values.get("answer")
    if mapped and own is not None:
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
    if own is not None and str(own).strip() != text.strip():
        raise DataError(
            f"{row_name}: the row has the column 'answer', and {column!r} ends with a reply, which is another one. Set "
            "data.columns.answer=answer to take the column, or rename it to take the reply"
        )
    return text


def _other_answer(values: Mapping[str, Any], known_as: str) -> Any:
    """The answer where verl and R1-V write it."""
    graded_by, solution = values.get("reward_model"), values.get("solution")
    if known_as == "problem" and isinstance(solution, str) and (tagged := _ANSWER.search(solution)):
        return tagged[1].strip()
    return graded_by.get("ground_truth") if isinstance(graded_by, Mapping) else None
