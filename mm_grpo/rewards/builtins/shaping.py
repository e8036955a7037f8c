"""Rewards for the shape of a completion, whatever it answers: its form, length and repetition."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Literal

from mm_grpo.rewards.builtins.answers import check_choice
from mm_grpo.rewards.options import ISOLATED_TIMEOUT
from mm_grpo.rewards.registry import reward

TEMPLATE = "<think>...</think> <answer>...</answer>"


@reward("format", timeout=ISOLATED_TIMEOUT)
def follows_format(completion: str, *, template: str | None = None, pattern: str | None = None) -> float:
    r"""1 when the whole completion follows a template, or matches a regular expression.

    In a `template` each `...` stands for some text that is not blank, and each space for any white
    space or none. The rest, case included, must be there exactly once, and nothing may precede or
    follow it but white space: a second `<answer>` block scores 0. The default is
    `<think>...</think> <answer>...</answer>`. When the chat template already opens the thinking in the
    prompt, the completion starts after it, and the template is `...</think> <answer>...</answer>`.

    A `pattern` is a Python regular expression that must match the whole completion; its `.` also
    matches newlines. A pattern can be slow on long texts (nested repeats), and ends the run
    after `timeout`, 120 s for a step; a template is always fast.

    Returns 1.0 or 0.0, never None. ValueError when both are given, or a template without `...`.
    For recipes that ask for a reasoning block before the answer.

    >>> follows_format("<think>2 + 1</think>\n<answer>3</answer>")
    1.0
    >>> follows_format("<think></think> <answer>3</answer>")
    0.0
    >>> follows_format("Answer: 3", pattern=r"Answer: \d+")
    1.0
    """
    if pattern is not None:
        if template is not None:
            raise ValueError("format takes a template or a pattern, not both")
        return float(re.fullmatch(pattern, completion, re.DOTALL) is not None)
    literals, parts_of_form = _parse(TEMPLATE if template is None else template)
    gaps = _gaps(completion.strip(), literals)
    if gaps is None:
        return 0.0
    return float(all(gap.strip() and not any(p.search(gap) for p in parts_of_form) for gap in gaps))


@lru_cache
def _parse(template: str) -> tuple[list[re.Pattern[str]], list[re.Pattern[str]]]:
    """Return the texts between the `...` of a template as patterns, and patterns that no `...` may contain: the same
    texts and their tags. Raise ValueError if the template has no `...`, nothing else, or two in a row."""
    parts = [part.split() for part in template.split("...")]
    if len(parts) == 1 or not any(parts) or not all(parts[1:-1]):
        raise ValueError(
            f"format: the template {template!r} has no '...', which stands for the model's text, nothing else, or two "
            f"in a row; an example is {TEMPLATE!r}. A regular expression is a pattern"
        )
    literals = [re.compile(r"\s*".join(map(re.escape, part))) for part in parts]
    tags = [re.compile(re.escape(tag)) for tag in re.findall(r"<[^<>]+>", template)]
    return literals, [*(literal for literal in literals if literal.pattern), *tags]


def _gaps(text: str, literals: Sequence[re.Pattern[str]]) -> list[str] | None:
    """Return the text that each `...` matched; None unless all literals are there, in order."""
    first = literals[0].match(text)
    if first is None:
        return None
    gaps, at = [], first.end()
    for literal in literals[1:-1]:
        match = literal.search(text, at)
        if match is None:
            return None
        gaps.append(text[at : match.start()])
        at = match.end()
    last = re.compile(literals[-1].pattern + r"\Z").search(text, at)
    return [*gaps, text[at : last.start()]] if last else None


@reward("length")
def length(
    completion: str,
    completion_ids: Sequence[int] = (),
    *,
    min_length: int = 0,
    max_length: int | None = None,
    unit: Literal["characters", "tokens"] = "characters",
) -> float:
    """1 when the length is in [min_length, max_length], falling linearly to 0 outside.

    `unit` is "characters" (Unicode code points of the text as it is) or "tokens" (all sampled tokens,
    the end token too). The score reaches 0 as far past a bound as the bound is from 0: with max_length=200, 300 units
    score 0.5 and 400 score 0; with min_length=10, 5 units score 0.5 and an empty text scores 0. `max_length=None` sets
    no upper bound.

    Returns a score in [0, 1], never None. ValueError when no bound is set, when they are not
    0 <= min_length <= max_length, or `unit` is another word.
    For any recipe, together with a reward for the answer.

    >>> length("abc", max_length=4), length("abcdef", max_length=4), length("abcdefgh", max_length=4)
    (1.0, 0.5, 0.0)
    """
    if min_length < 0 or (max_length is not None and max_length < min_length):
        raise ValueError(
            f"min_length={min_length}, max_length={max_length}; legal: 0 <= min_length <= max_length"
        )
    if min_length == 0 and max_length is None:
        raise ValueError("length has no bound; set min_length, max_length or both")
    check_choice("unit", unit, "characters", "tokens")
    size = len(completion) if unit == "characters" else len(completion_ids)
    if size < min_length:
        return max(0.0, 1.0 - (min_length - size) / min_length)
    if max_length is not None and size > max_length:
        return max(0.0, 1.0 - (size - max_length) / (max_length or 1))
    return 1.0


@reward("soft_overlong")
def soft_overlong(completion: str, completion_ids: Sequence[int], *, max_length: int, buffer: int) -> float:
    """0 up to max_length - buffer tokens, then falling linearly to -1 at max_length, and -1 beyond.

    Equation 13 of Yu et al., "DAPO" (2025), whose numbers are max_length=20480 and buffer=4096: a
    completion learns that it runs long before it is cut. `max_length` is best
    rollout.max_completion_length; both are in tokens, counting all sampled ones, the end token too.

    Returns a score in [-1, 0], never None. ValueError unless 0 < buffer <= max_length. For recipes with
    long reasoning, together with a reward for the answer.

    >>> [soft_overlong("", range(n), max_length=100, buffer=20) for n in (80, 90, 100, 200)]
    [0.0, -0.5, -1.0, -1.0]
    """
    if not 0 < buffer <= max_length:
        raise ValueError(
            f"buffer={buffer}, max_length={max_length}; legal: 0 < buffer <= max_length (tokens)"
        )
    past = len(completion_ids) - (max_length - buffer)
    return -min(1.0, past / buffer) if past > 0 else 0.0


@reward("repetition_penalty")
def repetition_penalty(
    completion: str,
    completion_ids: Sequence[int] = (),
    *,
    ngram: int = 3,
    max_penalty: float = -1.0,
    unit: Literal["words", "tokens", "characters"] = "words",
) -> float:
    """max_penalty times the share of n-grams that occurred before.

    It is max_penalty · (1 - different n-grams / all n-grams), as in Yeo et al., "Demystifying Long Chain-of-Thought
    Reasoning" (2025). `unit` says what an n-gram is made of: "words" (split at white space, case aside), "tokens"
    (the sampled ids), or "characters" for scripts without spaces.

    Returns a score in [max_penalty, 0], never None; 0.0 when there are fewer than `ngram` units.
    ValueError when ngram is below 1, max_penalty above 0 or `unit` another word. For recipes with long
    reasoning, because loops appear there first.

    >>> repetition_penalty("a b c a b c"), repetition_penalty("no loop here at all")
    (-0.25, 0.0)
    """
    if ngram < 1 or max_penalty > 0:
        raise ValueError(f"ngram={ngram}, max_penalty={max_penalty}; legal: ngram >= 1, max_penalty <= 0")
    check_choice("unit", unit, "words", "tokens", "characters")
    units: Sequence[Hashable] = completion_ids
    if unit != "tokens":
        units = completion.casefold().split() if unit == "words" else "".join(completion.split())
    total = len(units) - ngram + 1
    if total <= 0:
        return 0.0
    different = len({tuple(units[i : i + ngram]) for i in range(total)})
    return max_penalty * (1 - different / total) if different < total else 0.0
