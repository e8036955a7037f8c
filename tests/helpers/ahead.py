"""Runs whose engine samples while the learner works."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.configs import merged
from helpers.fake_engines import FakeServer
from helpers.small_runs import HELDOUT, ROWS, config_for, rows_of, vowels
from mm_grpo import GRPOTrainer, build
from mm_grpo.config.engine_facts import ENGINE_FACTS, EngineFacts

TIMES = ("time/", "step_time", "served/")
LITTLE = {"report": False, "sight_every": 0, "save_model": False}
"""What these runs do without."""


def use_server(patch: pytest.MonkeyPatch, fault: str = "", **options: Any) -> None:
    """Let `rollout.engine: transformers` be a FakeServer."""

    def made(config: Any, model: Any, processor: Any, ranks: Any) -> FakeServer:
        return FakeServer(model, processor, fault, **options)

    patch.setitem(build.ENGINES, "transformers", made)
    patch.setitem(ENGINE_FACTS, "transformers", EngineFacts(embedded=True, remote=True))


def trainer_of(
    path: Path, folder: Path, *, resume: bool = False, callbacks: Sequence[Any] = (), **changes: Any
) -> GRPOTrainer:
    reward = changes.pop("reward", vowels)
    config = config_for(path, folder, **merged({"run": LITTLE}, changes))
    evaluated = HELDOUT if config.run.eval_every else None
    hooks: Any = {"callbacks": callbacks, "resume": resume}
    return GRPOTrainer(config, train=ROWS, eval=evaluated, rewards=[reward], **hooks)


def noting_seeds(patch: pytest.MonkeyPatch, engine: Any) -> list[int]:
    """A list to which the seeds of everything that the engine is asked to sample from now on are added."""
    asked: list[int] = []
    generate = engine.generate

    def noted(requests: Any) -> Any:
        asked.extend(request.seed for request in requests)
        return generate(requests)

    patch.setattr(engine, "generate", noted)
    return asked


def without_times(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows_of(folder)]


def logged(folder: Path, step: int) -> bytes:
    return (folder / f"rollouts/step-{step:06d}.jsonl").read_bytes()
