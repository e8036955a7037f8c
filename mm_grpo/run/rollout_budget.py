"""`run.keep_rollouts`: how many bytes of the steps' logged completions and their images a run keeps on disk.

Over the limit the oldest step files go first, and with each the images that no other names. Those of the first and the
last step stay. The rows of evaluations are not counted, and what they name stays: whoever writes them bounds them. Only
what this run's own log files name is ever counted or removed: a file in rollouts/ whose rows are of another step than
its name says is somebody else's, and so is an image that no row names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from mm_grpo.files import parse_json
from mm_grpo.run.paths import ROLLOUT_NAME, RunPaths

AIM = 0.98
"""Share of the limit down to which is removed at once, so that not every step has to look for what may go."""
NAMED_IMAGE = re.compile(rb'"([0-9a-f]{32}\.png)"')


@dataclass
class _Image:
    bytes: int
    files: int
    """Log files that name it."""


class RolloutBudget:
    """Removes the oldest rollouts of a run over `limit` bytes; None is no limit.

    What the folder holds is looked through once, when the first file is added; after that a step costs what its own
    file does.
    """

    def __init__(self, paths: RunPaths, limit: int | None) -> None:
        self.paths, self.limit = paths, limit
        self.bytes = 0
        self._files: dict[Path, int] | None = None
        self._images: dict[bytes, _Image] = {}

    @property
    def sentence(self) -> str:
        """What is kept, for the start of a run."""
        if self.limit is None:
            return "all logged completions and their images are kept (run.keep_rollouts is null)"
        return (
            f"at most {self.limit / 1e9:.3g} GB of logged completions and images are kept (run.keep_rollouts): the "
            "oldest go first, never those of the first and the last step"
        )

    def add(self, file: Path) -> list[Path]:
        """Count a log file that was written; returns the log files that were removed for it."""
        if self.limit is None:
            return []
        if self._files is None:
            self._files = {}
            found = [
                path for path in self.paths.rollouts.glob("step-*.jsonl") if path != file and is_own(path)
            ]
            for path in sorted(found, key=lambda path: int(path.stem.removeprefix("step-"))):
                self._count(path)
        else:
            self._forget(file)  # written again
        self._count(file)
        return self._prune()

    def _count(self, file: Path) -> None:
        assert self._files is not None
        data = file.read_bytes()
        self._files[file] = len(data)
        self.bytes += len(data)
        for name in set(NAMED_IMAGE.findall(data)):
            image = self._images.get(name)
            if image is None:
                path = self.paths.images / name.decode()
                image = self._images[name] = _Image(path.stat().st_size if path.is_file() else 0, 0)
                self.bytes += image.bytes
            image.files += 1

    def _forget(self, file: Path) -> None:
        if self._files is not None and file in self._files:
            self.bytes -= self._files.pop(file)
            # what it named is not known any more; an image too many is kept until the run is resumed

    def _prune(self) -> list[Path]:
        assert self._files is not None and self.limit is not None
        if self.bytes <= self.limit:
            return []
        removed: list[Path] = []
        named = self._named_by_evaluations()
        while self.bytes > self.limit * AIM and len(self._files) > 2:  # the first and the last stay
            removed.append(next(islice(self._files, 1, None)))
            self._remove(removed[-1], named)
        return removed

    def _remove(self, file: Path, kept: frozenset[bytes]) -> None:
        """Remove a log file, and the images that only it names and that are not among those `kept`."""
        assert self._files is not None
        data = file.read_bytes() if file.is_file() else b""
        file.unlink(missing_ok=True)  # before its images: no row is left that names one that is gone
        self.bytes -= self._files.pop(file)
        for name in set(NAMED_IMAGE.findall(data)):
            image = self._images.get(name)
            if image is None:
                continue
            image.files -= 1
            if image.files <= 0:
                if name not in kept:
                    (self.paths.images / name.decode()).unlink(missing_ok=True)
                self.bytes -= image.bytes
                del self._images[name]

    def _named_by_evaluations(self) -> frozenset[bytes]:
        """The images that rows of evaluations name."""
        files = (path for path in self.paths.rollouts.glob("eval-*.jsonl") if path.is_file())
        return frozenset(name for path in files for name in NAMED_IMAGE.findall(path.read_bytes()))


def is_own(path: Path) -> bool:
    """Whether a file in rollouts/ is a log of a run: its first row is of the step that its name says."""
    match = ROLLOUT_NAME.fullmatch(path.name)
    if match is None or match[1] or path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        line = file.readline(1 << 24)
    if not line:
        return True  # a step without a group
    try:
        row = parse_json(line)
    except ValueError:
        return False
    return isinstance(row, dict) and row.get("step") == int(match[2]) and "uid" in row
