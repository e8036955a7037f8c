"""Packs: groups laid out as shared-prefix rows, and the plan that fills them.

A row is groups behind one another, each a prompt followed by completions:

    [ prompt | completion 1 | completion 2 | ... | next prompt | completion 1 | ... | padding ]

Every completion attends to its prompt and itself, never to another completion or group, and starts at the position that
follows the prompt's largest one (M-RoPE positions of an image do not grow token by token). So the
prompt is run once and each image encoded once, whatever G is, and the result is the same as from running
prompt + completion G times. If a model cannot do that exactly, a row is one prompt and one completion (`unshared`),
and the model makes the masks. The first token of each completion is predicted by the prompt's last state.

In a conversation of several turns a completion holds the observations too, with their images and positions; they are
run, and only sampled tokens are targets.

A group that does not fit one pack is spread over several. If the model's layers can go on from a prompt's states
(prompt_states.py), its packs hold completions alone, and `Pack.prefixes` names the prompts that are run apart, once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mm_grpo.distributed.ranks import buckets
from mm_grpo.errors import ConfigError, GuardStop
from mm_grpo.types import Pictured, Prompt, Tail

PADDING = -1
DUMMY = -1
"""Number of the completion of a pack that no process reads."""
SEGMENTS_PER_GROUP = 1 << 20
"""Distance from one group of a row to the next in `Pack.segments`."""


@dataclass(frozen=True)
class Item:
    """Completion to be run."""

    index: int
    """Its place in this process's step."""
    group: int
    """The place of its group."""
    prompt: Prompt
    token_ids: tuple[int, ...]
    """The tokens that were sampled."""
    counts: bool = True
    """False for a completion that the config masks: it keeps its place but no token of weight."""
    tail: Tail | None = None
    """The tail of a conversation of several turns, with its observations."""

    @property
    def run_length(self) -> int:
        return len(self.token_ids) if self.tail is None else len(self.tail.token_ids)


@dataclass(frozen=True)
class Pack:
    """Rows of one forward and backward: B rows of N tokens, of which M were sampled."""

    input_ids: Tensor
    """[B, N]"""
    position_ids: Tensor
    """[*A, B, N], with the axes A of `Prompt.position_ids`."""
    segments: Tensor
    """[B, N]: n S for the prompt of the row's group n = 0, 1, ..., n S + k for its k-th completion, k > 0, with
    S = SEGMENTS_PER_GROUP; -1 for padding. They never decrease up to the padding."""
    sources: Tensor
    """[M]: indices into the flattened rows, of the states that predict `targets`; B N + i for the last state of the
    pack's i-th prefix."""
    targets: Tensor
    """[M]: sampled tokens."""
    completion_index: Tensor
    """[M]: the completion (`Item.index`) of each token."""
    pictured: tuple[Pictured, ...]
    """Prompts and observations that have images, in the order of their tokens."""
    prefixes: tuple[tuple[Prompt, ...], ...] = ()
    """Prompts of each row that run apart and not in it; () if no row has any."""
    prefix_segments: Tensor | None = None
    """[B, K]: segments of the tokens of `prefixes`, which come before the row's."""

    @property
    def whole_segments(self) -> Tensor:
        """Segments [B, K + N] of the prefixes and the row."""
        if self.prefix_segments is None:
            return self.segments
        return torch.cat([self.prefix_segments, self.segments], 1)

    def to(self, device: torch.device | str) -> Pack:
        tensors: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **tensors)


def attention_mask(segments: Tensor, image_blocks: Tensor | None = None, window: int | None = None) -> Tensor:
    """Return the attention mask [B, 1, N, N], True if the query (third axis) may attend to the key (fourth).

    With `image_blocks` [B, N] the tokens of one image, which have one number >= 0, attend to each other. With a
    `window` a query attends to keys that are less than `window` tokens before it in its prompt + completion.
    """
    n = segments.shape[1]
    query, key = segments[:, :, None], segments[:, None, :]
    visible = torch.ones(n, n, dtype=torch.bool, device=segments.device).tril()[None]
    if image_blocks is not None:
        visible = visible | (
            (image_blocks[:, :, None] == image_blocks[:, None, :]) & (image_blocks >= 0)[:, None, :]
        )
    if window is not None:
        place = _places(segments)
        visible = visible & ((place - window)[:, :, None] < place[:, None, :])
    allowed = visible & (key != PADDING) & ((key == prompt_of(query)) | (key == query))
    # padding attends to itself, because a softmax over nothing is NaN
    allowed |= torch.eye(n, dtype=torch.bool, device=segments.device)
    return allowed[:, None]


