"""torch's own trace of one update: operators, kernels and their times, of `run.profile: torch`.

Of the learner's part of one step alone, the second where there is one, for the first one also compiles and allocates. A
rollout token by token would be millions of events.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mm_grpo.files import atomic_write, temporary_folder


class TorchTrace:
    """Records one of the blocks that it is told of, that number `number`, counted from 1, and writes it to `path`."""

    def __init__(self, path: Path, number: int) -> None:
        self.path, self.number = path, number
        self.count = 0
        self._profiler: Any = None

    def begin(self) -> None:
        """A block begins."""
        from torch.profiler import profile

        self.count += 1
        if self.count == self.number:
            self._profiler = profile()  # of what there is: the CPU, and CUDA
            self._profiler.start()

    def end(self) -> None:
        """It ends."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
            with temporary_folder("trace") as folder:
                profiler.export_chrome_trace(str(folder / "trace.json"))
                atomic_write(self.path, (folder / "trace.json").read_bytes())
