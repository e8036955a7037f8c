"""Tool calls in a model's text, and tools and their answers in a chat template.

Two forms are read, both between `<tool_call>` and `</tool_call>`: JSON with `name` and `arguments` (Qwen2.5, Qwen3),
and `<function=NAME><parameter=KEY>VALUE</parameter></function>` (Qwen3.5). A template that knows no tools (Qwen2-VL,
Qwen2.5-VL) gets a text in the form of Qwen2.5's own templates, and answers come as a user's turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mm_grpo.files import parse_json
from mm_grpo.processors.chat_template import names_read
from mm_grpo.types import Medium, message_part

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>)?\s*\Z", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote."""

    name: str
    arguments: Mapping[str, Any]
    problem: str | None = None
    """Why the call cannot be made; None if it can."""


def tool_calls(text: str) -> list[ToolCall]:
    """Return the calls in a text, in order."""
    return [_read(match[1]) for match in _CALL.finditer(text)]


def _read(body: str) -> ToolCall:
    if function := _FUNCTION.match(body):
        parameters = {key.strip(): _value(value) for key, value in _PARAMETER.findall(function[2])}
        return ToolCall(function[1].strip(), parameters)
    try:
        call = parse_json(body)
    except ValueError as error:
        return ToolCall("", {}, f"the tool call is no JSON ({error})")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", {}, 'the tool call must be {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(call["name"], {}, "arguments of the tool call must be a JSON object")
    return ToolCall(call["name"], arguments)


def _value(text: str) -> Any:
    """Parse a parameter's value as JSON; return the text if it is none."""
    try:
        return parse_json(text)
    except ValueError:
        return text


def knows_tools(template: str) -> bool:
    """Return True if a chat template shows tools."""
    return "tools" in names_read(template)


def with_tools(
    messages: Sequence[Mapping[str, Any]], schemas: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Describe the tools in the system message, if the template does not show tools."""
    lines = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    description = (
        f"You may call these tools:\n<tools>\n{lines}\n</tools>\nTo call one, write\n<tool_call>\n"
        '{"name": NAME, "arguments": {ARGUMENTS}}\n</tool_call>\nand end your turn.'
    )
    first, *following = [dict(message) for message in messages]
    if first.get("role") != "system":
        return [{"role": "system", "content": description}, first, *following]
    content = first["content"]
    if isinstance(content, str):
        return [{**first, "content": f"{content}\n\n{description}"}, *following]
    return [{**first, "content": [*content, {"type": "text", "text": f"\n\n{description}"}]}, *following]


def answer_messages(answers: Sequence[Sequence[str | Medium]], *, as_tool: bool) -> list[dict[str, Any]]:
    """Make messages of tools' answers, texts and media each: of the role `tool`, or together as a user's turn."""
    contents = [[message_part(part) for part in parts] for parts in answers]
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
