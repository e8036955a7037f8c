"""The file that `mm-grpo convert` reads: YAML, JSON, a Python script, or a command line such as a shell script.

A Python script is not run: the literal arguments of the calls in CALLS are read from its syntax tree. Of a command
line `--key value` is read, verl's `section.key=value`, and variables such as MAX_PIXELS=... of ms-swift.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mm_grpo.config.yaml_file import read_value, read_yaml
from mm_grpo.errors import ConfigError
from mm_grpo.files import read_regular_file
from mm_grpo.migrate.keys import advice_on

CALLS: Mapping[str, tuple[str, str]] = {
    "GRPOConfig": ("", "output_dir"),
    "GRPOTrainer": ("", "model reward_funcs args train_dataset eval_dataset"),
    "BitsAndBytesConfig": ("", ""),
    "LoraConfig": ("lora_", "r"),
}
"""Calls of a Python script: what the names of their arguments begin with as keys, and those by position."""


class Computed(str):
    """What stands where a value is not in the file: code of a Python script, or the name of another file."""


def read_foreign(path: str | Path) -> dict[str, Any]:
    """The keys of a file, nested as they are there. What a `system: prompt.txt` names stands in its place."""
    path = Path(path)
    if path.suffix.lower() in (".yaml", ".yml", ".json"):
        found = read_yaml(path)  # JSON is YAML
    else:
        try:
            text = read_regular_file(path).decode()
            found = _of_script(text) if path.suffix == ".py" else _of_command(text, path)
        except (OSError, ValueError, SyntaxError) as error:
            raise ConfigError(f"{path}: cannot be read as a script ({error})") from None
    if not found:
        kinds = "a .yaml or .json file, a .py file with GRPOConfig(...), or a command line with --key value"
        raise ConfigError(f"{path}: holds no key; give {kinds}")
    system = found.get("system")
    if isinstance(system, str) and system.endswith(".txt"):
        places = [place for place in (path.parent / system, Path(system)) if place.is_file()]
        found["system"] = places[0].read_text(encoding="utf-8") if places else Computed(system)
    return found


def _of_command(text: str, path: Path) -> dict[str, Any]:
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    found: dict[str, Any] = {}
    for number, word in enumerate(words):
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            variable = key.isupper() and advice_on(key, []) is not None
            if equals and (variable or re.fullmatch(r"\+?\w+(\.\w+)+", key)):
                found[key.lower().lstrip("+")] = read_value(value, f"{path}: {word}")
        elif key:
            ends = (re.match(r"--|&&$|;$|\|$", each) is not None for each in words[number + 1 :])
            count = next((at for at, end in enumerate(ends) if end), len(words))
            values = [value] if equals else words[number + 1 :][:count]
            read = [read_value(each, f"{path}: {word}") for each in values]
            found[key.replace("-", "_")] = True if not read else read[0] if len(read) == 1 else read
    return found


def _of_script(text: str) -> dict[str, Any]:
    nodes = [*ast.walk(ast.parse(text))]
    made = [node for node in nodes if isinstance(node, ast.Assign) and _called(node.value) in CALLS]
    read = {ast.unparse(target) for node in made for target in node.targets}
    found: dict[str, Any] = {}
    for call in nodes:
        if not isinstance(call, ast.Call) or (name := _called(call)) not in CALLS:
            continue
        found |= {"use_peft": True} if name == "LoraConfig" else {}
        prefix, order = CALLS[name]
        placed = [ast.keyword(*each) for each in zip(order.split(), call.args, strict=False)]
        for each in (*placed, *call.keywords):
            code = ast.unparse(each.value)
            if _called(each.value) not in CALLS and code not in read:  # else its own arguments are read
                key = f"**{code}" if each.arg is None else f"{prefix}{each.arg.removeprefix(prefix)}"
                found[key] = _literal(each.value)
    return found


def _called(node: ast.expr) -> str:
    """The last part of a called function's name; empty where nothing is called."""
    return ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return Computed(ast.unparse(node))
