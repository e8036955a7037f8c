"""Guards: one failure each, with a threshold, an action and a message that names cause and remedy.

    rows                   guards of metrics over several steps, a row each; a new one is a row here
    history                the metrics of a run so far, which the rows read
    sight                  the guard `sight_lost`, which keeps its own measurements
    checks                 guards of one moment: functions that return a message or None
    guards                 all guards of a run together: shown each step, applied, rebuilt on resume

Each name stands in the config's `run.guards` too, which says what the guard does when it fires: `stop`, `warn` or
`off`. By default it stops a run that is certainly broken, and warns of others.
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
    """Message of a guard that fired, and its action unless `run.guards` sets another."""

    message: str
    action: Literal["stop", "warn"] = "warn"


def apply_guard(guard: str, message: str | None, actions: Mapping[Any, str], default: str = "stop") -> bool:
    """Stop the run, warn, or do nothing, as `actions[guard]` says (`default` if it says nothing).

    Returns True if the guard fired. Raises GuardStop on `stop`.
    """
    action = actions.get(guard, default)
    if message is None or action == "off":
        return False
    text = f"guard {guard}: {message} (run.guards.{guard}={action})"
    if action == "stop":
        raise GuardStop(text)
    logger.warning(text)
    return True
