"""Packs: groups laid out as shared-prefix rows, and the plan that fills them.

A row is groups behind one another, each a prompt followed by completions:

    [ prompt | completion 1 | completion 2 | ... | next prompt | completion 1 | ... | padding ]

Every completion attends to its prompt and itself, never to another completion or group, and starts at the position that
follows the prompt's largest one (M-RoPE positions of an image do not grow token by token). So the
prompt is run once and each image encoded once, whatever G is, and the result is that of running
prompt + completion G times. Where a model cannot do that exactly, a row is one prompt and one completion (`unshared`),
whose masks the model makes itself. The first token of each completion is predicted by the prompt's last state.

In a conversation of several turns a completion holds the observations too, with their images and positions; they are
run, and only what was sampled is a target.

A group that does not fit one pack is spread over several. Where the model's layers can go on from a prompt's states
(prompt_states.py), its packs hold completions alone, and `Pack.prefixes` names the prompts that are run apart, once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mm_grpo.errors import ConfigError, GuardStop
from mm_grpo.types import Pictured, Prompt, Tail

PADDING = -1
GROUP = 1 << 20
"""From one group of a row to the next, in `Pack.segments`."""


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
    n GROUP is the prompt of the row's group n = 0, 1, ..., n GROUP + k its k-th completion, k > 0, and -1 padding; they
    never decrease up to the padding. `sources` [M] index the flattened rows at the
    states that predict `targets` [M]; `completion_index` [M] names the completion (its `Item.index`) of each token.
    `pictured` are the prompts and the observations that have images, in the order of their tokens.

    `prefixes` are the prompts of each row that are not in it but run apart, none where it is empty; `prefix_segments`
    [B, K] are the segments of their tokens, which come before those of the row. The last state of the i-th of them all
    is at place B N + i of `sources`.
    """

    input_ids: Tensor
    position_ids: Tensor
    segments: Tensor
    sources: Tensor
    targets: Tensor
    completion_index: Tensor
    pictured: tuple[Pictured, ...]
    prefixes: tuple[tuple[Prompt, ...], ...] = ()
    prefix_segments: Tensor | None = None

    @property
    def whole_segments(self) -> Tensor:
        """Segments [B, K + N] of the row with what comes before it."""
        if self.prefix_segments is None:
            return self.segments
        return torch.cat([self.prefix_segments, self.segments], 1)

    def to(self, device: torch.device | str) -> Pack:
        moved: dict[str, Any] = {k: v.to(device) for k, v in self.__dict__.items() if isinstance(v, Tensor)}
        return replace(self, **moved)


def attention_mask(segments: Tensor, image_blocks: Tensor | None = None, window: int | None = None) -> Tensor:
    """Attention mask [B, 1, N, N], True where the query (third axis) may attend to the key (fourth).

    With `image_blocks` [B, N] the tokens of one image, which have one number >= 0, attend to each other. With a
    `window` a query attends to keys that are less than `window` tokens before it in its prompt + completion.
    """
    n = segments.shape[1]
    query, key = segments[:, :, None], segments[:, None, :]
    seen = torch.ones(n, n, dtype=torch.bool, device=segments.device).tril()[None]
    if image_blocks is not None:
        seen = seen | (
            (image_blocks[:, :, None] == image_blocks[:, None, :]) & (image_blocks >= 0)[:, None, :]
        )
    if window is not None:
        place = _places(segments)
        seen = seen & ((place - window)[:, :, None] < place[:, None, :])
    allowed = seen & (key != PADDING) & ((key == prompt_of(query)) | (key == query))
    # padding attends to itself, for a softmax over nothing is NaN
    allowed |= torch.eye(n, dtype=torch.bool, device=segments.device)
    return allowed[:, None]


def prompt_of(segments: Tensor) -> Tensor:
    """The segment of each token's prompt; no token has that of padding."""
    return segments - segments % GROUP


def _places(segments: Tensor) -> Tensor:
    """Of each token [B, N] its place in prompt + completion, from 0."""
    column = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    starts = torch.nn.functional.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True)
    within = column - torch.where(starts, column, 0).cummax(1).values
    prompts = prompt_of(segments)
    return within + (segments != prompts) * (segments[:, None] == prompts[:, :, None]).sum(2)


