"""`run.profile`: where the time of a run goes, as a table of phases and waits, and torch's own trace of an update.

The table is of the thread that trains, from before the first step to the end of the last one with its evaluation and
checkpoint: each moment is counted once, so the shares of the phases add up to 1. What happens beside it (decoding,
rewards in worker processes or on the event loop) costs the run nothing unless that thread waits for it. With several
processes it is that of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mm_grpo.files import atomic_write, temporary_folder
from mm_grpo.run.paths import RunPaths
from mm_grpo.timing import STEP, Recorder

PHASES = {
    "time/data": "waiting for prompts and images",
    "time/rollout": "generation",
    "time/reference": "reference log-probs",
    "time/rewards": "waiting for rewards",
    "time/learner": "learner",
    "time/sync": "weight sync and its checks",
    "time/sight": "sight",
    "time/credit": "credit by sight",
    "time/log": "writing rollouts",
    "time/eval": "evaluation",
    "metrics": "writing metrics",
    "checkpoint": "checkpoint",
    "snapshot": "copying the state",
    "writing": "writing",
    "writing ends": "waiting until it is written",
    "processes": "waiting for other processes",
}
"""How spans are named in the table; others by their own name."""
REST = "the rest"
UPDATE = "time/learner"
"""The span of which torch's trace is."""


class Profile:
    """What `run.profile` asks for: nothing, a table, or torch's trace of an update too.

    `paths` are the run's; None on all processes but the first, which record nothing. `steps` are those to come.
    """

    def __init__(self, wanted: bool | str, paths: RunPaths | None, steps: int) -> None:
        self.recorder: Recorder | None = None
        if wanted and paths is not None:
            traced = {UPDATE: TorchTrace(paths.torch_trace, min(steps, 2))} if wanted == "torch" else {}
            self.recorder = Recorder(traced)

    def start(self) -> None:
        """Record what this process does from now on."""
        if self.recorder is not None:
            self.recorder.start()

    def stop(self, show: Callable[[str], None] | None = None) -> None:
        """The end of it, where `show` may get the table; without effect where nothing is recorded."""
        if self.recorder is not None:
            self.recorder.stop()
            if show is not None:
                show(self.table())

    def summary(self) -> dict[str, Any]:
        """What summary.json holds under `profile`; empty without one."""
        if self.recorder is None:
            return {}
        seconds = self.recorder.seconds
        phases = [
            {"phase": "/".join(path), "seconds": round(spent, 4), "share": round(share, 4), "times": times}
            for path, spent, share, times in phases_of(seconds)
        ]
        found = {"seconds": round(seconds[()][0], 3), "steps": self.recorder.done, "phases": phases}
        return {"profile": found}

    def table(self) -> str:
        """The phases as lines of text, the longest first."""
        assert self.recorder is not None
        seconds, done = self.recorder.seconds, self.recorder.done
        lines = [
            f"{seconds[()][0]:.1f} s in {done} steps",
            f"{'phase':<42}{'seconds':>10}{'a step':>10}{'share':>8}",
        ]
        for path, found, share, _ in phases_of(seconds):
            name = "  " * (len(path) - 1) + path[-1]
            lines.append(f"{name:<42}{found:>10.2f}{found / max(done, 1):>10.3f}{share:>8.1%}")
        return "\n".join(lines)


Phase = tuple[tuple[str, ...], float, float, int]
"""Path, seconds, share of the whole, how often."""


def phases_of(seconds: Mapping[tuple[str, ...], Sequence[float]]) -> list[Phase]:
    """Phases with their parts below them, the longest first, and what is left of each as `the rest`.

    `seconds` are those of `Recorder`. Phases of one level and their rest add up to the one that they are parts of.
    """
    whole = seconds[()][0]
    times = {path: found for path, found in seconds.items() if path not in ((), (STEP,))}

    def parts(above: tuple[str, ...], total: float) -> Iterator[Phase]:
        own = [path for path in times if path[:-1] == above]
        if not own:
            return
        left = total - sum(times[path][0] for path in own)
        found = sorted([(times[path][0], path) for path in own], reverse=True)
        for spent, path in found:
            yield _titles(path), spent, spent / whole if whole else 0.0, int(times[path][1])
            yield from parts(path, spent)
        yield (*_titles(above), REST), left, left / whole if whole else 0.0, 0

    return list(parts((), whole))


def _titles(path: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(PHASES.get(name, name) for name in path)


class TorchTrace:
    """torch's own trace of a block: operators, kernels and their times, written to `path`.

    Of the one that is number `number`, counted from 1: the first also compiles and allocates, and a rollout token by
    token would be millions of events.
    """

    def __init__(self, path: Path, number: int) -> None:
        self.path, self.number = path, number
        self.count = 0
        self._profiler: Any = None

    def __enter__(self) -> None:
        from torch.profiler import profile

        self.count += 1
        if self.count == self.number:
            self._profiler = profile()  # of what there is: the CPU, and CUDA
            self._profiler.start()

    def __exit__(self, *exception: object) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
            with temporary_folder("trace") as folder:
                profiler.export_chrome_trace(str(folder / "trace.json"))
                atomic_write(self.path, (folder / "trace.json").read_bytes())
