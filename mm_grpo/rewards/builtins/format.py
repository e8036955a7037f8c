"""The reward `format`: the whole completion has the asked form."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from mm_grpo.rewards.registry import reward

TEMPLATE = "<think>...</think> <answer>...</answer>"


@reward("format")
def follows_format(completion: str, *, template: str | None = None, pattern: str | None = None) -> float:
    r"""Whether the whole completion follows a template, or matches a regular expression.

    In a `template` each `...` stands for some text that is not blank, and each space for any white
    space or none. The rest, case included, must be there exactly once, and nothing may precede or
    follow it but white space: a second `<answer>` block scores 0. The default is
    `<think>...</think> <answer>...</answer>`. When the chat template already opens the thinking in the
    prompt, the completion starts after it, and the template is `...</think> <answer>...</answer>`.

    A `pattern` is a Python regular expression that must match the whole completion; its `.` also
    matches newlines. A pattern can be slow on long texts (nested repeats); a template is never.

    Returns 1.0 or 0.0, never None. ValueError when both are given or the template is empty.
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
    form = _parse(TEMPLATE if template is None else template)
    gaps = _gaps(completion.strip(), form.literals)
    return float(gaps is not None and all(form.fills(gap) for gap in gaps))


@dataclass(frozen=True)
class _Form:
    """A template: patterns of the texts between its `...`, and the tags in it."""

    literals: tuple[re.Pattern[str], ...]
    tags: tuple[str, ...]

    def fills(self, gap: str) -> bool:
        """Whether a text may stand in place of a `...`: not blank, and no part of the form again."""
        again = any(tag in gap for tag in self.tags) or any(
            p.pattern and p.search(gap) for p in self.literals
        )
        return bool(gap.strip()) and not again


@lru_cache
def _parse(template: str) -> _Form:
    parts = [part.split() for part in template.split("...")]
    if not any(parts) or not all(parts[1:-1]):
        raise ValueError(
            f"format: the template {template!r} is empty or has two neighbouring '...'; an example is "
            f"{TEMPLATE!r}"
        )
    literals = tuple(re.compile(r"\s*".join(map(re.escape, part))) for part in parts)
    return _Form(literals, tuple(re.findall(r"<[^<>]+>", template)))


def _gaps(text: str, literals: tuple[re.Pattern[str], ...]) -> list[str] | None:
    """What stands in place of each `...`; None when the literals are not all there, in order."""
    if len(literals) == 1:
        return [] if literals[0].fullmatch(text) else None
    first = literals[0].match(text)
    if first is None:
        return None
    gaps, at = [], first.end()
    for literal in literals[1:-1]:
        found = literal.search(text, at)
        if found is None:
            return None
        gaps.append(text[at : found.start()])
        at = found.end()
    last = re.compile(literals[-1].pattern + r"\Z").search(text, at)
    return [*gaps, text[at : last.start()]] if last else None
