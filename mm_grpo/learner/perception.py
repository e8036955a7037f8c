"""The perception term in packs: the masked image is one more prefix of the same completions.

A pack of `algorithm.perception_coef` holds its rows and, after them, each row's groups with images once more with the
masked ones (`with_twins`): the G completions of a group share the masked prompt as they share the other, and a masked
image is encoded once. One forward gives both log-probabilities of a token, so the gradient is that of the term as it
is written (algorithm/perception.py). `optim.max_tokens_per_pack` counts the twins.

A group's mask is drawn from the seed of its first completion: another one at every step, and the same in all its
updates, on any number of processes and in a resumed run. Rows without images have no term.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mm_grpo.algorithm.perception import masked_image
from mm_grpo.data.base import Rows
from mm_grpo.errors import ConfigError
from mm_grpo.learner.loss import PackTokens
from mm_grpo.learner.pack import Item, Pack
from mm_grpo.processors.base import Processor
from mm_grpo.types import Group, Prompt

ROWS = 1000
"""Most rows of the training set in which an image is looked for before the start."""


class MaskedPrompts:
    """The masked prompts of one step, by group. `groups` are this process's; a prompt is made when it is asked for."""

    def __init__(self, groups: Sequence[Group], processor: Processor, ratio: float) -> None:
        self.groups, self.processor, self.ratio = groups, processor, ratio
        self._made: dict[int, Prompt] = {}

    def with_twins(self, rows: Sequence[Sequence[Item]]) -> list[list[Item]]:
        """The rows of a pack, then their groups with images once more after the masked prompts."""
        twins = (
            [replace(item, prompt=self.of(item.group)) for item in row if item.prompt.vision] for row in rows
        )
        return [*map(list, rows), *filter(None, twins)]

    def of(self, number: int) -> Prompt:
        """The masked prompt of a group."""
        if number not in self._made:
            group = self.groups[number]
            seed = group.completions[0].seed
            self._made[number] = masked_prompt(self.processor, group.prompt, self.ratio, seed)
        return self._made[number]


def masked_prompt(processor: Processor, prompt: Prompt, ratio: float, seed: int) -> Prompt:
    """The prompt with all its images masked; they keep their size, so its tokens stay."""
    generator = torch.Generator().manual_seed(seed)
    images = tuple(masked_image(image, ratio, generator) for image in prompt.engine_prompt.images)
    return processor.prompt(replace(prompt.sample, images=images))


def own_tokens(pack: Pack, rows: Sequence[Sequence[Item]]) -> Pack:
    """The pack as far as the tokens [M] of `rows` go, for what is kept by completion."""
    count = sum(len(item.token_ids) for row in rows for item in row)
    return replace(pack, completion_index=pack.completion_index[:count])


def with_masked(tokens: PackTokens, rows: Sequence[Sequence[Item]], masked_logp: Tensor) -> PackTokens:
    """The tokens of `rows` with the log-probs of their twins, which stand in the order of the items with images."""
    pictured = [bool(item.prompt.vision) for row in rows for item in row for _ in item.token_ids]
    return replace(
        tokens, masked_logp=masked_logp, pictured=torch.tensor(pictured, device=masked_logp.device)
    )


def require_images(train: Rows, field: str, *, several_turns: bool, column: str | None = None) -> None:
    """ConfigError where a field of `algorithm` that compares images has no meaning: no row has one, none with images
    has the `column` that it needs, or, but for credit, conversations of several turns."""
    if several_turns and field != "credit":
        raise ConfigError(
            f"algorithm.{field}: must be left out in conversations of several turns (rollout.tools, "
            "rollout.environment), whose tools may show what the other view hides"
        )
    few = min(ROWS, len(train))
    pictured = [row for i in range(few) if (row := train.fields(i * len(train) // few)).images]
    if not pictured:
        raise ConfigError(
            f"algorithm.{field}: none of {few} rows of the training set has an image, and it compares answers with "
            "those to another image; leave it out, or train on rows with images"
        )
    if column is not None and all(row.columns.get(column) is None for row in pictured):
        raise ConfigError(
            f"algorithm.{field}: none of {len(pictured)} rows with images has a {column!r}, which it needs; name "
            f"yours in data.columns: {{{column}: ...}}"
        )
