"""One call of a reward function: its arguments by name, the checks of its answer, the messages of what fails.

`Batch` holds the step's rows as rewards see them, `Call` is one call of one function, `RewardCalls` one reward's
calls in a step and what came of them. Trainer and workers check answers by the same functions (`scores.py`), so an
isolated reward scores as it would without. Not here: weights, totals, metrics and the order of calls (`scorer.py`) and
processes (`isolation.py`). Axis letters: n = P·G rows, flat.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mm_grpo.errors import RewardError
from mm_grpo.rewards.scores import LEGAL, LEGAL_TURNS, Checked, score_of, scores_of, shown, total_of
from mm_grpo.rewards.spec import TURN_ARGUMENTS, RewardSpec, code_of
from mm_grpo.rewards.thinking import without_thinking
from mm_grpo.user_code.kept_state import own_copy

if TYPE_CHECKING:
    from mm_grpo.types import Completion, Prompt, Sample, Turn

Faults = dict[int, RewardError]
"""Errors by the row that is masked for them."""
LONGEST = 2000
"""Characters kept of an exception's message."""

NOT_COPIED = frozenset(
    {
        "completion",
        "completion_ids",
        "trainer_state",
        "log_extra",
        "log_metric",
        "environment",
        "environments",
    }
)
"""Arguments that no other call sees or none can change, and environments, which are the user's."""


@dataclass(frozen=True)
class Fault:
    """An exception out of a reward, in plain text: `what` is its type and message; where it was raised."""

    what: str
    file: str | None = None
    line: int | None = None
    trace: str = ""


class WorkerTrace(Exception):
    """The traceback of an exception in a worker process; the cause of the error raised for it."""

    def __str__(self) -> str:
        return "\n" + "".join(map(str, self.args))


@dataclass(frozen=True)
class TrainerState:
    """What rewards may read of the run: the step being scored and the last one (0 when the run has no bound)."""

    global_step: int
    max_steps: int = 0


@dataclass
class Batch:
    """The rows of one step: `prompts[i]` belongs to `completions[i]`, n of each.

    `columns` are the dataset's columns; a row that lacks one reads None. `extra` and `logged` collect
    what functions log: per column the name of the reward and n values, per metric its values.
    """

    prompts: Sequence[Prompt]
    completions: Sequence[Completion]
    columns: tuple[str, ...]
    conversational: bool
    state: TrainerState
    extra: dict[str, tuple[str, list[Any]]] = field(default_factory=dict)
    logged: dict[str, list[float]] = field(default_factory=dict)

    def prompt(self, row: int) -> Any:
        """The messages, in a list of their own so that a function may change it; or the text."""
        messages = self.prompts[row].sample.messages
        if self.conversational:
            return [dict(message) for message in messages]
        return "\n".join(content_text(message.get("content")) for message in messages)

    def completion(self, spec: RewardSpec, row: int) -> Any:
        """The answer in TRL's form: messages where the prompt is messages, else the text."""
        text = self.text(spec, row)
        if not self.conversational:
            return text
        last = {"role": "assistant", "content": text}
        return [*map(_message, self.completions[row].turns[:-1]), last]

    def text(self, spec: RewardSpec, row: int) -> str:
        """The completion as a reward gets it: all of it, or what follows the thinking."""
        text = self.completions[row].text
        opened = self.prompts[row].opens_thinking
        return without_thinking(text, opened=opened) if spec.options.strip_thinking else text

    def calls(self, spec: RewardSpec, rows: Iterable[int]) -> list[Call]:
        """One call for each of `rows` that the reward applies to, or one for all of them; none when there are none."""
        rows = [row for row in rows if spec.applies_to(self.prompts[row].sample.columns)]
        if spec.kind == "completion":
            return [Call(self, spec, (row,)) for row in rows]
        return [Call(self, spec, tuple(rows))] if rows else []


