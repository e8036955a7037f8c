"""Toolboxes whose tools run in worker processes, of which none is left after a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.configs import small_config
from helpers.sessions import died

from mm_grpo.environments.toolbox import Toolbox
from mm_grpo.environments.workers import WorkerHost

Make = Callable[..., Toolbox]


def pids(box: Toolbox) -> list[int]:
    host = box.host
    return [slot.process.pid for slot in host.slots if slot.process] if isinstance(host, WorkerHost) else []  # type: ignore[misc]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Toolboxes whose tools are called in two processes; none is left at the end."""
    made: list[Toolbox] = []
    monkeypatch.setattr("mm_grpo.environments.host.MAX_PIXELS", 50_000)

    def toolbox(tools: Any = (), factory: Any = None, **rollout: Any) -> Toolbox:
        values = {"environment_workers": 2, "tool_timeout": 60, **rollout}
        made.append(Toolbox(small_config("m", rollout=values), tools, factory))
        return made[-1]

    yield toolbox
    for box in made:
        started = [*pids(box), *(guard.process.pid for guard in getattr(box.host, "guards", ()))]
        box.close()
        assert died(started)
