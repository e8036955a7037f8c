"""The file that `mm-grpo convert` reads: YAML, JSON, or a command line with `--key value`, such as a shell script."""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from mm_grpo.config.yaml_file import read_yaml
from mm_grpo.errors import ConfigError
from mm_grpo.files import parse_json, read_regular_file


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
        values = [value] if equals else []
        for following in () if equals else words[number + 1 :]:
            if following.startswith("--") or following in ("&&", ";", "|"):
                break
            values.append(following)
        read = [_read_value(each) for each in values]
        found[key.replace("-", "_")] = True if not read else read[0] if len(read) == 1 else read
    if not found:
        raise ConfigError(f"{path}: has no --key value; give a .yaml or .json file, or a command line")
    return found


def _read_value(text: str) -> Any:
    if text.casefold() in ("true", "false", "null", "none"):
        return {"true": True, "false": False}.get(text.casefold())
    with suppress(ValueError):
        if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", text):
            return int(text) if text.lstrip("-+").isdecimal() else float(text)
        if text[:1] in ("[", "{"):
            return parse_json(text)
    return text
