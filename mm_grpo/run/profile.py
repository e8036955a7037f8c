"""`run.profile`: where the time of a run goes, as a table of phases and waits and as a trace of its first steps.

The table is of the thread that trains, from before the first step to the end of the last one with its evaluation and
checkpoint: each moment is counted once, so the shares of the phases add up to 1. What happens beside it (decoding,
rewards in worker processes or on the event loop) is in the trace alone, for it costs the run nothing unless that thread
waits for it. With several processes both are those of the first.

`trace.json` is in Chrome's trace event format, which https://ui.perfetto.dev and chrome://tracing open.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mm_grpo.files import atomic_write, temporary_folder
from mm_grpo.run.paths import RunPaths
from mm_grpo.timing import STEP, Event, Recorder

TRACED_STEPS = 10
"""Steps of a trace where `run.profile` gives no number."""
MOST_EVENTS = 200_000
"""Events of a trace; the last ones are left out."""

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
    """What `run.profile` asks for: nothing, a table and a trace of the first steps, or torch's trace of an update too.

    `paths` are the run's; None on all processes but the first, which record nothing. `steps` are those to come.
    """

    def __init__(self, wanted: bool | int | str, paths: RunPaths | None, steps: int) -> None:
        self.paths = paths
        self.recorder: Recorder | None = None
        if wanted is False or paths is None:
            return
        traced = TRACED_STEPS if isinstance(wanted, (bool, str)) else wanted
        watch = {UPDATE: TorchTrace(paths.torch_trace, min(steps, 2))} if wanted == "torch" else {}
        self.recorder = Recorder(traced, self._write, watch)

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
        phases = phases_of(self.recorder.seconds)
        return {
            "profile": {
                "seconds": round(self.recorder.seconds[()][0], 3),
                "steps": self.recorder.done,
                "phases": [
                    {
                        "phase": "/".join(path),
                        "seconds": round(seconds, 4),
                        "share": round(share, 4),
                        "times": times,
                    }
                    for path, seconds, share, times in phases
                ],
            }
        }

    def table(self) -> str:
        """The phases as lines of text, the longest first."""
        assert self.recorder is not None and self.paths is not None
        seconds, steps = self.recorder.seconds, max(self.recorder.done, 1)
        traced = min(self.recorder.done, self.recorder.steps)
        whole = seconds[()][0]
        lines = [
            f"{whole:.1f} s in {self.recorder.done} steps ({self.paths.trace} has the first {traced})",
            f"{'phase':<42}{'seconds':>10}{'a step':>10}{'share':>8}",
        ]
        for path, found, share, _ in phases_of(seconds):
            name = "  " * (len(path) - 1) + path[-1]
            lines.append(f"{name:<42}{found:>10.2f}{found / steps:>10.3f}{share:>8.1%}")
        return "\n".join(lines)

    def _write(self, recorder: Recorder) -> None:
        assert self.paths is not None
        atomic_write(self.paths.trace, json.dumps(trace_of(recorder.events, recorder.begin)))


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


def trace_of(events: Sequence[Event], begin: float) -> dict[str, Any]:
    """Chrome's trace of some events, in microseconds since `begin`.

    A thread is a row. Of others at work, such as the workers of a reward, whose events overlap, there are as many rows
    as were at work at once.
    """
    kept = sorted(events, key=lambda event: (event.start, -event.seconds))[:MOST_EVENTS]
    rows: dict[str, int] = {}
    ends: dict[str, list[float]] = {}
    found: list[dict[str, Any]] = []
    for event in kept:
        row = event.lane
        if not event.thread:
            own = ends.setdefault(event.lane, [])
            free = next((i for i, end in enumerate(own) if end <= event.start), len(own))
            own[free : free + 1] = [event.start + event.seconds]
            row = f"{event.lane} {free + 1}"
        number = rows.setdefault(row, len(rows) + 1)
        found.append(
            {
                "name": PHASES.get(event.name, "step" if event.name == STEP else event.name),
                "ph": "X",
                "pid": 1,
                "tid": number,
                "ts": round(1e6 * (event.start - begin), 1),
                "dur": round(1e6 * event.seconds, 1),
                **({"args": event.values} if event.values else {}),
            }
        )
    names = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": row}}
        for row, number in rows.items()
    ]
    return {"traceEvents": names + found, "displayTimeUnit": "ms"}


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
