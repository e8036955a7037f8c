"""`mm-grpo env`: what a bug report needs of a machine."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from mm_grpo.terminal import byte_size, printable


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Show versions, devices and limits of this machine; nothing of it names a user or a host."""
    from mm_grpo.run.environment import describe_environment, describe_limits

    found = describe_environment()
    del found["command"], found["started"]  # of a run
    found["limits"] = describe_limits()
    if as_json:
        typer.echo(json.dumps(found))
        return
    for line in lines_of(found):
        typer.echo(printable(line))


def lines_of(found: dict[str, Any]) -> list[str]:
    """A name and a value a line."""
    limits = dict(found["limits"])
    pairs: list[tuple[str, Any]] = [
        ("mm_grpo", found["mm_grpo"]),
        ("python", found["python"]),
        ("platform", found["platform"]),
        ("cpus", found["cpus"]),
        ("gpus", ", ".join(found["gpus"]) or "none"),
        ("driver", limits.pop("nvidia_driver") or "none"),
    ]
    for name, value in limits.items():
        unit = name.endswith("_bytes")
        shown = "no limit" if value is None else byte_size(value) if unit else value
        pairs.append((name.removesuffix("_bytes").replace("_", " "), shown))
    pairs += found["packages"].items()
    width = max(len(name) for name, _ in pairs)
    return [f"{name:<{width}}  {value}" for name, value in pairs]
