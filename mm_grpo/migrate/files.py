"""The file that `mm-grpo convert` reads: YAML, JSON, or a command line with `--key value`, such as a shell script."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from mm_grpo.config.yaml_file import read_value, read_yaml
from mm_grpo.errors import ConfigError
from mm_grpo.files import read_regular_file


def read_foreign(path: str | Path) -> dict[str, Any]:
    """The keys of a YAML or JSON file, nested as they are, or those of a file that holds `--key value`."""
    path = Path(path)
    if path.suffix.lower() in (".yaml", ".yml", ".json"):
        return read_yaml(path)  # JSON is YAML
    try:
        words = shlex.split(read_regular_file(path).decode().replace("\\\n", " "), comments=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as a command line ({error})") from None
    found: dict[str, Any] = {}
    for number, word in enumerate(words):
        if not word.startswith("--") or len(word) == 2:
            continue
        key, equals, value = word[2:].partition("=")
        ends = (each.startswith("--") or each in ("&&", ";", "|") for each in words[number + 1 :])
        count = next((at for at, end in enumerate(ends) if end), len(words))
        values = [value] if equals else words[number + 1 :][:count]
        read = [read_value(each, f"{path}: {word}") for each in values]
        found[key.replace("-", "_")] = True if not read else read[0] if len(read) == 1 else read
    if not found:
        raise ConfigError(f"{path}: has no --key value; give a .yaml or .json file, or a command line")
    return found
