"""`mm-grpo env`: what a bug report needs of a machine."""

from __future__ import annotations

import json

import typer

from mm_grpo.terminal import printable


def env() -> None:
    """Show versions, devices and limits of this machine as JSON; nothing of it names a user or a host."""
    from mm_grpo.run.environment import describe_environment, describe_limits

    found = describe_environment()
    del found["command"], found["started"]  # of a run
    typer.echo(printable(json.dumps({**found, "limits": describe_limits()}, indent=2)))
