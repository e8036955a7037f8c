"""Tool calls in what a model wrote, and how a chat template shows tools and their answers.

Two forms are read, both between `<tool_call>` and `</tool_call>`: JSON with `name` and `arguments` (Qwen2.5, Qwen3),
and `<function=NAME><parameter=KEY>VALUE</parameter></function>` (Qwen3.5). A template that knows no tools (Qwen2-VL,
Qwen2.5-VL) is given a text in the form that Qwen2.5's own templates use, and answers come as a user's turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mm_grpo.files import parse_json
from mm_grpo.processors.chat_template import names_read

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>)?\s*\Z", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote; `problem` says why it cannot be made."""

    name: str
    arguments: Mapping[str, Any]
    problem: str | None = None


def tool_calls(text: str) -> list[ToolCall]:
    """The calls in a text, in order."""
    return [_read(match[1]) for match in _CALL.finditer(text)]


def _read(body: str) -> ToolCall:
    if found := _FUNCTION.match(body):
        return ToolCall(found[1].strip(), {k.strip(): _value(v) for k, v in _PARAMETER.findall(found[2])})
    try:
        given = parse_json(body)
    except ValueError as error:
        return ToolCall("", {}, f"the tool call is no JSON ({error})")
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        return ToolCall("", {}, 'the tool call must be {"name": ..., "arguments": {...}}')
    arguments = given.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(given["name"], {}, "arguments of the tool call must be a JSON object")
    return ToolCall(given["name"], arguments)


def _value(text: str) -> Any:
    """A parameter's value: JSON where it is some, else the text."""
    try:
        return parse_json(text)
    except ValueError:
        return text


def tools_text(schemas: Sequence[Mapping[str, Any]]) -> str:
    """Describe the tools for the system message of a template that knows none."""
    lines = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    return (
        f"You may call these tools:\n<tools>\n{lines}\n</tools>\nTo call one, write\n<tool_call>\n"
        '{"name": NAME, "arguments": {ARGUMENTS}}\n</tool_call>\nand end your turn.'
    )


def knows_tools(template: str) -> bool:
    """True when a chat template shows the tools that it is given."""
    return "tools" in names_read(template)


def with_tools(
    messages: Sequence[Mapping[str, Any]], schemas: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Messages whose system message tells of the tools, for a template that does not."""
    told = tools_text(schemas)
    first, *others = [dict(message) for message in messages]
    if first.get("role") != "system":
        return [{"role": "system", "content": told}, first, *others]
    content = first["content"]
    if isinstance(content, str):
        return [{**first, "content": f"{content}\n\n{told}"}, *others]
    return [{**first, "content": [*content, {"type": "text", "text": f"\n\n{told}"}]}, *others]


def answer_messages(answers: Sequence[Sequence[Any]], *, as_tool: bool) -> list[dict[str, Any]]:
    """Make messages of tools' answers, texts and images each: of the role `tool`, or together as a user's turn."""
    contents = [
        [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
        for parts in answers
    ]
    if as_tool:
        return [{"role": "tool", "content": content} for content in contents]
    wrapped = [
        part
        for number, content in enumerate(contents)
        for part in (
            {"type": "text", "text": "\n<tool_response>\n" if number else "<tool_response>\n"},
            *content,
            {"type": "text", "text": "\n</tool_response>"},
        )
    ]
    return [{"role": "user", "content": wrapped}]
