"""Packs: who sees whom, where completions start, and how rows fill packs."""

from __future__ import annotations

import pytest
import torch

from mm_grpo.errors import ConfigError, GuardStop
from mm_grpo.learner.pack import PADDING, Item, attention_mask, by_group, layout, plan, prompt_pack
from mm_grpo.learner.pack import SEGMENTS_PER_GROUP as GROUP
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


def test_mask_of_two_groups_and_padding_by_hand() -> None:
    # a prompt of 1 with completions of 1 and 1; a prompt of 2 with one of 2, of which a window of 2 hides the first
    segments = torch.tensor([[0, 1, 2, GROUP, GROUP, GROUP + 1, GROUP + 1, PADDING]])
    assert attention_mask(segments)[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 0, 0],
        [0, 0, 0, 1, 0, 0, 0, 0],
        [0, 0, 0, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 1],  # padding is looked at by nobody, and what it sees reaches nobody
    ]
    blocks = torch.tensor([[-1, -1, -1, 0, 0, -1, -1, -1]])  # an image of 2 tokens
    assert attention_mask(segments, blocks, window=2)[0, 0, 2:7].int().tolist() == [
        [1, 0, 1, 0, 0, 0, 0, 0],
        [0, 0, 0, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 0],
    ]


def test_rows_of_one_completion_where_prompts_are_not_shared() -> None:
    planned = plan([*items(4, 3, 3), *items(6, 2, group=1, first=2)], max_tokens=16, shared=False)
    assert [[[i.index for i in row] for row in pack] for pack in planned] == [[[2], [0]], [[1]]]
    with pytest.raises(ConfigError, match="smaller than one prompt with one completion"):
        plan(items(40, 3), max_tokens=16, shared=False)


def test_groups_lie_behind_one_another_in_a_row() -> None:
    one, two = prompt(2, last=7), prompt(1, "r:1")
    row = [Item(4, 0, one, (50, 51)), Item(5, 0, one, (60,)), Item(9, 3, two, (70, 71))]
    pack = layout([row], frozenset())
    assert pack.input_ids.tolist() == [[10, 11, 50, 51, 60, 10, 70, 71]]
    assert pack.segments.tolist() == [[0, 0, 1, 1, 2, GROUP, GROUP + 1, GROUP + 1]]
    assert pack.position_ids[0].tolist() == [[0, 7, 8, 9, 8, 0, 1, 2]]  # both follow the largest position
    assert pack.sources.tolist() == [1, 2, 1, 5, 6]  # first tokens are predicted by the last prompt state
    assert pack.targets.tolist() == [50, 51, 60, 70, 71]
    assert pack.completion_index.tolist() == [4, 4, 5, 9, 9]


def test_prompts_that_are_run_apart_are_left_out_and_named() -> None:
    one, two, three = prompt(2, last=7), prompt(1, "r:1"), prompt(3, "r:2", last=4)
    row = [Item(4, 0, one, (50, 51)), Item(5, 0, one, (60,)), Item(9, 3, two, (70, 71))]
    rows = [row, [Item(2, 1, three, (80,))]]
    pack = layout(rows, frozenset(), multiple=4, apart={id(one), id(three)})
    assert pack.input_ids.tolist() == [[50, 51, 60, 10, 70, 71, 0, 0], [80, *[0] * 7]]
    assert pack.segments.tolist() == [
        [1, 1, 2, GROUP, GROUP + 1, GROUP + 1, PADDING, PADDING],
        [1, *[PADDING] * 7],
    ]
    assert pack.position_ids[0].tolist() == [[8, 9, 8, 0, 1, 2, 0, 0], [5, *[0] * 7]]
    assert pack.prefixes == ((one,), (three,))
    assert pack.prefix_segments is not None
    assert pack.prefix_segments.tolist() == [[0, 0, PADDING, PADDING], [0, 0, 0, PADDING]]
    assert pack.whole_segments.shape == (2, 12)
    # 16 places in two rows; 16 and 17 are the last states of the two prompts
    assert pack.sources.tolist() == [16, 0, 16, 3, 4, 17]
    assert pack.targets.tolist() == [50, 51, 60, 70, 71, 80]


