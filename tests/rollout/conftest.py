"""What the tests of served engines share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def make(held: ExitStack, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`helpers.fake_vllm.engine_over`, closed after the test; lost servers are tried again at once."""
    from helpers.fake_vllm import engine_over

    from mm_grpo.rollout.served import pool

    monkeypatch.setattr(pool, "RETRY", 0.02)
    monkeypatch.setattr(pool, "PERIOD", 0.02)
    return partial(engine_over, held)
