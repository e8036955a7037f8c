"""Toolboxes whose tools run in worker processes, of which none is left after a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.configs import small_config
from helpers.sessions import died, workers

from mm_grpo.environments.toolbox import Toolbox

Make = Callable[..., Toolbox]


@pytest.fixture
def make() -> Iterator[Make]:
    """Toolboxes whose tools are called in two processes; none is left at the end."""
    made: list[Toolbox] = []

    def toolbox(tools: Any = (), factory: Any = None, **rollout: Any) -> Toolbox:
        values = {"environment_workers": 2, "tool_timeout": 60, **rollout}
        made.append(Toolbox(small_config("m", rollout=values), tools, factory))
        return made[-1]

    yield toolbox
    started = workers()
    for box in made:
        box.close()
    assert died(started)
