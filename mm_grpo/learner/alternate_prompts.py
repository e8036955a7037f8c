"""Prompts that stand in for the prompts of a step's groups: the same rows with other images and videos.

The G completions of a group share the alternate prompt as they share their own, and its media are encoded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from mm_grpo.data.base import Rows
from mm_grpo.errors import ConfigError
from mm_grpo.learner.pack import Item
from mm_grpo.types import Group, Prompt, Tail

ROWS = 1000
"""Most rows of the training set in which `require_images` looks for an image or a video."""


class AlternatePrompts:
    """Alternate prompts of `groups`, by the group's place, each made once by `make` when it is first asked for.

    A group has none if `make` returns None, or if its prompt and longest completion are longer than `max_tokens`.
    """

    def __init__(
        self, groups: Sequence[Group], make: Callable[[Group], Prompt | None], max_tokens: float = math.inf
    ) -> None:
        self.groups, self.make, self.max_tokens = groups, make, max_tokens
        self._prompts: dict[int, Prompt | None] = {}

    def of(self, number: int) -> Prompt | None:
        """Return the alternate prompt of a group, or None."""
        if number not in self._prompts:
            group, prompt = self.groups[number], self.make(self.groups[number])
            self._prompts[number] = prompt if prompt and fits(prompt, group, self.max_tokens) else None
        return self._prompts[number]

    def items(self, items: Iterable[Item]) -> list[Item]:
        """Return the items after their alternate prompts; items without one are left out."""
        pairs = ((item, self.of(item.group)) for item in items)
        return [
            replace(item, prompt=prompt, tail=moved_tail(item.tail, item.prompt, prompt))
            for item, prompt in pairs
            if prompt is not None
        ]


def fits(prompt: Prompt, group: Group, max_tokens: float) -> bool:
    """Return True if the prompt and the group's longest completion have at most `max_tokens` together."""
    return len(prompt.token_ids) + max(c.run_length for c in group.completions) <= max_tokens


def moved_tail(tail: Tail | None, old: Prompt, new: Prompt) -> Tail | None:
    """Return the tail of a conversation after another prompt: its positions continue at that prompt's end."""
    shift = new.next_position - old.next_position
    return None if tail is None else replace(tail, position_ids=tail.position_ids + shift)


def require_images(
    train: Rows, field: str, *, several_turns: bool = False, videos: bool = True, column: str | None = None
) -> None:
    """Raise ConfigError if the rows do not have what a field of `algorithm` that compares images needs.

    At least one row needs an image, or a video if `videos`, and one of these rows the `column`. Conversations of
    `several_turns` are refused.
    """
    if several_turns:
        raise ConfigError(
            f"algorithm.{field}: must be left out in conversations of several turns (rollout.tools, "
            "rollout.environment), whose tools may show what the other view hides"
        )
    rows = [train.fields(index) for index in train.spaced(ROWS)]
    pictured = [row for row in rows if row.images or (videos and row.videos)]
    if not pictured:
        raise ConfigError(
            f"algorithm.{field}: none of {len(rows)} rows of the training set has an image{' or a video' * videos}, "
            "and it compares answers with those to another one; leave it out, or train on rows with images"
        )
    if column is not None and all(row.columns.get(column) is None for row in pictured):
        raise ConfigError(
            f"algorithm.{field}: none of {len(pictured)} rows with images has a {column!r}, which it needs; name "
            f"yours in data.columns: {{{column}: ...}}"
        )
