"""Packs: groups laid out as shared-prefix rows, and the plan that fills them.

A row is one prompt followed by completions of its group:

    [ prompt | completion 1 | completion 2 | ... | padding ]

Every completion attends to the prompt and itself, never to another completion, and starts at the position that
follows the prompt's largest one (M-RoPE positions of an image do not grow token by token). So the
prompt is run once and each image encoded once, whatever G is, and the result is that of running
prompt + completion G times. Where a model cannot do that exactly, a row is one prompt and one completion (`unshared`),
whose masks the model makes itself. The first token of each completion is predicted by the prompt's last state.

In a conversation of several turns a completion holds the observations too, with their images and positions; they are
run, and only what was sampled is a target.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mm_grpo.errors import ConfigError, GuardStop
from mm_grpo.types import Pictured, Prompt, Tail

PADDING = -1
PROMPT = 0


@dataclass(frozen=True)
class Item:
    """One completion to be run: its prompt, the tokens that were sampled, and `index`, its place in the step.

    `tail` is that of a conversation of several turns, with its observations. `counts` is False for a completion that
    the config masks: it keeps its place but no token of weight.
    """

    index: int
    group: int
    prompt: Prompt
    token_ids: tuple[int, ...]
    counts: bool = True
    tail: Tail | None = None

    @property
    def run_length(self) -> int:
        return len(self.token_ids) if self.tail is None else len(self.tail.token_ids)


@dataclass(frozen=True)
class Pack:
    """One forward and backward: B rows of N tokens, of which M were sampled.

    `input_ids` [B, N]; `position_ids` [*A, B, N], with the axes A of `Prompt.position_ids`; `segments` [B, N], where
    0 is the prompt, k > 0 the row's k-th completion and -1 padding. `sources` [M] index the flattened rows at the
    states that predict `targets` [M]; `completion_index` [M] names the completion (its `Item.index`) of each token.
    `pictured` are the prompts and the observations that have images, in the order of their tokens.
    """

    input_ids: Tensor
    position_ids: Tensor
    segments: Tensor
    sources: Tensor
    targets: Tensor
    completion_index: Tensor
    pictured: tuple[Pictured, ...]

    def to(self, device: torch.device | str) -> Pack:
        moved: dict[str, Any] = {k: v.to(device) for k, v in self.__dict__.items() if isinstance(v, Tensor)}
        return replace(self, **moved)


def attention_mask(
    segments: Tensor,
    image_blocks: Tensor | None = None,
    positions: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention mask [B, 1, N, N], True where the query (third axis) may attend to the key (fourth).

    With `image_blocks` [B, N] the tokens of one image, which have one number >= 0, attend to each other. With
    `positions` [B, N] and a `window` a query attends to keys less than `window` positions before it.
    """
    n = segments.shape[1]
    query, key = segments[:, :, None], segments[:, None, :]
    seen = torch.ones(n, n, dtype=torch.bool, device=segments.device).tril()[None]
    if image_blocks is not None:
        seen = seen | (
            (image_blocks[:, :, None] == image_blocks[:, None, :]) & (image_blocks >= 0)[:, None, :]
        )
    if window is not None and positions is not None:
        seen = seen & ((positions - window)[:, :, None] < positions[:, None, :])
    allowed = seen & (key != PADDING) & ((key == PROMPT) | (key == query))
    # padding attends to itself, for a softmax over nothing is NaN
    allowed |= torch.eye(n, dtype=torch.bool, device=segments.device)
    return allowed[:, None]


def plan(
    items: Sequence[Item], max_tokens: int, multiple: int = 1, *, shared: bool = True
) -> list[list[list[Item]]]:
    """Packs of rows of items, each pack of several rows at most `max_tokens` once padded to a multiple.

    Items of a group share a row while they fit, or have one each where they are not `shared`. A pack takes rows of
    similar length, so padding is small. Raises ConfigError when one prompt with one completion is larger than a pack.
    """
    groups = _by_group(items) if shared else ([item] for item in items)
    rows = [row for group in groups for row in _split(group, max_tokens)]
    rows.sort(key=_length, reverse=True)  # stable, so the plan is a function of the items alone
    packs: list[list[list[Item]]] = []
    for row in rows:
        if packs and (len(packs[-1]) + 1) * _rounded(_length(packs[-1][0]), multiple) <= max_tokens:
            packs[-1].append(row)
        else:
            packs.append([row])
    return packs


