"""Tools with JSON schemas, as an OpenEnv server lists them, and the error for a server that is gone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any


class EnvironmentGone(Exception):
    """Error of an environment whose server is gone, or `late` with an answer.

    The run stops if `rollout.on_tool_error` is stop, else the conversation is masked.
    """

    def __init__(self, why: str, late: bool = False) -> None:
        super().__init__(why)
        self.late = late


class Tool:
    """Tool with a JSON schema of its arguments. Raise ValueError if the schema is not an object's."""

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
        schema = {"type": "object", "properties": properties, "required": required}
        self.schema = {
            "type": "function",
            "function": {"name": name, "description": description.strip(), "parameters": schema},
        }
        if all(key.isidentifier() for key in properties) and not inlined.get("additionalProperties"):
            parameter = inspect.Parameter
            defaults = {key: parameter.empty if key in required else None for key in properties}
            self.__signature__ = inspect.Signature(
                [parameter(key, parameter.KEYWORD_ONLY, default=default) for key, default in defaults.items()]
            )

    def __call__(self, **arguments: Any) -> Any:
        return self.function(**arguments)


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Replace references (`$ref`), which chat templates do not follow, and drop the titles that pydantic writes."""
    if isinstance(schema, list):
        return [_inlined(element, definitions) for element in schema]
    if not isinstance(schema, Mapping):
        return schema
    if isinstance(reference := schema.get("$ref"), str):
        siblings = {key: value for key, value in schema.items() if key != "$ref"}
        return {**_inlined(definitions[reference.rpartition("/")[2]], definitions), **siblings}
    fields = {k: v for k, v in schema.items() if k != "$defs" and not (k == "title" and isinstance(v, str))}
    return {key: _inlined(value, definitions) for key, value in fields.items()}
