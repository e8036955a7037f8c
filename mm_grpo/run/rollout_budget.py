"""`run.keep_rollouts`: how many bytes of the steps' logged completions and their images a run keeps on disk.

Over the limit the oldest step files go first, and with each the images that no other names. Those of the first and the
last step stay. The rows of evaluations are not counted, and what they name stays: whoever writes them bounds them. An
image that no row names is somebody else's.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from mm_grpo.run.paths import RunPaths
from mm_grpo.run.rollout_log import evaluated_steps, logged_steps

AIM = 0.98
"""Share of the limit down to which is removed at once, so that not every step has to look for what may go."""
NAMED_IMAGE = re.compile(rb'"([0-9a-f]{32}\.png)"')


class RolloutBudget:
    """Removes the oldest rollouts of a run over `limit` bytes; None is no limit.

    What the folder holds is looked through once, when the first file is added; after that a step costs what its own
    file does.
    """

    def __init__(self, paths: RunPaths, limit: int | None) -> None:
        self.paths, self.limit = paths, limit
        self.bytes = 0
        self._files: dict[Path, int] = {}
        self._images: Counter[Path] = Counter()
        """How many of the files name an image."""

    @property
    def sentence(self) -> str:
        """What is kept, for the start of a run."""
        if self.limit is None:
            return "rollouts: all are kept (run.keep_rollouts)"
        return f"rollouts: the newest {self.limit / 1e9:.3g} GB are kept (run.keep_rollouts)"

    def add(self, file: Path) -> None:
        """Count a log file that was written, and remove what is too much."""
        if self.limit is None:
            return
        if not self._files:
            earlier = map(self.paths.rollout_file, logged_steps(self.paths))
            for path in (path for path in earlier if path != file):
                self._count(path)
        self._count(file)
        if self.bytes > self.limit:
            kept = {
                image
                for step in evaluated_steps(self.paths)
                for image in self._named(self.paths.evaluation_file(step))
            }
            while self.bytes > self.limit * AIM and len(self._files) > 2:  # the first and the last stay
                self._remove(next(islice(self._files, 1, None)), kept)

    def _named(self, file: Path) -> Iterator[Path]:
        """The images that the rows of a log file name, each once."""
        return (self.paths.images / name.decode() for name in set(NAMED_IMAGE.findall(file.read_bytes())))

    def _count(self, file: Path) -> None:
        self._files[file] = file.stat().st_size
        self.bytes += self._files[file]
        for image in self._named(file):
            self._images[image] += 1
            if self._images[image] == 1:
                self.bytes += _size(image)

    def _remove(self, file: Path, kept: set[Path]) -> None:
        """Remove a log file, and the images that only it names and that are not among those `kept`."""
        images = list(self._named(file)) if file.is_file() else []
        file.unlink(missing_ok=True)  # before its images: no row is left that names one that is gone
        self.bytes -= self._files.pop(file)
        for image in images:
            self._images[image] -= 1
            if self._images[image] <= 0:
                self.bytes -= _size(image)
                del self._images[image]
                if image not in kept:
                    image.unlink(missing_ok=True)


def _size(image: Path) -> int:
    return image.stat().st_size if image.is_file() else 0