def layout(rows: Sequence[Sequence[Item]], media_token_ids: frozenset[int], multiple: int = 1) -> Pack:
    """Lay out the rows of one pack, its width rounded up to a multiple.

    Raises GuardStop when a completion holds a media token.
    """
    width = _rounded(max(_length(row) for row in rows), multiple)
    input_ids = torch.zeros(len(rows), width, dtype=torch.long)
    segments = torch.full((len(rows), width), PADDING, dtype=torch.long)
    axes = rows[0][0].prompt.position_ids.shape[:-1]
    positions = torch.zeros(*axes, len(rows), width, dtype=torch.long)
    sources: list[Tensor] = []
    targets: list[int] = []
    completion_index: list[int] = []
    for b, row in enumerate(rows):
        prompt = row[0].prompt
        length = len(prompt.token_ids)
        input_ids[b, :length] = torch.tensor(prompt.token_ids)
        segments[b, :length] = PROMPT
        positions[..., b, :length] = prompt.position_ids
        first = prompt.next_position
        at = length
        for k, item in enumerate(row, start=1):
            _refuse_media(item, media_token_ids)
            count, tail = item.run_length, item.tail
            input_ids[b, at : at + count] = torch.tensor(item.token_ids if tail is None else tail.token_ids)
            segments[b, at : at + count] = k
            following = torch.arange(first, first + count) if tail is None else tail.position_ids
            positions[..., b, at : at + count] = following
            source = torch.arange(at - 1, at + count - 1)
            source[0] = length - 1
            sources.append((source if tail is None else source[torch.tensor(tail.sampled)]) + b * width)
            targets += item.token_ids
            completion_index += [item.index] * len(item.token_ids)
            at += count
    return Pack(
        input_ids=input_ids,
        position_ids=positions,
        segments=segments,
        sources=torch.cat(sources),
        targets=torch.tensor(targets),
        completion_index=torch.tensor(completion_index),
        pictured=tuple(one for row in rows for one in pictured_of(row)),
    )


def dummy_pack(token: int, position_axes: tuple[int, ...]) -> Pack:
    """The smallest pack, of two text tokens: what a process runs while others have packs and it has none."""
    return Pack(
        input_ids=torch.full((1, 2), token),
        position_ids=torch.arange(2).expand(*position_axes, 1, 2),
        segments=torch.tensor([[PROMPT, 1]]),
        sources=torch.tensor([0]),
        targets=torch.tensor([token]),
        completion_index=torch.tensor([0]),
        pictured=(),
    )


def pictured_of(row: Sequence[Item]) -> Iterator[Pictured]:
    """What has images in a row of one group, in the order of its tokens."""
    if row[0].prompt.vision:
        yield row[0].prompt
    for item in row:
        if item.tail is not None:
            yield from item.tail.pictures


def _length(row: Sequence[Item]) -> int:
    return len(row[0].prompt.token_ids) + sum(item.run_length for item in row)


def _rounded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _by_group(items: Sequence[Item]) -> Iterator[list[Item]]:
    groups: dict[int, list[Item]] = {}
    for item in items:
        groups.setdefault(item.group, []).append(item)
    yield from groups.values()


def _split(group: list[Item], max_tokens: int) -> Iterator[list[Item]]:
    """Rows of one group, as many completions in each as fit beside the prompt."""
    row: list[Item] = []
    for item in group:
        if _length([item]) > max_tokens:
            raise ConfigError(
                f"optim.max_tokens_per_pack = {max_tokens} is smaller than one prompt with one completion: "
                f"{item.prompt.uid} has {len(item.prompt.token_ids)} + {item.run_length} tokens; "
                "raise it, or lower data.max_pixels, data.max_prompt_length or rollout.max_completion_length"
            )
        if row and _length([*row, item]) > max_tokens:
            yield row
            row = []
        row.append(item)
    yield row


def _refuse_media(item: Item, media_token_ids: frozenset[int]) -> None:
    for place, token in enumerate(item.token_ids):
        if token in media_token_ids:
            raise GuardStop(
                f"{item.prompt.uid}: the completion holds media token {token} at place {place}; it stands for an "
                "image that is not there, so no model can be trained on it. Engines must mask "
                f"{sorted(media_token_ids)} at sampling: check the engine or the source of this completion"
            )
