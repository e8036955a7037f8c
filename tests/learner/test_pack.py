"""Packs: who sees whom, where completions start, and how rows fill packs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mm_grpo.errors import ConfigError, GuardStop
from mm_grpo.learner.pack import Item, attention_mask, layout, plan
from mm_grpo.types import EnginePrompt, Prompt, Sample


def prompt(length: int, uid: str = "r:0", last: int | None = None) -> Prompt:
    positions = torch.arange(length).expand(3, -1).clone()
    if last is not None:  # an image of many tokens ends at a small position
        positions[:, -1] = last
        positions[:, :-1] = 0
    ids = tuple(range(10, 10 + length))
    return Prompt(Sample(uid, []), ids, EnginePrompt(ids, ()), positions, {})


def items(prompt_length: int, *lengths: int, group: int = 0, first: int = 0) -> list[Item]:
    p = prompt(prompt_length, f"r:{group}")
    return [Item(first + i, group, p, tuple(range(50, 50 + n))) for i, n in enumerate(lengths)]


def test_mask_by_hand() -> None:
    # prompt of 2, completions of 2 and 1, one padding
    mask = attention_mask(torch.tensor([[0, 0, 1, 1, 2, -1]]))[0, 0].int().tolist()
    assert mask == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 1],  # padding is looked at by nobody, and what it sees reaches nobody
    ]


def test_masks_of_image_blocks_and_windows_by_hand() -> None:
    # a prompt of 4, whose second and third token are an image, and completions of 2 and 1 at positions 4, 5 and 4
    segments = torch.tensor([[0, 0, 0, 0, 1, 1, 2]])
    blocks = torch.tensor([[-1, 0, 0, -1, -1, -1, -1]])
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 4]])
    ahead = attention_mask(segments, blocks)[0, 0].int().tolist()
    assert ahead == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],  # the image's first token sees its second
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 0, 0, 1],
    ]
    both = attention_mask(segments, blocks, positions, window=2)[0, 0].int().tolist()
    assert both == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 1, 0, 0, 1],  # the second completion is as near to the prompt as the first
    ]


def test_rows_of_one_completion_where_prompts_are_not_shared() -> None:
    planned = plan([*items(4, 3, 3), *items(6, 2, group=1, first=2)], max_tokens=16, shared=False)
    assert [[[i.index for i in row] for row in pack] for pack in planned] == [[[2], [0]], [[1]]]
    with pytest.raises(ConfigError, match="smaller than one prompt with one completion"):
        plan(items(40, 3), max_tokens=16, shared=False)


def test_layout_by_hand() -> None:
    p = prompt(3, last=7)
    pack = layout([[Item(4, 0, p, (50, 51)), Item(9, 0, p, (60,))]], frozenset({99}))
    assert pack.input_ids.tolist() == [[10, 11, 12, 50, 51, 60]]
    assert pack.segments.tolist() == [[0, 0, 0, 1, 1, 2]]
    assert pack.position_ids[1].tolist() == [[0, 0, 7, 8, 9, 8]]  # both follow the largest position
    assert pack.sources.tolist() == [2, 3, 2]  # first tokens are predicted by the last prompt state
    assert pack.targets.tolist() == [50, 51, 60]
    assert pack.completion_index.tolist() == [4, 4, 9]


def test_rows_of_unequal_length_are_padded_and_indexed() -> None:
    pack = layout([items(2, 2), items(1, 1, group=1, first=1)], frozenset())
    assert pack.segments.tolist() == [[0, 0, 1, 1], [0, 1, -1, -1]]
    assert pack.sources.tolist() == [1, 2, 4]


def test_a_media_token_in_a_completion_stops_with_its_row_and_place() -> None:
    bad = Item(0, 0, prompt(2, "train:7"), (50, 99))
    with pytest.raises(GuardStop, match=r"train:7: the completion holds media token 99 at place 1"):
        layout([[bad]], frozenset({99}))


def test_a_group_that_does_not_fit_is_split_and_keeps_every_completion() -> None:
    group = items(10, 4, 4, 4, 4, 4)
    packs = plan(group, 20)  # 10 + 4 + 4 = 18 fits, a third does not
    assert [[[i.index for i in row] for row in rows] for rows in packs] == [[[0, 1]], [[2, 3]], [[4]]]
    assert len(plan(group, 30)) == 1
    assert [len(rows) for rows in plan(group, 14)] == [1] * 5


def test_rows_meet_in_a_pack_while_their_padded_size_fits() -> None:
    rows = items(5, 5) + items(4, 4, group=1, first=1) + items(2, 2, group=2, first=2)
    packs = plan(rows, 20)  # two rows padded to 10 make 20; the third would make 30
    assert [[row[0].group for row in rows] for rows in packs] == [[0, 1], [2]]


def test_a_pack_too_small_for_one_completion_names_the_row_and_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"max_tokens_per_pack = 12 .*r:0 has 10 \+ 4 tokens"):
        plan(items(10, 4), 12)


def test_the_plan_depends_on_the_items_alone() -> None:
    rows: list[Any] = []
    for g in range(9):
        rows += items(3 + g % 4, 2, 1 + g % 3, group=g, first=2 * g)
    assert plan(rows, 24) == plan(list(rows), 24)
    assert sorted(i.index for p in plan(rows, 24) for r in p for i in r) == list(range(18))


def test_rows_are_counted_as_wide_as_they_are_laid_out() -> None:
    rows = [i for g in range(4) for i in items(7, 2, group=g, first=g)]  # 9 tokens, laid out as 16
    assert [len(p) for p in plan(rows, 36)] == [4]
    packs = plan(rows, 36, multiple=8)
    assert [len(p) for p in packs] == [2, 2]
    pack = layout(packs[0], frozenset(), multiple=8)
    assert pack.input_ids.shape == (2, 16) and (pack.segments[:, 9:] == -1).all()
    assert pack.sources.tolist() == [6, 7, 22, 23]
    assert len(plan(rows[:1], 9, multiple=8)) == 1  # what fits by its tokens is not refused for its padding
