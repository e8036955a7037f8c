"""Rewards on right and on wrong answers for `mm-grpo check`.

A reward must score a row's right answer (gold_text.py) above the right answers of other rows and above garbage; a
built-in must give it 1. Rewards that read no column have no right answer: they are called and their scores reported.
Rewards that may use a network are called only on request. A reward has to apply to some row, unless it waits for a
gate or has weight 0. In a run of several turns an answer is a conversation of one turn.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mm_grpo.errors import RewardError
from mm_grpo.preflight.gold_text import NO_GOLD, gold_text, read_columns
from mm_grpo.rewards.scorer import Scorer
from mm_grpo.rewards.spec import RewardSpec
from mm_grpo.run.overlays import builtin_name
from mm_grpo.types import Completion, Prompt, Turn

CHUNK = 64  # rows among which right answers are exchanged
OTHER_ANSWERS = 3
"""Right answers of other rows that a row's reward is tried on. One of them may mean the same ("1/2", "0.5")."""
GARBAGE = "?!"
MAX_ERRORS = 3
"""A reward that has raised on so many rows is not called again: each call may have waited for its deadline."""
TOLERANCE = 1e-6

JUDGES = ("judge", "reward_model")  # built-ins that may use a network
FORMS = ("format",)
"""Built-ins that read no column, but must give full score to an answer in the form of `data.gold_template`."""


@dataclass
class RewardReport:
    """Scores and faults of one reward on the rows of a set."""

    name: str
    weight: float
    skipped: str = ""  # why the reward was not judged, or not called
    gold: list[float] = field(default_factory=list)  # scores of right answers
    wrong: list[float] = field(default_factory=list)  # scores of wrong answers
    rows: int = 0
    unapplied: int = 0
    """Rows to which it does not apply: a needed column is null, `when` excludes the row, or every score is None."""
    may_be_idle: bool = False  # it need not apply to any row
    errors: int = 0
    failures: list[str] = field(default_factory=list)  # messages about rows that it raises on or misjudges

    @property
    def applies_nowhere(self) -> bool:
        """True if it applies to no row, but should."""
        return 0 < self.rows == self.unapplied and not self.may_be_idle


class RewardCheck:
    """Scorer of right and wrong answers. Call `add` for each row and `finish` at the end.

    `specs` are resolved rewards, `template` is `data.gold_template`, `conversational` as in `Scorer`.
    `several_turns` if the run has tools or an environment, so that rewards may read `turns` or be `per_turn`.
    `call_judges` allows rewards that may use a network.
    """

    def __init__(self, specs: Sequence[RewardSpec], **options: Any) -> None:
        self.specs = specs
        self._checks = [_Check(spec, **options) for spec in specs]
        self._rows: list[tuple[str, Prompt]] = []

    def preview(self, prompt: Prompt) -> list[tuple[str | None, str]]:
        """Return each reward's right answer for a row, without the template, and its score in words; reports stay."""
        return [check.preview(prompt) for check in self._checks]

    def add(self, row: str, prompt: Prompt) -> None:
        """Add a row; `row` is its name in messages."""
        self._rows.append((row.rsplit("/", 1)[-1], prompt))
        if len(self._rows) >= CHUNK:
            self._flush()

    def finish(self) -> list[RewardReport]:
        """Score the remaining rows, stop all workers, and return a report for each reward."""
        self._flush()
        for check in self._checks:
            check.scorer.close()
        return [check.report for check in self._checks]

    def _flush(self) -> None:
        for check in self._checks:
            check.score(self._rows)
        self._rows = []


