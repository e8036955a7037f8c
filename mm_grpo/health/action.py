"""What happens when a guard speaks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from mm_grpo.errors import GuardStop

logger = logging.getLogger("mm_grpo")


def act(guard: str, message: str | None, actions: Mapping[Any, str]) -> bool:
    """Stop the run, warn, or stay silent, as `actions[guard]` says (`stop` when it says nothing).

    Returns whether the guard had something to say. Raises GuardStop on `stop`.
    """
    action = actions.get(guard, "stop")
    if message is None or action == "off":
        return False
    text = f"guard {guard}: {message} (run.guards.{guard}={action})"
    if action == "stop":
        raise GuardStop(text)
    logger.warning(text)
    return True
