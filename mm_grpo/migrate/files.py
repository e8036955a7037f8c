"""The file that `mm-grpo convert` reads: YAML, JSON, or a command line such as a shell script.

A command line gives `--key value`, verl's `section.key=value`, and variables of ms-swift such as MAX_PIXELS=...
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from mm_grpo.config.yaml_file import read_value, read_yaml, refuse_long
from mm_grpo.errors import ConfigError
from mm_grpo.files import read_regular_file
from mm_grpo.migrate.keys import advice_on


def read_foreign(path: str | Path) -> dict[str, Any]:
    """Return the keys of a file, nested as they are there. Raises ConfigError if it has none."""
    path = Path(path)
    if path.suffix.lower() in (".yaml", ".yml", ".json"):
        keys = read_yaml(path)  # JSON is YAML
    else:
        try:
            keys = _command_options(read_regular_file(path).decode(), path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read as a script ({error})") from None
    if not keys:
        raise ConfigError(
            f"{path}: holds no key; what is read is YAML, JSON and shell commands with --key value: of a Python script "
            "write the arguments of its config into a .yaml file, as key: value"
        )
    return keys


def _command_options(text: str, path: Path) -> dict[str, Any]:
    refuse_long(text, str(path))
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    options: dict[str, Any] = {}
    for number, word in enumerate(words):
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            variable = key.isupper() and advice_on(key, []) is not None
            if equals and (variable or re.fullmatch(r"\+?\w+(\.\w+)+", key)):
                options[key.lower().lstrip("+")] = read_value(value, f"{path}: {word}")
        elif key:
            later = range(number + 1, len(words))
            end = next((at for at in later if re.match(r"--|&&$|;$|\|$", words[at])), len(words))
            texts = [value] if equals else words[number + 1 : end]
            values = [read_value(text, f"{path}: {word}") for text in texts]
            options[key.replace("-", "_")] = True if not values else values[0] if len(values) == 1 else values
    return options
