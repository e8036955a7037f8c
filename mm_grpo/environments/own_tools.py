"""Environments that name their tools themselves, with JSON schemas, instead of by their public methods.

Which tools an OpenEnv server has (openenv.py) is known when it was asked, in schemas that are not ours.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any


class EnvironmentGone(Exception):
    """The environment of a conversation cannot be used any more: what holds it is not there, or `late` with an answer.
    The run stops where `rollout.on_tool_error` is stop, else the conversation is masked."""

    def __init__(self, why: str, late: bool = False) -> None:
        super().__init__(why)
        self.late = late


class Tool:
    """A tool by its name, description and JSON schema of its arguments (an object's). `function` is called with them.

    ValueError for a schema that is not an object's.
    """

    def __init__(
        self, name: str, description: str, parameters: Mapping[str, Any], function: Callable[..., Any]
    ) -> None:
        self.__name__ = self.__qualname__ = name
        self.function = function
        inlined = _inlined(parameters, parameters.get("$defs", {}))
        if inlined.get("type", "object") != "object":
            raise ValueError(f"the arguments of {name} are of type {inlined['type']!r}, and no object")
        properties = dict(inlined.get("properties", {}))
        required = [key for key in inlined.get("required", ()) if key in properties]
        told = {"type": "object", "properties": properties, "required": required}
        self.schema = {
            "type": "function",
            "function": {"name": name, "description": description.strip(), "parameters": told},
        }
        if all(key.isidentifier() for key in properties) and not inlined.get("additionalProperties"):
            known = inspect.Parameter
            defaults = {key: known.empty if key in required else None for key in properties}
            self.__signature__ = inspect.Signature(
                [known(key, known.KEYWORD_ONLY, default=default) for key, default in defaults.items()]
            )

    def __call__(self, **arguments: Any) -> Any:
        return self.function(**arguments)


class OwnTools:
    """An environment whose tools are what `tools` says, by name; its public methods are none."""

    def tools(self) -> Mapping[str, Tool]:
        """The tools, before the first `reset` too. An exception is told to the user in one line."""
        raise NotImplementedError


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """A schema with what it refers to (`$ref`) in the place of the references, as chat templates do not follow them,
    and without the titles that pydantic writes."""
    if isinstance(schema, list):
        return [_inlined(each, definitions) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    if isinstance(reference := schema.get("$ref"), str):
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        return {**_inlined(definitions[reference.rpartition("/")[2]], definitions), **beside}
    kept = {k: v for k, v in schema.items() if k != "$defs" and not (k == "title" and isinstance(v, str))}
    return {key: _inlined(value, definitions) for key, value in kept.items()}