def prompt_of(segments: Tensor) -> Tensor:
    """Return the segment of each token's prompt; for padding a segment that no token has."""
    return segments - segments % SEGMENTS_PER_GROUP


def _places(segments: Tensor) -> Tensor:
    """Return the place of each token [B, N] in its prompt + completion, from 0."""
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
    """Return packs of rows of items. A pack of several groups has at most `max_tokens` once its rows are padded to a
    multiple, with `copies` of each row.

    Items of a group, which come one after the other, stay together while they fit, and stand alone if they are not
    `shared`. Groups are placed from the longest to the shortest, each in the first row that has room, else in a new row
    of the first pack that has room (first-fit decreasing). A pack is `one_row` if masked places cost attention nothing,
    else it has rows as wide as its first group. If prompts can be run `apart` from their completions, each part of a
    group that is larger than a pack begins a pack, one after the other, so that no two of these groups are open at a
    time. Raise ConfigError if one prompt with one completion is larger than a pack.
    """
    groups = by_group(items) if shared else [[item] for item in items]
    split = [list(_split(group, max_tokens, copies)) for group in groups]
    # first and in order: two large groups open at a time would keep the graphs of two prompts alive
    first = [part for parts in split for part in parts if apart and len(parts) > 1]
    single = [part for parts in split for part in parts if not apart or len(parts) == 1]
    single.sort(key=_length, reverse=True)  # stable, so the plan is a function of the items alone
    packs: list[_Filling] = []
    for number, part in enumerate([*first, *single]):
        if number >= len(first) and any(pack.takes(part) for pack in packs):
            continue
        width, limit = _rounded(_length(part), multiple), max_tokens // copies
        if shared and one_row:
            packs.append(_Filling(max(width, limit - limit % multiple), 1, shared))
        else:
            packs.append(_Filling(width, max(1, limit // width), shared))
        packs[-1].takes(part)
    return [pack.rows for pack in packs]


class _Filling:
    """Pack that is being filled: up to `max_rows` rows of `width` tokens, each with `several` groups or one."""

    def __init__(self, width: int, max_rows: int, several: bool) -> None:
        self.width, self.max_rows, self.several = width, max_rows, several
        self.rows: list[list[Item]] = []
        self._room: list[int] = []

    def takes(self, part: list[Item]) -> bool:
        """Put a group, or a part of one, in the first row that has room; return False if none has."""
        length = _length(part)
        places = [i for i, room in enumerate(self._room) if length <= room] if self.several else []
        if places:
            self.rows[places[0]] += part
            self._room[places[0]] -= length
        elif len(self.rows) < self.max_rows:
            self.rows.append(list(part))
            self._room.append(self.width - length)
        else:
            return False
        return True


def layout(
    rows: Sequence[Sequence[Item]],
    media_token_ids: frozenset[int],
    multiple: int = 1,
    apart: Collection[int] = (),
) -> Pack:
    """Lay out the rows of one pack, its width rounded up to a multiple. Raise GuardStop if a completion has a media
    token.

    `apart` are the ids (Python's) of prompts that are run apart. Their tokens are left out.
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
                segments[b, start:at] = number * SEGMENTS_PER_GROUP
                positions[..., b, start:at] = prompt.position_ids
                last = at - 1
            # not the prompt's length: the positions of an image grow slower than its tokens (M-RoPE)
            first = prompt.next_position
            for k, item in enumerate(group, start=1):
                _refuse_media(item, media_token_ids)
                count, tail = item.run_length, item.tail
                input_ids[b, at : at + count] = torch.tensor(
                    item.token_ids if tail is None else tail.token_ids
                )
                segments[b, at : at + count] = number * SEGMENTS_PER_GROUP + k
                following = torch.arange(first, first + count) if tail is None else tail.position_ids
                positions[..., b, at : at + count] = following
                source = torch.arange(at - 1, at + count - 1)
                # the prompt's last state predicts the first token, whatever precedes the completion in the row
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
        pictured=tuple(chain.from_iterable(pictured_of(row, apart) for row in rows)),
        prefixes=tuple(tuple(p for _, p in row) for row in prefixes) if any(prefixes) else (),
        prefix_segments=_prefix_segments(prefixes, multiple) if any(prefixes) else None,
    )


def _prefix_segments(prefixes: Sequence[Sequence[tuple[int, Prompt]]], multiple: int) -> Tensor:
    """Return segments [B, K] of the prompts of each row; a prompt comes with the number of its group in the row."""
    rows = [[n * SEGMENTS_PER_GROUP for n, prompt in row for _ in prompt.token_ids] for row in prefixes]
    width = _rounded(max(map(len, rows)), multiple)
    return torch.tensor([row + [PADDING] * (width - len(row)) for row in rows])


def prompt_pack(prompt: Prompt, multiple: int = 1) -> Pack:
    """Return a pack of a prompt alone, without targets; `sources` names its last state."""
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
    """Return a pack of two text tokens; a process runs it when it has no pack left while others have."""
    return Pack(
        input_ids=torch.full((1, 2), token),
        position_ids=torch.arange(2).expand(*position_axes, 1, 2),
        segments=torch.tensor([[0, 1]]),
        sources=torch.tensor([0]),
        targets=torch.tensor([token]),
        completion_index=torch.tensor([DUMMY]),
        pictured=(),
    )


def pictured_of(row: Sequence[Item], apart: Collection[int] = ()) -> Iterator[Pictured]:
    """Yield the prompts and observations of a row that have images, in order, without prompts that run `apart`."""
    for group in by_group(row):
        if group[0].prompt.vision and id(group[0].prompt) not in apart:
            yield group[0].prompt
        for item in group:
            if item.tail is not None:
                yield from item.tail.pictures


def spread_prompts(planned: Sequence[Sequence[Sequence[Item]]]) -> list[Prompt]:
    """Return the prompts of groups in several places of a plan. Two slots may hold one row, and share its prompt."""
    # by group and identity: two slots of one row share a prompt object, and are two groups
    parts = [group[0] for rows in planned for row in rows for group in by_group(row)]
    counts = Counter((item.group, id(item.prompt)) for item in parts)
    spread = [item.prompt for item in parts if counts[item.group, id(item.prompt)] > 1]
    return list({id(prompt): prompt for prompt in spread}.values())


def by_group(row: Sequence[Item]) -> list[list[Item]]:
    """Return the items of a row by group, in order; the items of a group stand together."""
    return [list(items) for _, items in groupby(row, key=lambda item: item.group)]


def _length(row: Sequence[Item], apart: Collection[int] = ()) -> int:
    prompts = (group[0].prompt for group in by_group(row))
    return sum(len(p.token_ids) for p in prompts if id(p) not in apart) + sum(i.run_length for i in row)


def _rounded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _split(group: list[Item], max_tokens: int, copies: int = 1) -> Iterator[list[Item]]:
    """Return rows of one group, each with as many completions as fit with the prompt, `copies` times."""
    times = f", {copies} times with the terms of its loss" if copies > 1 else ""
    for item in group:
        if copies * _length([item]) > max_tokens:
            raise ConfigError(
                f"optim.max_tokens_per_pack = {max_tokens} is smaller than one prompt with one completion: "
                f"{item.prompt.uid} has {len(item.prompt.token_ids)} + {item.run_length} tokens{times}; "
                "raise it, or lower data.max_pixels, data.max_prompt_length or rollout.max_completion_length"
            )
    room = max_tokens // copies - len(group[0].prompt.token_ids)
    return buckets(group, lambda item: item.run_length, room)


def _refuse_media(item: Item, media_token_ids: frozenset[int]) -> None:
    for place, token in enumerate(item.token_ids):
        if token in media_token_ids:
            raise GuardStop(
                f"{item.prompt.uid}: the completion holds media token {token} at place {place}; it stands for an "
                "image that is not there, so no model can be trained on it. Engines must mask "
                f"{sorted(media_token_ids)} at sampling: check the engine or the source of this completion"
            )
