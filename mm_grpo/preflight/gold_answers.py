"""Rewards on right and on wrong answers, for `mm-grpo check`.

A reward must score a row's right answer above the right answers of other rows and above garbage; a built-in
must give it 1. Rewards that read no column have no right answer: they are called, and their scores reported.
Those that may use a network are called only when asked to. A reward has to apply to some row, unless it waits for a
gate or has weight 0.

What a right answer is, gold_text.py knows. In a run of several turns an answer is a conversation of one turn.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from mm_grpo.errors import RewardError
from mm_grpo.preflight.gold_text import UNWRITTEN, gold_text, lacks_column, read_columns
from mm_grpo.rewards.scorer import Scorer
from mm_grpo.rewards.spec import RewardSpec
from mm_grpo.run.overlays import builtin_name
from mm_grpo.types import Completion, Prompt, Turn

CHUNK = 64
"""Rows that are scored in one call of a batch function, and among which right answers are exchanged."""
OTHERS = 3
"""Right answers of other rows that a row's reward is tried on. One of them may mean the same ("1/2", "0.5")."""
GARBAGE = "?!"
MOST_ERRORS = 3
"""A reward that has raised on so many rows is not called again: each may have waited for its deadline."""
TOLERANCE = 1e-6

JUDGES = ("judge", "reward_model")
ANY_BEST = ("cosine_length",)
"""Built-ins whose best score the config sets; that of the others is 1."""
FORMS = ("format",)
"""Built-ins that read no column, but must be content with what `data.gold_template` makes of an answer."""


@dataclass
class RewardReport:
    """What one reward did: `gold` and `wrong` are its scores of right and wrong answers, `failures` messages about rows
    on which it does not tell them apart or raises. `skipped` says why it was not judged, or not called.

    To `unapplied` of the `rows` rows it does not apply: a column that it needs is null, its `when` names others, or
    every answer gets None. `may_be_idle` says that it need not apply anywhere.
    """

    name: str
    weight: float
    skipped: str = ""
    gold: list[float] = field(default_factory=list)
    wrong: list[float] = field(default_factory=list)
    rows: int = 0
    unapplied: int = 0
    may_be_idle: bool = False
    errors: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def applies_nowhere(self) -> bool:
        """Whether it applies to none of the rows, and ought to."""
        return 0 < self.rows == self.unapplied and not self.may_be_idle


_Row = tuple[str, Prompt, str]
"""A row's name, its prompt, and its right answer, empty where it has none."""


class RewardCheck:
    """Scores right and wrong answers of the rows it is given, one reward after the other.

    `specs` are resolved rewards, `template` is `data.gold_template`, `conversational` as in `Scorer`.
    `several_turns` says that the run has tools or an environment, so rewards are given `turns`, and may be `per_turn`.
    `call_judges` allows rewards that may use a network. Call `add` for each row and `finish` at the end.
    """

    def __init__(self, specs: Sequence[RewardSpec], **options: Any) -> None:
        self._checks = [_Check(spec, **options) for spec in specs]
        self._rows: list[tuple[str, Prompt]] = []

    def add(self, row: str, prompt: Prompt) -> None:
        """Take a row; `row` is what messages call it."""
        self._rows.append((row, prompt))
        if len(self._rows) >= CHUNK:
            self._flush()

    def finish(self) -> list[RewardReport]:
        """Score what is left, stop all workers, and give a report for each reward."""
        with ExitStack() as held:
            for check in self._checks:
                held.callback(check.scorer.close)
            self._flush()
        return [check.report for check in self._checks]

    def _flush(self) -> None:
        for check in self._checks:
            check.score(self._rows)
        self._rows = []