class _Check:
    """Check of one reward, with its report so far."""

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
        self.is_form = self.builtin in FORMS and template is not None
        self.is_judged = self.is_form  # or once a row says what is right
        self.pool: list[str] = []
        if not self.may_call:
            self.report.skipped = "not called: it may use a network (--call-judges calls it)"

    def preview(self, prompt: Prompt) -> tuple[str | None, str]:
        if not self.may_call:
            return None, self.report.skipped
        answer = gold_text(self.spec, prompt, self.template, always=self.is_form)
        gold = answer if self.is_form else gold_text(self.spec, prompt)
        try:
            score = None if answer is None else self._scores(prompt, [answer])[0]
        except RewardError as error:
            return gold, f"raises: {error}"
        return gold, "" if answer is None else f"scores {number(score)}"

    def score(self, rows: Sequence[tuple[str, Prompt]]) -> None:
        if not self.may_call:
            return
        golds = []
        for row, prompt in rows:
            self.is_judged = self.is_judged or self._may_judge(prompt)
            always = not self.is_judged or self.is_form
            if self.spec.applies_to(prompt.sample.columns):
                golds.append((row, prompt, gold_text(self.spec, prompt, self.template, always=always)))
        self.report.rows += len(rows)
        self.report.unapplied += len(rows) - len(golds)
        self.pool = list(dict.fromkeys(gold for _, _, gold in golds if gold is not None))
        for row, prompt, gold in golds:
            if self.report.errors < MAX_ERRORS:
                self._score(row, prompt, gold)

    def _score(self, row: str, prompt: Prompt, gold: str | None) -> None:
        texts = [GARBAGE] if gold is None else [gold, *self._others(gold), GARBAGE]
        try:
            scores = self._scores(prompt, texts)
        except RewardError as error:
            self.report.errors += 1
            limit = f"it is not called again after {MAX_ERRORS} such rows"
            self.report.failures.append(f"{row}: {error}; {limit}")
        else:
            self._judge(row, gold, texts, scores)

    def _may_judge(self, prompt: Prompt) -> bool:
        """Return True if a row says what is right: it has a column that the reward reads."""
        self.report.skipped = ""
        if self.builtin in NO_GOLD:
            self.report.skipped = "not judged: no column says what a right answer is"
        elif not self.spec.takes_kwargs and not read_columns(self.spec, prompt.sample.other_columns):
            self.report.skipped = "not judged: it reads no column, so no answer is right by the row alone"
        return not self.report.skipped

    def _others(self, gold: str) -> list[str]:
        plain = " ".join(gold.split()).casefold()
        other_golds = [text for text in self.pool if " ".join(text.split()).casefold() != plain]
        return [] if self.is_form else other_golds[-OTHER_ANSWERS:]

    def _scores(self, prompt: Prompt, texts: Sequence[str]) -> Sequence[float | None]:
        # the text is a whole answer, even if the chat template opens a block of thinking
        prompt = dataclasses.replace(prompt, opens_thinking=False)
        turns = [(Turn("assistant", text, 0),) if self.several_turns else () for text in texts]
        pairs = zip(texts, turns, strict=True)
        completions = [Completion((), (), text, "stop", 0, turns=t) for text, t in pairs]
        return self.scorer.score([prompt] * len(texts), completions, 1).parts[self.spec.name]

    def _judge(
        self, row: str, right: str | None, texts: Sequence[str], scores: Sequence[float | None]
    ) -> None:
        gold, other_scores, garbage = scores[0], scores[1:-1], scores[-1]
        report = self.report
        report.unapplied += self.is_judged and all(score is None for score in scores)
        if right is not None and not self.is_judged:
            report.wrong += [score for score in scores if score is not None]
        if right is None or gold is None or not self.is_judged:
            return
        report.gold.append(gold)
        report.wrong += [score for score in scores[1:] if score is not None]
        same_as_others = bool(other_scores) and all(not _less(score, gold) for score in other_scores)
        evidence: list[tuple[str, float | None]] = [(right, gold)]
        if self.builtin is not None and not math.isclose(gold, 1.0, abs_tol=TOLERANCE):
            fault = "the right answer is not scored 1"
        elif not _less(garbage, gold):
            fault = "garbage scores no less"
            evidence.append((texts[-1], garbage))
        elif same_as_others:
            fault = "the right answers of other rows score no less"
            evidence.append((texts[1], scores[1]))
        else:
            return
        examples = ", ".join(f"{text[:40]!r} scores {number(score)}" for text, score in evidence)
        report.failures.append(f"{row}: {fault} ({report.name}: {examples})")


def number(score: float | None) -> str:
    return "None" if score is None else f"{score:.3g}"


def alone(spec: RewardSpec) -> RewardSpec:
    """Return the reward without its gates, and with every error raised."""
    options = spec.options.model_copy(update={"only_if": (), "on_error": "stop", "on_timeout": "stop"})
    return dataclasses.replace(spec, options=options)


def _less(score: float | None, gold: float) -> bool:
    return score is not None and score < gold - TOLERANCE
