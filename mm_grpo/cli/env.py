"""`mm-grpo env`: what a bug report needs of a machine."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from mm_grpo.terminal import printable


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Show versions, devices and limits of this machine; nothing of it names a user or a host."""
    from mm_grpo.run.environment import describe_environment, describe_limits

    found = describe_environment()
    for of_a_run in ("command", "started"):
        del found[of_a_run]
    found["limits"] = describe_limits()
    if as_json:
        typer.echo(json.dumps(found))
        return
    for line in lines_of(found):
        typer.echo(printable(line))


def in_units(size: int) -> str:
    """Bytes in GiB, below one in MiB.

    >>> in_units(3 * 2**29), in_units(2**23)
    ('1.5 GiB', '8.0 MiB')
    """
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


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
        shown = "no limit" if value is None else in_units(value) if unit else value
        pairs.append((name.removesuffix("_bytes").replace("_", " "), shown))
    pairs += found["packages"].items()
    width = max(len(name) for name, _ in pairs)
    return [f"{name:<{width}}  {value}" for name, value in pairs]
