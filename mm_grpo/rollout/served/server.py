"""One server as the pool sees it, work that waits for one, and the limits of all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from mm_grpo.rollout.served.client import ServerClient
    from mm_grpo.rollout.served.protocol import Answer, ServerInfo, Work


@dataclass(eq=False)
class Server:
    """One server. `weights` is the name of the weights that it was last seen to hold, `why` says what happened to it
    last, `load` is the completions that it works on.

    It is `ready` with the run's weights, `behind` when it answers and holds others, else `lost`.
    """

    client: ServerClient
    info: ServerInfo | None = None
    state: Literal["ready", "behind", "lost"] = "lost"
    why: str = "not asked yet"
    weights: str | None = None
    load: int = 0
    tries: int = 0
    next_try: float = 0.0
    lost_at: float = 0.0
    asked: float = 0.0
    answered: float = 0.0
    checked: float = 0.0
    checking: bool = False
    running: dict[asyncio.Future[Answer], Work] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.client.url

    def describe(self) -> str:
        """Its url and what it does, or what happened to it."""
        if self.state == "ready":
            last = f", last answer {time.monotonic() - self.answered:.0f} s ago" if self.answered else ""
            return f"{self.url}: {len(self.running)} request(s) on their way{last}"
        tried = f"; tried {self.tries} time(s) since" if self.tries else ""
        return f"{self.url}: {self.why}{tried}"


@dataclass(eq=False)
class Waiting:
    """Work that has no server yet: `prefer` is the url that it would go to first, `avoid` those where it failed."""

    work: Work
    prefer: str | None
    avoid: set[str]
    place: asyncio.Future[Server]


@dataclass(frozen=True)
class Limits:
    """Limits of `rollout.server`: seconds, and completions that a server works on at once.

    `max_model_len` is the longest sequence that a server has to take, in tokens; `sizes` are the learner's model's.
    """

    timeout: float = 600.0
    health_timeout: float = 30.0
    wait_timeout: float = 300.0
    max_sequences: int = 256
    max_model_len: int = 0
    sizes: Mapping[str, Any] = field(default_factory=dict)