def plan(
    items: Sequence[Item],
    max_tokens: int,
    multiple: int = 1,
    *,
    shared: bool = True,
    copies: int = 1,
    one_row: bool = True,
    apart: bool = False,
) -> list[list[list[Item]]]:
    """Packs of rows of items, each pack of several groups at most `max_tokens` once its rows are padded to a multiple,
    with `copies` of each row.

    Items of a group, which come one after the other, stay together while they fit, and stand alone where they are not
    `shared`. Groups are placed from the longest to the shortest, each in the first row that has room, else in a new one
    of the first pack that has (first-fit decreasing). A pack is `one_row` where attention costs what is seen and not
    what is masked, else it has rows as wide as its first group. Where prompts can be run `apart` from their
    completions, each part of a group that is larger than a pack begins one, one after the other, so that no two of
    these groups are open at a time. Raises ConfigError when one prompt with one completion is larger than a pack.
    """
    groups = by_group(items) if shared else [[item] for item in items]
    split = [list(_split(group, max_tokens, copies)) for group in groups]
    first = [part for parts in split for part in parts if apart and len(parts) > 1]
    rest = [part for parts in split for part in parts if not apart or len(parts) == 1]
    rest.sort(key=_length, reverse=True)  # stable, so the plan is a function of the items alone
    packs: list[_Filling] = []
    for number, part in enumerate([*first, *rest]):
        if number >= len(first) and any(pack.takes(part) for pack in packs):
            continue
        own, most = _rounded(_length(part), multiple), max_tokens // copies
        if shared and one_row:
            packs.append(_Filling(max(own, most - most % multiple), 1, shared))
        else:
            packs.append(_Filling(own, max(1, most // own), shared))
        packs[-1].takes(part)
    return [pack.rows for pack in packs]


class _Filling:
    """A pack that is being filled: up to `most` rows of `width` tokens."""

    def __init__(self, width: int, most: int, several: bool) -> None:
        self.width, self.most, self.several = width, most, several
        self.rows: list[list[Item]] = []
        self._left: list[int] = []

    def takes(self, part: list[Item]) -> bool:
        """Put a group, or a part of one, in the first row that has room, where there is one."""
        length = _length(part)
        places = [i for i, left in enumerate(self._left) if length <= left] if self.several else []
        if places:
            self.rows[places[0]] += part
            self._left[places[0]] -= length
        elif len(self.rows) < self.most:
            self.rows.append(list(part))
            self._left.append(self.width - length)
        else:
            return False
        return True


def layout(
    rows: Sequence[Sequence[Item]],
    media_token_ids: frozenset[int],
    multiple: int = 1,
    apart: Collection[int] = (),
) -> Pack:
    """Lay out the rows of one pack, its width rounded up to a multiple. GuardStop when a completion has a media token.

    `apart` are the ids (Python's) of prompts that are run apart, whose tokens are left out.
    """
    width = _rounded(max(_length(row, apart) for row in rows), multiple)
    input_ids = torch.zeros(len(rows), width, dtype=torch.long)
    segments = torch.full((len(rows), width), PADDING, dtype=torch.long)
    axes = rows[0][0].prompt.position_ids.shape[:-1]
    positions = torch.zeros(*axes, len(rows), width, dtype=torch.long)
    sources: list[Tensor] = []
    targets: list[int] = []
    completion_index: list[int] = []
    prefixes: list[list[tuple[int, Prompt]]] = [[] for _ in rows]
    for b, row in enumerate(rows):
        at = 0
        for number, group in enumerate(by_group(row)):
            prompt = group[0].prompt
            if id(prompt) in apart:
                last = (len(rows) - b) * width + sum(map(len, prefixes))
                prefixes[b].append((number, prompt))
            else:
                start, at = at, at + len(prompt.token_ids)
                input_ids[b, start:at] = torch.tensor(prompt.token_ids)
                segments[b, start:at] = number * GROUP
                positions[..., b, start:at] = prompt.position_ids
                last = at - 1
            first = prompt.next_position
            for k, item in enumerate(group, start=1):
                _refuse_media(item, media_token_ids)
                count, tail = item.run_length, item.tail
                input_ids[b, at : at + count] = torch.tensor(
                    item.token_ids if tail is None else tail.token_ids
                )
                segments[b, at : at + count] = number * GROUP + k
                following = torch.arange(first, first + count) if tail is None else tail.position_ids
                positions[..., b, at : at + count] = following
                source = torch.arange(at - 1, at + count - 1)
                source[0] = last
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
        pictured=tuple(one for row in rows for one in pictured_of(row, apart)),
        prefixes=tuple(tuple(p for _, p in own) for own in prefixes) if any(prefixes) else (),
        prefix_segments=_prefix_segments(prefixes, multiple) if any(prefixes) else None,
    )


def _prefix_segments(prefixes: Sequence[Sequence[tuple[int, Prompt]]], multiple: int) -> Tensor:
    """Segments [B, K] of the prompts of each row, given with the number of their group there."""
    rows = [[n * GROUP for n, prompt in row for _ in prompt.token_ids] for row in prefixes]
    width = _rounded(max(map(len, rows)), multiple)
    return torch.tensor([row + [PADDING] * (width - len(row)) for row in rows])


def prompt_pack(prompt: Prompt, multiple: int = 1) -> Pack:
    """A prompt alone, without targets; its last state is the one that `sources` names."""
    length = len(prompt.token_ids)
    behind = _rounded(length, multiple) - length
    return Pack(
        input_ids=pad(torch.tensor(prompt.token_ids), (0, behind))[None],
        position_ids=pad(prompt.position_ids, (0, behind))[..., None, :],
        segments=pad(torch.zeros(length, dtype=torch.long), (0, behind), value=PADDING)[None],
        sources=torch.tensor([length - 1]),
        targets=torch.zeros(0, dtype=torch.long),
        completion_index=torch.zeros(0, dtype=torch.long),
        pictured=(prompt,) if prompt.vision else (),
    )


def dummy_pack(token: int, position_axes: tuple[int, ...]) -> Pack:
    """The smallest pack, of two text tokens: what a process runs while others have packs and it has none."""
    return Pack(
        input_ids=torch.full((1, 2), token),
        position_ids=torch.arange(2).expand(*position_axes, 1, 2),
        segments=torch.tensor([[0, 1]]),
        sources=torch.tensor([0]),
        targets=torch.tensor([token]),
        completion_index=torch.tensor([0]),
        pictured=(),
    )


def pictured_of(row: Sequence[Item], apart: Collection[int] = ()) -> Iterator[Pictured]:
    """List what has images in a row, in the order of its tokens, but for prompts that are run `apart`."""
    for group in by_group(row):
        if group[0].prompt.vision and id(group[0].prompt) not in apart:
            yield group[0].prompt
        for item in group:
            if item.tail is not None:
                yield from item.tail.pictures


def spread_prompts(planned: Sequence[Sequence[Sequence[Item]]]) -> list[Prompt]:
    """The prompts of groups in several places of a plan. Two groups may have one prompt, of a row in two slots."""
    parts = [group[0] for rows in planned for row in rows for group in by_group(row)]
    counts = Counter((item.group, id(item.prompt)) for item in parts)
    spread = [item.prompt for item in parts if counts[item.group, id(item.prompt)] > 1]
    return list({id(prompt): prompt for prompt in spread}.values())


def by_group(row: Sequence[Item]) -> list[list[Item]]:
    """The items of a row by group, in order: those of one group stand together."""
    return [list(items) for _, items in groupby(row, key=lambda item: item.group)]


def _length(row: Sequence[Item], apart: Collection[int] = ()) -> int:
    prompts = (group[0].prompt for group in by_group(row))
    return sum(len(p.token_ids) for p in prompts if id(p) not in apart) + sum(i.run_length for i in row)


def _rounded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _split(group: list[Item], max_tokens: int, copies: int = 1) -> Iterator[list[Item]]:
    """Rows of one group, as many completions in each as fit beside the prompt, `copies` times."""
    times = f", {copies} times with the terms of its loss" if copies > 1 else ""
    row: list[Item] = []
    for item in group:
        if copies * _length([item]) > max_tokens:
            raise ConfigError(
                f"optim.max_tokens_per_pack = {max_tokens} is smaller than one prompt with one completion: "
                f"{item.prompt.uid} has {len(item.prompt.token_ids)} + {item.run_length} tokens{times}; "
                "raise it, or lower data.max_pixels, data.max_prompt_length or rollout.max_completion_length"
            )
        if row and copies * _length([*row, item]) > max_tokens:
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