@dataclass(frozen=True)
class Call:
    """One call of one reward function for `rows`: a single row, or a batch."""

    batch: Batch
    spec: RewardSpec
    rows: tuple[int, ...]

    def __call__(self) -> Any:
        """Call the function, with rows of its own to change. An async one gives its coroutine."""
        given = self.arguments()
        for name in given.keys() - NOT_COPIED - self.spec.left_alone:
            given[name] = own_copy(given[name])
        return self.spec.fn(**given)

    def arguments(self) -> dict[str, Any]:
        """Every argument by name: ours, then columns, then what the config bound."""
        if self.spec.kind == "completion":
            ours, columns = self._ours_of_completion(), self.batch.prompts[self.rows[0]].sample.columns
        else:
            ours, samples = self._ours_of_batch(), self._samples()
            columns = {name: [sample.columns.get(name) for sample in samples] for name in self.batch.columns}
        ours = {n: v for n, v in ours.items() if n not in TURN_ARGUMENTS or n not in self.batch.columns}
        spec, known = self.spec, self.batch.columns
        given: dict[str, Any] = {}
        for name in spec.required + spec.optional:
            if name in ours:
                given[name] = ours[name]
            elif name in columns:
                given[name] = columns[name]
            elif name in spec.required:
                given[name] = None
        if spec.takes_kwargs:
            if spec.kind == "batch":  # TRL's functions look these up in their **kwargs
                given.update({name: value for name, value in ours.items() if name not in given})
            taken = {*given, *ours, *spec.optional, *spec.config_only}
            given.update({name: columns.get(name) for name in known if name not in taken})
        return given | dict(spec.bound)

    def refused(self, why: str, row: int | None = None) -> RewardError:
        """The error for an answer that is no score."""
        return RewardError(f"{self.blame(row)} {why}")

    def raised(self, error: BaseException | Fault) -> RewardError:
        """The message for an exception out of the function; the caller chains it with `from`."""
        fault = error if isinstance(error, Fault) else fault_of(error, self.spec.fn, __file__)
        at = f" at {fault.file}:{fault.line}" if fault.file else ""
        return RewardError(f"{self.blame()} raised {fault.what}{at}{self._absent()}. It must answer; {LEGAL}")

    def too_late(self, late: int, of: int) -> RewardError:
        """The error for a call without an answer at the deadline, one of `late` such among `of` calls."""
        also = f"; {late} of {of} calls had not" if of > 1 else ""
        return RewardError(
            f"{self.blame()} had not answered after timeout = {self.spec.options.deadline:g} s{also}; set a "
            f"longer timeout, or on_timeout: mask"
        )

    def log(self, logged: Iterable[tuple[str, str, Any]]) -> None:
        """Do what a worker process noted: ("extra" or "metric", name, values) each."""
        for what, name, values in logged:
            (self._log_extra if what == "extra" else self._log_metric)(name, values)

    def blame(self, row: int | None = None) -> str:
        """Which reward, row and completion a message is about."""
        if row is None and len(self.rows) > 1:
            uids = list(dict.fromkeys(self.batch.prompts[r].uid for r in self.rows))
            listed = ", ".join(repr(uid) for uid in uids[:3]) + (", ..." if len(uids) > 3 else "")
            first = shown(self.batch.completions[self.rows[0]].text)
            where = f"a batch of {len(self.rows)} completions (rows {listed}; the first is {first})"
        else:
            row = self.rows[0] if row is None else row
            text = shown(self.batch.completions[row].text)
            where = f"row {self.batch.prompts[row].uid!r} with the completion {text}"
        return f"reward {self.spec.name!r}, on {where},"

    def _ours_of_completion(self) -> dict[str, Any]:
        row = self.rows[0]
        prompt = self.batch.prompts[row]
        return {
            "completion": self.batch.text(self.spec, row),
            "completion_ids": list(self.batch.completions[row].token_ids),
            "prompt": self.batch.prompt(row),
            "images": prompt.engine_prompt.images,
            "sample": prompt.sample,
            "trainer_state": self.batch.state,
            "log_extra": lambda column, value: self._log_extra(column, [value]),
            "log_metric": self._log_metric,
            "turns": turns_of(self.batch.completions[row]),
            "environment": self.batch.completions[row].final_state,
            "environment_reward": self.batch.completions[row].final_reward,
        }

    def _ours_of_batch(self) -> dict[str, Any]:
        batch, rows = self.batch, self.rows
        done = [batch.completions[row] for row in rows]
        named = {*self.spec.required, *self.spec.optional} & TURN_ARGUMENTS
        several = any(c.turns for c in done) or bool(named)  # what is not there is not put into **kwargs
        turns = {
            "turns": [turns_of(c) for c in done],
            "environments": [c.final_state for c in done],
            "environment_reward": [c.final_reward for c in done],
        }
        return (turns if several else {}) | {
            "prompts": [batch.prompt(row) for row in rows],
            "completions": [batch.text(self.spec, row) for row in rows]
            if self.spec.takes_texts
            else [batch.completion(self.spec, row) for row in rows],
            "completion_ids": [list(batch.completions[row].token_ids) for row in rows],
            "images": [list(batch.prompts[row].engine_prompt.images) for row in rows],
            "samples": self._samples(),
            "trainer_state": batch.state,
            "log_extra": self._log_extra,
            "log_metric": self._log_metric,
        }

    def _samples(self) -> list[Sample]:
        return [self.batch.prompts[row].sample for row in self.rows]

    def _log_extra(self, column: str, values: Sequence[Any]) -> None:
        values = own_copy(list(values))
        if len(values) != len(self.rows):
            wrong = f"log_extra({column!r}) got {len(values)} values for {len(self.rows)} completions"
            raise RewardError(wrong)
        owner, held = self.batch.extra.setdefault(
            column, (self.spec.name, [None] * len(self.batch.completions))
        )
        if owner != self.spec.name:
            raise RewardError(f"log_extra({column!r}): reward {owner!r} logs that column too; rename it")
        for row, value in zip(self.rows, values, strict=True):
            held[row] = value

    def _log_metric(self, name: str, value: Any) -> None:
        try:
            number = score_of(value)
        except ValueError:
            number = None
        if number is None:
            raise RewardError(f"log_metric({name!r}) got {shown(value)}; legal is a finite number")
        if name.startswith(("rewards/", "time/")):
            raise RewardError(f"log_metric({name!r}): names under rewards/ and time/ are the trainer's")
        self.batch.logged.setdefault(name, []).append(number)

    def _absent(self) -> str:
        """A hint when a column that the function asked for is None in these rows."""
        absent = [
            name
            for name in self.spec.required
            if name not in self.spec.supplied and name not in self.spec.bound
            if any(sample.columns.get(name) is None for sample in self._samples())
        ]
        if not absent:
            return ""
        listed = ", ".join(repr(name) for name in absent)
        return f" (here {listed} is None; @reward(..., needs=({listed},)) skips such rows)"


