"""The reward `json_schema`: the completion is JSON that a schema allows."""

from __future__ import annotations

import importlib
import json
from collections.abc import Hashable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NoReturn

from mm_grpo.rewards.builtins import library
from mm_grpo.rewards.builtins.answers import final_part
from mm_grpo.rewards.options import ISOLATED_TIMEOUT
from mm_grpo.rewards.registry import reward


@reward("json_schema", timeout=ISOLATED_TIMEOUT)
def json_schema(completion: str, schema: Mapping[str, Any] | str | None = None) -> float:
    """1 when the completion's final part is JSON, and valid against a JSON schema.

    The final part is the inside of the last `<answer>` block, else what follows `</think>`, else
    everything, without a Markdown fence around all of it. No other text may stand before or after
    the JSON. NaN and Infinity are not JSON. `schema` is a mapping or JSON text, from the config or from
    a column of that name; null asks for any JSON. Let the column hold text: a table of mappings fills missing
    keys with None. Its `$schema` names the draft, else it is 2020-12. References to other documents are not
    fetched.

    Returns 1.0 or 0.0, never None; 0.0 too for JSON that nests deeper than Python can follow. A schema that backtracks
    ends the run after `timeout`, 120 s for a step: set `isolated: true` in the entry. ValueError when `schema` is no
    JSON schema. For structured extraction: receipts and forms, such as CORD and SROIE. Needs the package jsonschema.

    >>> json_schema('{"total": 12.5}', schema={"type": "object", "required": ["total"]})
    1.0
    >>> json_schema('Sure: {"total": 12.5}'), json_schema("[NaN]")
    (0.0, 0.0)
    """
    validator = None if schema is None else _validator(_as_json(schema))
    try:
        value = json.loads(_unfenced(final_part(completion)), parse_constant=_no_constant)
    except (ValueError, RecursionError):  # RecursionError: 100,000 opening brackets
        return 0.0
    try:
        return 1.0 if validator is None else float(validator.is_valid(value))
    except (RecursionError, OverflowError):  # 400 digits against a multipleOf
        return 0.0


def _unfenced(text: str) -> str:
    """Strip one Markdown fence around the whole text."""
    lines = text.strip().split("\n")
    if len(lines) > 2 and lines[0].strip().lower() in ("```", "```json") and lines[-1].strip() == "```":
        return "\n".join(lines[1:-1])
    return text


def _as_json(schema: Mapping[str, Any] | str) -> str:
    if isinstance(schema, str):
        return schema
    try:
        return json.dumps(schema, sort_keys=True)
    except TypeError as error:
        raise ValueError(f"the schema cannot be written as JSON: {error}") from error


@lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    jsonschema = library("json_schema")
    try:
        parsed = json.loads(schema)
    except ValueError as error:
        raise ValueError(f"the schema is not JSON ({error}); it is a mapping or JSON text") from error
    kind = jsonschema.validators.validator_for(parsed, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(parsed)
    except jsonschema.exceptions.SchemaError as error:
        raise ValueError(f"the schema is not a JSON schema: {error.message}") from error
    # The library compares all pairs of an array's objects. A "$schema" inside would bring that comparison back.
    kind = jsonschema.validators.extend(kind, {"uniqueItems": _unique_items})
    if isinstance(parsed, dict):
        parsed.pop("$schema", None)
    # With this empty registry nothing is fetched; the default one opens the address of a "$ref".
    return kind(parsed, registry=importlib.import_module("referencing").Registry())


def _unique_items(validator: Any, required: bool, items: Any, schema: Any) -> Iterator[Exception]:
    """Check `uniqueItems` as jsonschema does, in time linear in the size."""
    if required and validator.is_type(items, "array") and len({_key(item) for item in items}) < len(items):
        yield library("json_schema").exceptions.ValidationError("items are not unique")


def _key(value: Any) -> Hashable:
    """Return a key that is equal for values that JSON schema calls equal: 1 equals 1.0, but not true."""
    if isinstance(value, dict):
        return dict, frozenset((name, _key(item)) for name, item in value.items())
    if isinstance(value, list):
        return list, tuple(map(_key, value))
    return isinstance(value, bool), value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
