"""The file that `mm-grpo convert` reads: YAML, JSON, a shell script, or a Python script with `GRPOConfig(...)`.

A command line gives `--key value`, verl's `section.key=value`, and variables of the environment such as MAX_PIXELS=...
Its options are laid over the file that `--config FILE` or EasyR1's `config=FILE` names. Of a Python script the literal
arguments of CALLS are read. Nothing is run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mm_grpo.config.yaml_file import read_value, read_yaml, refuse_long
from mm_grpo.errors import ConfigError
from mm_grpo.files import read_regular_file
from mm_grpo.migrate.keys import PROGRAMS
from mm_grpo.migrate.shell import UNKNOWN, commands

ENVIRONMENT = "MAX_PIXELS MIN_PIXELS NPROC_PER_NODE NNODES CUDA_VISIBLE_DEVICES IMAGE_MAX_TOKEN_NUM"
"""Variables of the environment that a trainer reads."""
LAUNCHERS = "accelerate torchrun deepspeed"
CALLS: Mapping[str, Mapping[str, str]] = {
    "GRPOConfig": {},
    "LoraConfig": {"r": "lora_r", "target_modules": "lora_target_modules"},
    "GRPOTrainer": {"model": "model_name_or_path", "args": "", "peft_config": ""},
}
"""Calls of a Python script whose arguments are read, with the options that scripts have for them ("" is none)."""


class Unexpanded(str):
    """Text of a value that the file alone does not say, such as `$NAME/out` or a name of a Python script."""

    @property
    def unknown(self) -> str:
        """The first part that is not known."""
        match = re.search(r"\$\(.*\)|\$\{[^}]*\}?|\$\S\w*|`.*`", self, re.DOTALL)
        return match[0] if match else str(self)


def read_foreign(path: str | Path) -> dict[str, Any]:
    """Return the keys of a file by dotted name. Raises ConfigError if it has none, or is of another program."""
    path = Path(path)
    words: list[str] = []
    if path.suffix.lower() in (".yaml", ".yml", ".json"):
        keys = flatten(read_yaml(path))  # JSON is YAML
    else:
        try:
            text = read_regular_file(path).decode("utf-8-sig")
            refuse_long(text, str(path))
            if path.suffix.lower() == ".py":
                keys = flatten(_call_arguments(ast.parse(text)))
            else:
                words, keys = _command_options(text, path)
        except (OSError, ValueError, SyntaxError) as error:
            raise ConfigError(f"{path}: cannot be read as a script ({error})") from None
    marks = {*keys, *words, *(key.partition(".")[0] for key in keys)}
    marks |= {f"{key}={value}" for key, value in keys.items()}
    for program, names in PROGRAMS.items():
        if sign := next((name for name in names.split() if name in marks), None):
            raise ConfigError(
                f"{path}: is of {program} ({sign}); convert reads configs for GRPO of TRL, ms-swift, verl and EasyR1: "
                "begin with `mm-grpo init`, and write its settings into that config"
            )
    if not keys:
        raise ConfigError(
            f"{path}: holds no key; what is read is YAML, JSON, shell commands with --key value, GRPOConfig(...) in "
            "a Python script: write the arguments of its config into a .yaml file, as key: value"
        )
    return keys


def flatten(values: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Return values by dotted key. Mappings that are values themselves stay."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{section}.{key}" if section else str(key)
        is_value = re.search(r"columns$|(template|init|generation|scheduler|reward|function)_kwargs$", path)
        nested = isinstance(value, Mapping) and value and not is_value
        flat |= flatten(value, path) if nested else {path: value}
    return flat


def _call_arguments(tree: ast.Module) -> dict[str, Any]:
    """Return the keyword arguments of CALLS; names stand for literals that the script gives them once."""
    named: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            named.setdefault(node.targets[0].id, []).append(node.value)
    options: dict[str, Any] = {}
    for node in ast.walk(tree):
        name = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
        for keyword in node.keywords if isinstance(node, ast.Call) and name in CALLS else ():
            value, key = keyword.value, CALLS[name].get(keyword.arg or "", keyword.arg)
            once = named.get(value.id, []) if isinstance(value, ast.Name) else []
            try:
                options[str(key)] = ast.literal_eval(once[0] if len(once) == 1 else value)
            except ValueError:
                options[str(key)] = Unexpanded(ast.unparse(value))
        options |= {"use_peft": True} if name == "LoraConfig" else {}
    options.pop("", None)
    return options


def _command_options(text: str, path: Path) -> tuple[list[str], dict[str, Any]]:
    """Return the words that name the program, and the options, of the command that has the most of them."""
    command = max(commands(text), key=lambda command: len([*filter(_is_option, command.words)]), default=None)
    if command is None:
        return [], {}
    words, options = command.words, dict[str, Any]()
    words = (
        words[words.index("--") + 1 :] if "--" in words else words
    )  # behind it is what `ray job submit` runs
    start = 0
    if Path(*words[:1]).name in LAUNCHERS.split():  # its options come first, then the program
        scripts = (n for n, word in enumerate(words) if word.endswith(".py") or words[n - 1] == "-m")
        start = next(scripts, 0)
        options |= _options(words[:start], path)
    environment = {
        name.lower(): text for name, text in command.environment.items() if name in ENVIRONMENT.split()
    }
    options |= _options(words[start:], path) | {
        key: _value([text], path) for key, text in environment.items()
    }
    if isinstance(base := options.get("config"), str):
        files = [
            folder / base for folder in (Path(), *path.resolve().parents[:4]) if (folder / base).is_file()
        ]
        options = flatten(read_yaml(files[0])) | options if files else options
        options.pop("config") if files else None
    end = next((n for n in range(start, len(words)) if _is_option(words[n])), len(words))
    heads = [part for word in words[start:end] for part in (word, *re.split(r"[./]", word))]
    return heads, flatten(options)


def _is_option(word: str) -> bool:
    return re.match(r"--\w|[+~]*[\w@/-]+(\.[\w@/-]+)+=|config=", word) is not None


def _options(words: Sequence[str], path: Path) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for number, word in enumerate(words):
        key, equals, value = word.lstrip("+~-").partition("=")
        if not _is_option(word):
            continue
        if word.startswith("--") and not equals:
            end = next((n for n in range(number + 1, len(words)) if _is_option(words[n])), len(words))
            options[key.replace("-", "_")] = _value(words[number + 1 : end], path)
        else:
            options[key.replace("-", "_") if word.startswith("--") else key] = _value([value], path)
    return options


def _value(texts: Iterable[str], path: Path) -> Any:
    """Return the value of an option: true without a text, and a list of several."""
    texts = [*texts]
    if re.search(f"[{UNKNOWN}]", " ".join(texts)):
        return Unexpanded(re.sub(f"[{UNKNOWN}]", "", " ".join(texts)))
    if len(texts) > 1:
        return [_value([text.rstrip(",")], path) for text in texts]
    try:
        return read_value(texts[0], str(path)) if texts else True
    except ConfigError:
        return texts[0]  # a prompt such as "[think] first", which is no YAML
