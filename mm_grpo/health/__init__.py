"""Guards: one failure each, with a threshold, an action and a message that names cause and remedy.

    duplicate_completions  a group repeats itself more than its own probabilities allow
    logp_gap               engine and learner disagree about the log-probs of the same tokens
    update_happens         the optimizer ran and nothing moved, or nothing could; also a run without one update
                           (the guard `no_update`)
    reward_signal          groups without spread (`zero_std`), rewards that apply to nothing (`no_reward`)
    loss_terms             a KL of exactly 0 (`zero_kl`), tokens dropped by a correction (`masked_share`)
    collapse               `entropy_collapse`, and completions cut at their longest (`clipped_lengths`)
    unread_images          log-probs that are the same without the image
    history                what guards keep from step to step
    guards                 all of them together: what a step shows them, what is done, what a resume gives back

Those of one moment are functions that return a message or None. Those that need several steps are classes whose
`observe` takes a step's metrics and returns an `Alarm` or None, so that a resumed run rebuilds them from
metrics.jsonl. A new guard is one of the two, a line in `guards.py` and its name in the config's `run.guards`.

What a guard does when it fires is `stop` where the run is certainly broken, else `warn`; `run.guards` says
otherwise: `stop`, `warn` or `off`.
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