@dataclass
class RewardCalls:
    """One reward's calls in a step and their results: n scores, and the errors of the rows without one.

    Where the reward's options say "stop" an error is raised at once. `seconds` is what the calls took.
    """

    spec: RewardSpec
    scores: list[float | None]
    calls: Sequence[Call] = ()
    errors: Faults = field(default_factory=dict)
    timeouts: Faults = field(default_factory=dict)
    seconds: float = 0.0
    turns: dict[int, list[float | None]] = field(default_factory=dict)
    """Of a reward with `per_turn`, by row the scores of its turns, of which `scores` holds the sum."""

    def answered(self, call: Call, answer: Any) -> None:
        """Take the raw answer of a call that this process made."""
        try:
            checked = scores_of(answer, self.spec.kind, len(call.rows), self.spec.options.per_turn)
        except ValueError as error:  # a batch's is no list of scores
            self.failed(call, call.refused(str(error)))
        else:
            self.scored(call, checked)

    def scored(self, call: Call, checked: Sequence[Checked]) -> None:
        """Take a call's checked scores."""
        for row, value in zip(call.rows, checked, strict=True):
            if isinstance(value, list):
                count = len(call.batch.completions[row].turn_lengths)
                if len(value) == count:
                    self.turns[row] = value
                    self.scores[row] = total_of(value)
                    continue
                value = f"returned {len(value)} numbers where the model had {count} turns; {LEGAL_TURNS}"
            if isinstance(value, str):
                self._fault(self.errors, (row,), call.refused(value, row))
            else:
                self.scores[row] = value

    def failed(self, call: Call, fault: RewardError, cause: BaseException | None = None) -> None:
        """Note that a call raised, died or answered with no scores, which concerns all its completions."""
        self._fault(self.errors, call.rows, fault, cause)

    def late(self, call: Call, fault: RewardError) -> None:
        """Note that a call had no answer at the deadline."""
        self._fault(self.timeouts, call.rows, fault)

    def _fault(self, kept: Faults, rows: Sequence[int], fault: RewardError, cause: Any = None) -> None:
        options = self.spec.options
        late = options.on_timeout is not None and kept is self.timeouts
        if (options.on_timeout if late else options.on_error) == "stop":
            raise fault from cause
        kept.update(dict.fromkeys(rows, fault))


def turns_of(completion: Completion) -> list[dict[str, Any]]:
    """The messages of a conversation of several turns, as rewards get them; none of a single answer."""
    return [turn.shown() for turn in completion.turns]


def _message(turn: Turn) -> dict[str, Any]:
    """A turn in TRL's form."""
    if turn.role == "assistant":
        return {"role": "assistant", "content": turn.text}
    images = [{"type": "image", "image": image} for image in turn.images]
    content = [*images, {"type": "text", "text": turn.text}] if images else turn.text
    return {"role": "tool", "name": turn.name, "content": content}


def fault_of(error: BaseException, fn: Callable[..., Any], *own_files: str) -> Fault:
    """An exception out of `fn` in plain text, with the innermost frame in its file, else outside `own_files`."""
    name, message = type(error).__name__, str(error)
    if len(message) > LONGEST:
        message = f"{message[:LONGEST]}... ({len(message)} characters)"
    code = code_of(fn)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in own_files]
    own = [f for f in frames if code is not None and f.filename == code.co_filename]
    frame = (own or frames)[-1] if frames else None
    what, trace = f"{name}: {message}" if message else name, "".join(traceback.format_exception(error))
    return Fault(what, frame.filename if frame else None, frame.lineno if frame else None, trace)


def content_text(content: Any) -> str:
    """The text of a message's content: the text itself, or its parts of the type "text" joined."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content or () if part.get("type") == "text")
