"""Run as a script: `served_learner.py CONFIG FOLDER` trains step by step, from the newest checkpoint if there is one.

Before each step it waits until FOLDER/allowed holds its number. FOLDER/events.jsonl gets a line, with the time of the
monotonic clock, when it has done a step and when a server is lost or ready.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from mm_grpo import GRPOConfig, GRPOTrainer
from mm_grpo.run.stop_signals import RunInterrupted

LOOK = 0.02
DEADLINE = 600.0
ENDED = 143
"""The exit code after SIGTERM, as that of `mm-grpo train`."""


class Gate:
    """The callback that waits, and the thread that looks at the servers."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.trainer = folder, None
        self.file = (folder / "events.jsonl").open("a", buffering=1)
        self.lock = threading.Lock()

    def note(self, **what: Any) -> None:
        with self.lock:
            self.file.write(json.dumps({"t": time.monotonic(), **what}) + "\n")

    def on_train_begin(self, trainer: Any, step: int) -> None:
        threading.Thread(target=self.watch, args=(trainer.engine.pool,), daemon=True).start()
        self.note(begun=step)
        self.wait(step + 1)

    def on_step_end(self, step: int) -> None:
        self.note(done=step)

    def on_save(self, step: int) -> None:
        self.wait(step + 1)

    def wait(self, step: int) -> None:
        self.note(waits=step)
        end = time.monotonic() + DEADLINE
        while int((self.folder / "allowed").read_text() or 0) < step:
            if time.monotonic() > end:
                raise TimeoutError(f"step {step} was not allowed within {DEADLINE:.0f} s")
            time.sleep(LOOK)

    def watch(self, pool: Any) -> None:
        before: Any = None
        while True:
            ready = len(pool.ready())
            if (now := (ready, pool.losses)) != before:
                self.note(ready=ready, losses=pool.losses)
                before = now
            time.sleep(LOOK)


if __name__ == "__main__":
    gate = Gate(Path(sys.argv[2]))
    trainer = GRPOTrainer(GRPOConfig.from_yaml(sys.argv[1]), callbacks=[gate], resume=True)
    try:
        trainer.train()
    except RunInterrupted:
        sys.exit(ENDED)