class _Check:
    """One reward, and what is known of it so far."""

    def __init__(
        self,
        spec: RewardSpec,
        *,
        template: str | None = None,
        conversational: bool = True,
        several_turns: bool = False,
        call_judges: bool = False,
    ) -> None:
        self.spec, self.template, self.several_turns = spec, template, several_turns
        self.builtin = builtin_name(spec)
        self.scorer = Scorer([alone(spec)], conversational=conversational, several_turns=several_turns)
        idle = spec.weight == 0 or bool(spec.options.only_if)
        self.report = RewardReport(spec.name, spec.weight, may_be_idle=idle)
        self.may_call = call_judges or not (spec.is_async or self.builtin in JUDGES)
        self.judged = self.form = self.builtin in FORMS and template is not None
        self.pool: dict[str, None] = {}
        if not self.may_call:
            self.report.skipped = "not called: it may use a network (--call-judges calls it)"

    def score(self, rows: Sequence[tuple[str, Prompt]]) -> None:
        if not rows or not self.may_call:
            return
        self._settle([prompt for _, prompt in rows])
        always = not self.judged or self.form
        needed = [
            (name, prompt, gold_text(self.spec, prompt, self.template, always=always) or "")
            for name, prompt in rows
            if not lacks_column(self.spec, prompt)
        ]
        self.report.rows += len(rows)
        self.report.unapplied += len(rows) - len(needed)
        self.pool |= dict.fromkeys(gold for _, _, gold in needed if gold)
        self._score(needed)
        self.pool = dict.fromkeys(list(self.pool)[-CHUNK:])

    def _settle(self, prompts: Sequence[Prompt]) -> None:
        """Whether there is anything to judge: some row has a column that the reward reads."""
        if self.judged:
            return
        self.report.skipped = ""
        if self.builtin in UNWRITTEN:
            self.report.skipped = "not judged: no column says what a right answer is"
        elif self.spec.takes_kwargs or any(read_columns(self.spec, p.sample.columns) for p in prompts):
            self.judged = True
        else:
            self.report.skipped = "not judged: it reads no column, so no answer is right by the row alone"

    def _score(self, rows: Sequence[_Row]) -> None:
        if not rows or self.report.errors >= MOST_ERRORS:
            return
        tried = [[gold, *self._others(gold), GARBAGE] if gold else [GARBAGE] for _, _, gold in rows]
        try:
            scores = self._call(rows, tried)
        except RewardError as error:
            if len(rows) > 1:  # find the rows that it is about
                for row in rows:
                    self._score([row])
                return
            self.report.errors += 1
            end = "; not called again" if self.report.errors == MOST_ERRORS else ""
            self.report.failures.append(f"{_short(rows[0][0])}: {error}{end}")
            return
        for row, texts, answers in zip(rows, tried, scores, strict=True):
            self._judge(row, texts, answers)

    def _others(self, gold: str) -> list[str]:
        if self.form:
            return []
        plain = " ".join(gold.split()).casefold()
        others = [text for text in self.pool if " ".join(text.split()).casefold() != plain]
        return others[-OTHERS:]

    def _call(self, rows: Sequence[_Row], tried: Sequence[Sequence[str]]) -> list[list[float | None]]:
        # an answer by itself, without the thinking that the chat template may have begun
        bare = [dataclasses.replace(prompt, opens_thinking=False) for _, prompt, _ in rows]
        prompts = [prompt for prompt, texts in zip(bare, tried, strict=True) for _ in texts]
        completions = [self._completion(text) for texts in tried for text in texts]
        flat = iter(self.scorer.score(prompts, completions, 1).parts[self.spec.name])
        return [[next(flat) for _ in texts] for texts in tried]

    def _completion(self, text: str) -> Completion:
        turns = (Turn("assistant", text, 0),) if self.several_turns else ()
        return Completion(token_ids=(), logprobs=(), text=text, finish_reason="stop", seed=0, turns=turns)

    def _judge(self, row: _Row, texts: Sequence[str], scores: Sequence[float | None]) -> None:
        gold, others, garbage = scores[0], scores[1:-1], scores[-1]
        name, _, right = row
        report = self.report
        report.unapplied += self.judged and all(score is None for score in scores)
        if right and not self.judged:
            report.wrong += [score for score in scores if score is not None]
        if not right or gold is None or not self.judged:
            return
        report.gold.append(gold)
        report.wrong += [score for score in scores[1:] if score is not None]
        same_as_others = bool(others) and all(not _less(score, gold) for score in others)
        has_top = self.builtin is not None and self.builtin not in ANY_BEST
        tried = [(right, gold)]
        if has_top and not math.isclose(gold, 1.0, abs_tol=TOLERANCE):
            fault = "the right answer is not scored 1"
        elif not _less(garbage, gold):
            fault = "garbage scores no less"
            tried.append((texts[-1], garbage))
        elif same_as_others:
            fault = "the right answers of other rows score no less"
            tried.append((texts[1], scores[1]))
        else:
            return
        shown = ", ".join(f"{text[:40]!r} scores {number(score)}" for text, score in tried)
        report.failures.append(f"{_short(name)}: {fault} ({report.name}: {shown})")


def number(score: float | None) -> str:
    return "None" if score is None else f"{score:.3g}"


def alone(spec: RewardSpec) -> RewardSpec:
    """The reward as it is checked: not gated by others, and every error raised, whatever a run would do."""
    options = spec.options.model_copy(update={"only_if": (), "on_error": "stop", "on_timeout": "stop"})
    return dataclasses.replace(spec, options=options)


def _short(row: str) -> str:
    return row.rsplit("/", 1)[-1]


def _less(score: float | None, gold: float) -> bool:
    return score is not None and score < gold - TOLERANCE
