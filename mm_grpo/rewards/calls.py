"""How a reward function is called, and what counts as its answer.

Here: `Batch` (the step's rows as rewards see them), `Call` (one call of one function: its arguments,
its rows), and the messages of everything that can go wrong. Not here: what is a score (`checks.py`),
weights, totals, metrics and the order of calls (`scoring.py`), processes (`pool.py`). Axis letters:
n = P·G rows, flat.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mm_grpo.errors import RewardError
from mm_grpo.rewards.checks import LEGAL, Checked, Fault, fault_of, score_of, scores_of, shown
from mm_grpo.rewards.registry import RewardSpec

if TYPE_CHECKING:
    from mm_grpo.types import Completion, Prompt, Sample


@dataclass(frozen=True)
class TrainerState:
    """What rewards are told of the run: the step being scored, from 0 or from 1 as the trainer counts, and
    the last one (0 when the run has no bound)."""

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
        return "\n".join(_text(message.get("content")) for message in messages)

    def completion(self, row: int) -> Any:
        """The answer in TRL's form: messages where the prompt is messages, else the text."""
        text = self.completions[row].text
        return [{"role": "assistant", "content": text}] if self.conversational else text

    def applies(self, spec: RewardSpec, rows: Iterable[int] | None = None) -> list[int]:
        """Those of `rows` (all of them by default) that hold every column the reward needs."""
        needs = [column for column in spec.needs if column not in spec.bound]
        rows = range(len(self.prompts)) if rows is None else rows
        if not needs:
            return list(rows)
        return [
            row
            for row in rows
            if all(self.prompts[row].sample.columns.get(column) is not None for column in needs)
        ]

    def calls(self, spec: RewardSpec, rows: Iterable[int] | None = None) -> list[Call]:
        """One call per row that the reward applies to, or one for all of them; none when there are none."""
        rows = self.applies(spec, rows)
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
        """Call the function. An async one gives its coroutine."""
        return self.spec.fn(**self.arguments())

    def arguments(self) -> dict[str, Any]:
        """Every argument by name: ours, then columns, then what the config bound."""
        if self.spec.kind == "completion":
            ours, columns = self._ours_of_completion(), self.batch.prompts[self.rows[0]].sample.columns
        else:
            ours, columns = self._ours_of_batch(), self._columns_of_batch()
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
            free = [
                c for c in known if c not in given and c not in ours and c not in spec.optional + spec.options
            ]
            given.update({name: columns.get(name) for name in free})
        return given | dict(spec.bound)

    def checked(self, answer: Any) -> list[Checked]:
        """The answer as one checked score per row; RewardError when a batch's is no list of them."""
        try:
            return scores_of(answer, self.spec.kind, len(self.rows))
        except ValueError as error:
            raise self.refused(str(error)) from None

    def refused(self, words: str, row: int | None = None) -> RewardError:
        """The error for an answer that is no score, in the words of `checks.py`."""
        return RewardError(f"{self.blame(row)} {words}")

    def raised(self, error: BaseException | Fault) -> RewardError:
        """The message for an exception out of the function; the caller chains it with `from`."""
        fault = error if isinstance(error, Fault) else fault_of(error, self.spec.fn, __file__)
        at = f" at {fault.file}:{fault.line}" if fault.file else ""
        return RewardError(
            f"{self.blame()} raised {fault.what}{at}{self._absent()}. The function must answer; {LEGAL}"
        )

    def log(self, logged: Iterable[tuple[str, str, Any]]) -> None:
        """Do what a worker process noted: ("extra" or "metric", name, values) each."""
        for what, name, values in logged:
            if what == "extra":
                self._log_extra(name, values)
            else:
                self._log_metric(name, values)

    def blame(self, row: int | None = None) -> str:
        """Which reward, row and completion a message is about."""
        if row is None and len(self.rows) > 1:
            uids = list(dict.fromkeys(self.batch.prompts[r].uid for r in self.rows))
            listed = ", ".join(repr(uid) for uid in uids[:3]) + (", ..." if len(uids) > 3 else "")
            return (
                f"reward {self.spec.name!r}, on a batch of {len(self.rows)} completions (rows {listed}; the "
                f"first completion is {shown(self.batch.completions[self.rows[0]].text)}),"
            )
        row = self.rows[0] if row is None else row
        text = shown(self.batch.completions[row].text)
        return (
            f"reward {self.spec.name!r}, on row {self.batch.prompts[row].uid!r} with the completion {text},"
        )

    def _ours_of_completion(self) -> dict[str, Any]:
        row = self.rows[0]
        prompt = self.batch.prompts[row]
        return {
            "completion": self.batch.completions[row].text,
            "completion_ids": list(self.batch.completions[row].token_ids),
            "prompt": self.batch.prompt(row),
            "images": prompt.engine_prompt.images,
            "sample": prompt.sample,
            "trainer_state": self.batch.state,
            "log_extra": lambda column, value: self._log_extra(column, [value]),
            "log_metric": self._log_metric,
        }

    def _ours_of_batch(self) -> dict[str, Any]:
        batch, rows = self.batch, self.rows
        return {
            "prompts": [batch.prompt(row) for row in rows],
            "completions": [batch.completions[row].text for row in rows]
            if self.spec.takes_texts
            else [batch.completion(row) for row in rows],
            "completion_ids": [list(batch.completions[row].token_ids) for row in rows],
            "images": [list(batch.prompts[row].engine_prompt.images) for row in rows],
            "samples": self._samples(),
            "trainer_state": batch.state,
            "log_extra": self._log_extra,
            "log_metric": self._log_metric,
        }

    def _samples(self) -> list[Sample]:
        return [self.batch.prompts[row].sample for row in self.rows]

    def _columns_of_batch(self) -> Mapping[str, list[Any]]:
        samples = self._samples()
        return {name: [sample.columns.get(name) for sample in samples] for name in self.batch.columns}

    def _log_extra(self, column: str, values: Sequence[Any]) -> None:
        values = list(values)
        if len(values) != len(self.rows):
            raise RewardError(
                f"log_extra({column!r}) got {len(values)} values for {len(self.rows)} completions"
            )
        owner, held = self.batch.extra.setdefault(
            column, (self.spec.name, [None] * len(self.batch.completions))
        )
        if owner != self.spec.name:
            raise RewardError(
                f"log_extra({column!r}): reward {owner!r} logs that column too; give it another name"
            )
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
            raise RewardError(
                f"log_metric({name!r}): names under rewards/ and time/ are the trainer's; choose another"
            )
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


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or () if part.get("type") == "text")
