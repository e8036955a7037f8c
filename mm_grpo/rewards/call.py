"""Calls of reward functions, and the scores and faults that come back.

`RewardCalls` holds one reward's calls in a step, and `Call` is one of them. Trainer and worker processes check answers
by the same functions (`scores.py`), so isolation does not change a score. Not here: the rows (`batch.py`), arguments
(`arguments.py`), totals and the order of calls (`scorer.py`). Axis letters: n = P·G rows, flat.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mm_grpo.errors import RewardError
from mm_grpo.rewards.arguments import copied_arguments
from mm_grpo.rewards.batch import Batch
from mm_grpo.rewards.scores import LEGAL, LEGAL_TURNS, Checked, Fault, Score, check_answer, shown, total_of
from mm_grpo.rewards.spec import RewardSpec, code_of

RowErrors = dict[int, RewardError]
"""Errors by the row that is masked for them."""
LONGEST = 2000
"""Characters kept of an exception's message."""


@dataclass(frozen=True)
class Call:
    """Call of a reward function for `rows`: a single row, or a batch."""

    batch: Batch
    spec: RewardSpec
    rows: tuple[int, ...]

    def __call__(self) -> Any:
        """Call the function; an async one returns its coroutine."""
        return self.spec.fn(**copied_arguments(self.batch, self.spec, self.rows))

    def refused(self, fault: Fault, row: int | None = None) -> RewardError:
        """Return the error for an answer that is no score."""
        return RewardError(f"{self.blame(row)} {fault.reason}")

    def raised(self, error: BaseException | ExceptionText) -> RewardError:
        """Return the error for an exception out of the function; the caller chains it with `from`."""
        text = error if isinstance(error, ExceptionText) else exception_text(error, self.spec.fn, __file__)
        place = f" at {text.file}:{text.line}" if text.file else ""
        absent = self._absent_columns()
        if text.message.startswith("TypeError: string indices") and self.spec.kind == "batch":
            absent += " (completions are texts if prompts are: set completions: messages in its entry)"
        return RewardError(f"{self.blame()} raised {text.message}{place}{absent}. It must answer; {LEGAL}")

    def too_late(self, late: int, calls: int) -> RewardError:
        """Return the error for a call without an answer at the deadline; `late` of `calls` had none."""
        also = f"; {late} of {calls} calls had not" if calls > 1 else ""
        return RewardError(
            f"{self.blame()} had not answered after timeout = {self.spec.options.deadline:g} s{also}; set a "
            f"longer timeout, or on_timeout: mask"
        )

    def blame(self, row: int | None = None) -> str:
        """Name the reward, row and completion that a message is about."""
        if row is None and len(self.rows) > 1:
            uids = list(dict.fromkeys(self.batch.prompts[r].uid for r in self.rows))
            listed = ", ".join(repr(uid) for uid in uids[:3]) + (", ..." if len(uids) > 3 else "")
            first = shown(self.batch.completions[self.rows[0]].text)
            place = f"a batch of {len(self.rows)} completions (rows {listed}; the first is {first})"
        else:
            row = self.rows[0] if row is None else row
            text = shown(self.batch.completions[row].text)
            place = f"row {self.batch.prompts[row].uid!r} with the completion {text}"
        return f"reward {self.spec.name!r}, on {place},"

    def _absent_columns(self) -> str:
        """Return a hint if a column that the function asked for is None in these rows, else ""."""
        samples = [self.batch.prompts[row].sample for row in self.rows]
        absent = [
            name
            for name in self.spec.required
            if name not in self.spec.supplied and name not in self.spec.bound
            if any(sample.columns.get(name) is None for sample in samples)
        ]
        if not absent:
            return ""
        listed = ", ".join(repr(name) for name in absent)
        return f" (here {listed} is None; @reward(..., needs=({listed},)) skips such rows)"


def calls_of(batch: Batch, spec: RewardSpec, rows: Iterable[int]) -> list[Call]:
    """Return one call for each of `rows` that the reward applies to, or one for all of them."""
    rows = [row for row in rows if spec.applies_to(batch.prompts[row].sample.columns)]
    if spec.kind == "completion":
        return [Call(batch, spec, (row,)) for row in rows]
    return [Call(batch, spec, tuple(rows))] if rows else []


