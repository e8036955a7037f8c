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
from dataclasses import dataclass, field
from typing import Any

from mm_grpo.errors import RewardError
from mm_grpo.preflight.gold_text import UNWRITTEN, gold_text, lacks_column, read_columns
from mm_grpo.rewards.scorer import Scorer
from mm_grpo.rewards.spec import RewardSpec
from mm_grpo.run.overlays import builtin_name
from mm_grpo.types import Completion, Prompt, Turn

CHUNK = 64
"""Rows among which right answers are exchanged."""
OTHERS = 3
"""Right answers of other rows that a row's reward is tried on. One of them may mean the same ("1/2", "0.5")."""
GARBAGE = "?!"
MOST_ERRORS = 3
"""A reward that has raised on so many rows is not called again: each may have waited for its deadline."""
TOLERANCE = 1e-6

JUDGES = ("judge", "reward_model")
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
        self._rows.append((row.rsplit("/", 1)[-1], prompt))
        if len(self._rows) >= CHUNK:
            self._flush()

    def finish(self) -> list[RewardReport]:
        """Score what is left, stop all workers, and give a report for each reward."""
        self._flush()
        for check in self._checks:
            check.scorer.close()
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
        self.pool: list[str] = []
        if not self.may_call:
            self.report.skipped = "not called: it may use a network (--call-judges calls it)"

    def score(self, rows: Sequence[tuple[str, Prompt]]) -> None:
        if not self.may_call:
            return
        needed = []
        for row, prompt in rows:
            self.judged = self.judged or self._may_judge(prompt)
            always = not self.judged or self.form
            if not lacks_column(self.spec, prompt):
                needed.append((row, prompt, gold_text(self.spec, prompt, self.template, always=always)))
        self.report.rows += len(rows)
        self.report.unapplied += len(rows) - len(needed)
        self.pool = list(dict.fromkeys(gold for _, _, gold in needed if gold is not None))
        for row, prompt, gold in needed:
            if self.report.errors < MOST_ERRORS:
                self._score(row, prompt, gold)

    def _score(self, row: str, prompt: Prompt, gold: str | None) -> None:
        texts = [GARBAGE] if gold is None else [gold, *self._others(gold), GARBAGE]
        try:
            scores = self._scores(prompt, texts)
        except RewardError as error:
            self.report.errors += 1
            end = f"; it is not called again after {MOST_ERRORS} such rows"
            self.report.failures.append(f"{row}: {error}{end}")
        else:
            self._judge(row, gold, texts, scores)

    def _may_judge(self, prompt: Prompt) -> bool:
        """Whether a row says what is right: it has a column that the reward reads."""
        self.report.skipped = ""
        if self.builtin in UNWRITTEN:
            self.report.skipped = "not judged: no column says what a right answer is"
        elif not self.spec.takes_kwargs and not read_columns(self.spec, prompt.sample.columns):
            self.report.skipped = "not judged: it reads no column, so no answer is right by the row alone"
        return not self.report.skipped

    def _others(self, gold: str) -> list[str]:
        plain = " ".join(gold.split()).casefold()
        others = [text for text in self.pool if " ".join(text.split()).casefold() != plain]
        return [] if self.form else others[-OTHERS:]

    def _scores(self, prompt: Prompt, texts: Sequence[str]) -> Sequence[float | None]:
        # an answer by itself, without the thinking that the chat template may have begun
        bare = dataclasses.replace(prompt, opens_thinking=False)
        completions = [self._completion(text) for text in texts]
        return self.scorer.score([bare] * len(texts), completions, 1).parts[self.spec.name]

    def _completion(self, text: str) -> Completion:
        turns = (Turn("assistant", text, 0),) if self.several_turns else ()
        return Completion(token_ids=(), logprobs=(), text=text, finish_reason="stop", seed=0, turns=turns)

    def _judge(
        self, row: str, right: str | None, texts: Sequence[str], scores: Sequence[float | None]
    ) -> None:
        gold, others, garbage = scores[0], scores[1:-1], scores[-1]
        report = self.report
        report.unapplied += self.judged and all(score is None for score in scores)
        if right is not None and not self.judged:
            report.wrong += [score for score in scores if score is not None]
        if right is None or gold is None or not self.judged:
            return
        report.gold.append(gold)
        report.wrong += [score for score in scores[1:] if score is not None]
        same_as_others = bool(others) and all(not _less(score, gold) for score in others)
        tried: list[tuple[str, float | None]] = [(right, gold)]
        if self.builtin is not None and not math.isclose(gold, 1.0, abs_tol=TOLERANCE):
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
        report.failures.append(f"{row}: {fault} ({report.name}: {shown})")


def number(score: float | None) -> str:
    return "None" if score is None else f"{score:.3g}"


def alone(spec: RewardSpec) -> RewardSpec:
    """The reward as it is checked: not gated by others, and every error raised, whatever a run would do."""
    options = spec.options.model_copy(update={"only_if": (), "on_error": "stop", "on_timeout": "stop"})
    return dataclasses.replace(spec, options=options)


def _less(score: float | None, gold: float) -> bool:
    return score is not None and score < gold - TOLERANCE
