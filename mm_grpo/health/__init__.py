"""Guards: one failure each, with a threshold, an action and a message that names cause and remedy.

    rows                   those that read metrics of several steps, a row each; a new one is a row here
    history                what a run has shown so far, which the rows read
    sight                  `sight_lost`, which keeps measurements of its own
    checks                 those of one moment: functions that return a message or None
    guards                 all of them together: what a step shows them, what is done, what a resume gives back

Those of several steps are rebuilt from metrics.jsonl when a run is resumed. Each name stands in the config's
`run.guards` too, which says what the guard does when it fires: `stop`, `warn` or `off`. By itself it stops a run that
is certainly broken, and warns of others.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mm_grpo.errors import GuardStop

logger = logging.getLogger("mm_grpo")


@dataclass(frozen=True)
class Alarm:
    """What a guard found, and what it does about it unless `run.guards` says otherwise."""

    message: str
    action: Literal["stop", "warn"] = "warn"


def apply_guard(guard: str, message: str | None, actions: Mapping[Any, str], default: str = "stop") -> bool:
    """Stop the run, warn, or stay silent, as `actions[guard]` says (`default` when it says nothing).

    Returns whether the guard fired. Raises GuardStop on `stop`.
    """
    action = actions.get(guard, default)
    if message is None or action == "off":
        return False
    text = f"guard {guard}: {message} (run.guards.{guard}={action})"
    if action == "stop":
        raise GuardStop(text)
    logger.warning(text)
    return True