@dataclass
class RewardCalls:
    """Calls of a reward in a step, and their results. A fault is raised at once if the reward's options say "stop"."""

    spec: RewardSpec
    scores: list[Score]
    """The n scores; of a reward with `per_turn` the sums over turns."""
    calls: Sequence[Call] = ()
    errors: RowErrors = field(default_factory=dict)
    timeouts: RowErrors = field(default_factory=dict)
    seconds: float = 0.0
    """Time during which at least one call was running."""
    turns: dict[int, list[Score]] = field(default_factory=dict)
    """By row, the scores of the turns of a reward with `per_turn`."""
    _running: int = 0
    _since: float = 0.0

    def set_answer(self, call: Call, answer: Any) -> None:
        """Check and store the answer of a call that this process made."""
        try:
            checked = check_answer(answer, self.spec.kind, len(call.rows), self.spec.options.per_turn)
        except ValueError as error:  # a batch's is no list of scores
            self.fail(call.rows, call.refused(Fault(str(error))))
        else:
            self.set_scores(call, checked)

    def set_scores(self, call: Call, checked: Sequence[Checked]) -> None:
        """Store a call's checked scores, one for each of its rows."""
        for row, score in zip(call.rows, checked, strict=True):
            if isinstance(score, list):
                turns, count = score, len(call.batch.completions[row].turn_lengths)
                if len(turns) == count:
                    self.turns[row], score = turns, total_of(turns)
                else:
                    score = Fault(
                        f"returned {len(turns)} numbers where the model had {count} turns; {LEGAL_TURNS}"
                    )
            if isinstance(score, Fault):
                self.fail((row,), call.refused(score, row))
            else:
                self.scores[row] = score

    def fail(
        self,
        rows: Sequence[int],
        error: RewardError,
        cause: BaseException | None = None,
        *,
        late: bool = False,
    ) -> None:
        """Mask rows whose call failed, or with `late` had no answer at the deadline; or raise the error."""
        on_timeout = self.spec.options.on_timeout if late else None
        if (on_timeout or self.spec.options.on_error) == "stop":
            raise error from cause
        (self.timeouts if late else self.errors).update(dict.fromkeys(rows, error))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of this reward; see `Scores.metrics`."""
        name, applied = f"rewards/{self.spec.name}", [score for score in self.scores if score is not None]
        errors, timeouts = len(self.errors), len(self.timeouts)
        metrics = {
            f"{name}/none": float(len(self.scores) - len(applied) - errors - timeouts),
            f"{name}/errors": float(errors),
            f"{name}/timeouts": float(timeouts),
            f"time/reward/{self.spec.name}": self.seconds,
        }
        if applied:
            mean = math.fsum(applied) / len(applied)
            squares = math.fsum((score - mean) ** 2 for score in applied)
            metrics[f"{name}/mean"] = mean
            metrics[f"{name}/std"] = math.sqrt(squares / (len(applied) - 1)) if len(applied) > 1 else 0.0
        return metrics

    @contextmanager
    def clock(self) -> Iterator[None]:
        """Count the time of a call. Calls that overlap count once."""
        if not self._running:
            self._since = time.perf_counter()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0:
                self.seconds += time.perf_counter() - self._since

    def stop_clock(self) -> None:
        """Add the time of calls that still run. Those that go on although cancelled count no further."""
        if self._running:
            self.seconds += time.perf_counter() - self._since
            self._running = 0


class WorkerTrace(Exception):
    """Traceback of an exception in a worker process; the cause of the error raised for it."""

    def __str__(self) -> str:
        return "\n" + "".join(map(str, self.args))


@dataclass(frozen=True)
class ExceptionText:
    """An exception out of a reward in plain text, which can cross processes; `message` starts with its type."""

    message: str
    file: str | None = None
    line: int | None = None
    trace: str = ""


def exception_text(error: BaseException, fn: Callable[..., Any], *excluded: str) -> ExceptionText:
    """Describe an exception out of `fn`, with the innermost frame in its file, else outside the `excluded` files."""
    kind, message = type(error).__name__, str(error)
    if len(message) > LONGEST:
        message = f"{message[:LONGEST]}... ({len(message)} characters)"
    code = code_of(fn)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in excluded]
    in_file = [f for f in frames if code is not None and f.filename == code.co_filename]
    frame = (in_file or frames)[-1] if frames else None
    trace = "".join(traceback.format_exception(error))
    file, line = (frame.filename, frame.lineno) if frame else (None, None)
    return ExceptionText(f"{kind}: {message}" if message else kind, file, line, trace)
