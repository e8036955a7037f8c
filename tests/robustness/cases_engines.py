"""Rollout engines that go wrong in silence, or end, through `mm-grpo train`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import robustness.run_case as by
from mm_grpo.errors import EngineError
from robustness.cases import Call, add
from robustness.whole_runs import write_config


def faulty(fault: str) -> Callable[[Path], Call]:
    """A run whose engine has its own copy of the weights, and a fault."""

    def make(folder: Path) -> Call:
        from mm_grpo import build
        from mm_grpo.testing.fake_engines import FakeRemoteEngine

        config = write_config(folder)

        def engine(config: Any, model: Any, processor: Any) -> FakeRemoteEngine:
            return FakeRemoteEngine(model, processor, fault)

        def call() -> None:
            with patch.dict(build.ENGINES, transformers=engine):
                by.command("train", config)

        return call

    return make


def failing(error: Callable[[], BaseException]) -> Callable[[Path], Call]:
    """A run whose engine raises in its third call, as one whose process has ended."""

    def make(folder: Path) -> Call:
        from mm_grpo.rollout.transformers_engine import TransformersEngine

        config = write_config(folder)
        real, calls = TransformersEngine.generate, count()

        def generate(self: Any, requests: Any) -> Any:
            if next(calls) == 2:
                raise error()
            return real(self, requests)

        def call() -> None:
            with patch.object(TransformersEngine, "generate", generate):
                by.command("train", config)

        return call

    return make


add("engines: one without a fault", faulty(""), code=0, heavy=True)
for fault, words in {
    "no transfer": "69 never arrived",
    "no load": "it has not loaded what it received",
    "one tensor lost": "up_proj.weight",
    "stale version": "did not take the last weight update",
    "old cache": "logp_gap",
    "wrong image": "logp_gap",
    "constant seed": "own seed",
    "constant seed, hidden": "duplicate_completions",
}.items():
    add(f"engines: {fault}", faulty(fault), words, code=3, heavy=True)
add(
    "engines: one that ends",
    failing(lambda: EngineError("the engine's process has ended")),
    "the rollout engine failed",
    "has ended",
    code=1,
    heavy=True,
)
