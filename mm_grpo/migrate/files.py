"""The file that `mm-grpo convert` reads: YAML, JSON, or a command line such as a shell script.

Of a command line `--key value` is read, verl's `section.key=value`, and variables such as MAX_PIXELS=... of ms-swift.
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
    """The keys of a file, nested as they are there."""
    path = Path(path)
    if path.suffix.lower() in (".yaml", ".yml", ".json"):
        found = read_yaml(path)  # JSON is YAML
    else:
        try:
            found = _of_command(read_regular_file(path).decode(), path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read as a script ({error})") from None
    if not found:
        raise ConfigError(
            f"{path}: holds no key; what is read is YAML, JSON and shell commands with --key value: of a Python script "
            "write the arguments of its config into a .yaml file, as key: value"
        )
    return found


def _of_command(text: str, path: Path) -> dict[str, Any]:
    refuse_long(text, str(path))
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    found: dict[str, Any] = {}
    for number, word in enumerate(words):
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            variable = key.isupper() and advice_on(key, []) is not None
            if equals and (variable or re.fullmatch(r"\+?\w+(\.\w+)+", key)):
                found[key.lower().lstrip("+")] = read_value(value, f"{path}: {word}")
        elif key:
            later = range(number + 1, len(words))
            end = next((at for at in later if re.match(r"--|&&$|;$|\|$", words[at])), len(words))
            values = [value] if equals else words[number + 1 : end]
            read = [read_value(each, f"{path}: {word}") for each in values]
            found[key.replace("-", "_")] = True if not read else read[0] if len(read) == 1 else read
    return found
