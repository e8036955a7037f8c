"""Run as a script: a run whose engine samples while the learner works, in as many processes as were launched.

`ahead_runs.py CONFIG` trains, and resumes where there is something to resume. `ahead_runs.py CONFIG STEP` ends every
process, without a word, when the learner is to begin with that step.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from helpers.fake_engines import FakeServer
from transformers.utils import logging

from mm_grpo import GRPOConfig, GRPOTrainer, build
from mm_grpo.config.engine_facts import ENGINE_FACTS, EngineFacts


def server(config: Any, model: Any, processor: Any, ranks: Any) -> FakeServer:
    return FakeServer(model, processor, delay=0.002 * int(os.environ.get("RANK", "0")))


if __name__ == "__main__":
    logging.disable_progress_bar()
    build.ENGINES["transformers"] = server
    ENGINE_FACTS["transformers"] = EngineFacts(embedded=True, remote=True)
    trainer = GRPOTrainer(GRPOConfig.from_yaml(sys.argv[1]), resume=True)
    if len(sys.argv) > 2:
        last, update = int(sys.argv[2]), trainer.learner.update
        trainer.learner.update = lambda g: update(g) if trainer.sync.version + 1 < last else os._exit(9)  # type: ignore[method-assign]
    trainer.train()