def test_a_prompt_alone_has_its_last_place_and_no_targets() -> None:
    pack = prompt_pack(prompt(3, last=7), multiple=4)
    assert pack.input_ids.tolist() == [[10, 11, 12, 0]] and pack.segments.tolist() == [[0, 0, 0, PADDING]]
    assert pack.position_ids[1].tolist() == [[0, 0, 7, 0]]
    assert (pack.sources.tolist(), pack.targets.tolist(), pack.prefixes) == ([2], [], ())


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


def groups_in(packs: list[list[list[Item]]]) -> list[list[list[int]]]:
    return [[list(dict.fromkeys(i.group for i in row)) for row in rows] for rows in packs]


def test_groups_go_to_the_first_row_that_has_room_the_longest_first() -> None:
    lengths = [(2, 2), (5, 5), (1, 1), (4, 4), (3, 3)]  # 4, 10, 2, 8 and 6 tokens
    rows = [i for g, (p, t) in enumerate(lengths) for i in items(p, t, group=g, first=g)]
    assert groups_in(plan(rows, 20)) == [[[1, 3, 2]], [[4, 0]]]
    assert groups_in(plan(rows, 20, one_row=False)) == [[[1], [3, 2]], [[4], [0]]]  # rows of 10, then of 6
    assert groups_in(plan(rows, 20, copies=2)) == [[[1]], [[3, 2]], [[4, 0]]]
    assert groups_in(plan(rows, 20, shared=False)) == [[[1], [3]], [[4], [0], [2]]]


@pytest.mark.parametrize("multiple", [1, 128])
def test_packs_of_ragged_lengths_are_full(multiple: int) -> None:
    """Log-normal lengths of a sigma of 0.8, of prompts and completions: 64 groups of 8."""
    torch.manual_seed(0)
    lengths = (torch.randn(64, 9) * 0.8).exp() * torch.tensor([120.0] + [60.0] * 8)
    rows = [
        i
        for g, (p, *own) in enumerate(lengths.clamp(1, 700).long().tolist())
        for i in items(p, *own, group=g, first=8 * g)
    ]
    packs = plan(rows, 8192, multiple)
    laid_out = [layout(pack, frozenset(), multiple) for pack in packs]
    tokens = sum(int((p.segments >= 0).sum()) for p in laid_out)
    places = sum(p.segments.numel() for p in laid_out)
    of_groups = (len(g[0].prompt.token_ids) + sum(len(i.token_ids) for i in g) for g in by_group(rows))
    assert tokens == sum(of_groups)
    assert tokens / places >= 0.99 and tokens / (8192 * len(packs)) >= 0.95
    assert len(packs) == -(-tokens // 8192)  # no plan has fewer
    assert all(p.segments.numel() <= 8192 for p in laid_out)
    assert sorted(torch.cat([p.completion_index.unique() for p in laid_out]).tolist()) == list(range(512))


def test_a_pack_too_small_for_one_completion_names_the_row_and_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"max_tokens_per_pack = 12 .*r:0 has 10 \+ 4 tokens"):
        plan(items(10, 4), 12)


def test_rows_are_counted_as_wide_as_they_are_laid_out() -> None:
    rows = [i for g in range(4) for i in items(7, 2, group=g, first=g)]  # 9 tokens, laid out as 16
    assert [len(p) for p in plan(rows, 36, one_row=False)] == [4]
    packs = plan(rows, 36, multiple=8, one_row=False)
    assert [len(p) for p in packs] == [2, 2]
    pack = layout(packs[0], frozenset(), multiple=8)
    assert pack.input_ids.shape == (2, 16) and (pack.segments[:, 9:] == -1).all()
    assert pack.sources.tolist() == [6, 7, 22, 23]
    assert len(plan(rows[:1], 9, multiple=8)) == 1  # what fits by its tokens is not refused for its padding
    assert groups_in(plan(rows, 36, multiple=8)) == [[[0, 1, 2]], [[3]]]  # 36 tokens would be laid out as 40
