"""Sight against transformers' own forward, and its choice of rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.steps import learner_of, make_groups, plain_logp
from torch import Tensor

from mm_grpo.distributed.ranks import Ranks
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.sight import GroupSight, measure, pairs_of, pieces_of
from mm_grpo.parity.images import sight_metrics
from mm_grpo.processors.base import Processor, load_processor
from mm_grpo.types import Completion, Group, Tail

PACK = 4096


@pytest.fixture
def learner(models: dict[str, Any]) -> Learner:
    return learner_of(models["qwen2_5_vl"])


@pytest.fixture
def groups(learner: Learner) -> list[Group]:
    return make_groups(learner.processor)


def by_plain(learner: Learner, group: Group, lender: Group) -> list[Tensor]:
    """Sight [T] of each completion by a forward of its whole text with either images."""
    own, other = group.prompt.engine_prompt.images, lender.prompt.engine_prompt.images
    lent = [other[k % len(other)] for k in range(len(own))]
    processor: Processor = learner.processor
    unseen = replace(group, prompt=processor.prompt(replace(group.prompt.sample, images=tuple(lent))))
    with torch.no_grad():
        return [
            plain_logp(learner.model, learner.config, group, c)[0]
            - plain_logp(learner.model, learner.config, unseen, c)[0]
            for c in group.completions
        ]


@pytest.mark.parametrize("packs", [PACK, 70])
def test_sight_is_the_difference_of_plain_forwards(packs: int, learner: Learner, groups: list[Group]) -> None:
    """Rows of two images, none, one and two: 0 takes the image of 2 twice, 2 the first of 3, 3 those of 0."""
    found = measure(groups, learner, packs, Ranks())
    assert [(one.slot, one.lender) for one in found] == [(0, "r:2"), (2, "r:3"), (3, "r:0")]
    lenders = {0: groups[2], 2: groups[3], 3: groups[0]}
    for one in found:
        wanted = by_plain(learner, groups[one.slot], lenders[one.slot])
        for ours, nats, theirs in zip(one.tokens, one.nats, wanted, strict=True):
            assert float(theirs.abs().max()) > 1e-4
            assert ours == pytest.approx(theirs.tolist(), abs=1e-5)
            assert nats == pytest.approx(float(theirs.sum()), abs=1e-4)


def test_an_image_is_encoded_once_and_is_no_work_of_the_step(learner: Learner, groups: list[Group]) -> None:
    encoded = 0
    tower = learner.model.model.visual
    forward = tower.forward

    def counted(pixels: Tensor, grid_thw: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal encoded
        encoded += len(grid_thw)
        return forward(pixels, grid_thw, *args, **kwargs)

    tower.forward = counted
    measure(groups, learner, PACK, Ranks())
    assert encoded == 2 * 5  # those of three rows, and as many in their place, for nine completions
    work, weights = learner._work, [p.clone() for p in learner.model.parameters()]
    assert (work.packs, work.images) == (0, 0)
    assert all(p.grad is None for p in learner.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(weights, learner.model.parameters(), strict=True))


def test_a_row_that_no_longer_fits_a_pack_is_left_out(learner: Learner, groups: list[Group]) -> None:
    whole = {one.slot: one for one in measure(groups, learner, PACK, Ranks())}
    tokens = {
        s: len(groups[s].prompt.token_ids) + max(map(lambda c: c.run_length, groups[s].completions))
        for s in whole
    }
    assert tokens[2] < min(tokens[0], tokens[3])
    assert [one.slot for one in measure(groups, learner, tokens[2], Ranks())] == [2]


def test_rows_without_images_are_never_measured(learner: Learner, groups: list[Group]) -> None:
    for rows in (groups[1:2], groups[:2], []):  # the second ones have none but the row's own images
        assert measure(rows, learner, PACK, Ranks()) == []


def test_a_conversation_goes_on_after_the_other_prompt(learner: Learner, groups: list[Group]) -> None:
    """A tail without observations is the completion itself, wherever the prompt before it ends."""
    groups[3] = replace(
        groups[3], prompt=learner.processor.prompt(tiny.sample("r:3", "who", (tiny.picture(7, 140, 140),)))
    )

    def talking(group: Group, c: Completion) -> Completion:
        first, count = group.prompt.next_position, len(c.token_ids)
        positions = torch.arange(first, first + count).expand(3, -1)
        return replace(c, tail=Tail(c.token_ids, (True,) * count, positions))

    turns = [replace(g, completions=tuple(talking(g, c) for c in g.completions)) for g in groups]
    plain, found = (measure(given, learner, PACK, Ranks()) for given in (groups, turns))
    for one, other in zip(plain, found, strict=True):
        for a, b in zip(one.tokens, other.tokens, strict=True):
            assert a == pytest.approx(b, abs=1e-6)


@pytest.mark.parametrize(
    ("rows", "pairs"),
    [
        ({3: ("a", None)}, []),
        ({0: ("ab", None), 1: ("ac", None), 2: ("ba", None)}, [(0, 2), (1, 2), (2, 0)]),
        ({0: ("aba", None), 1: ("ba", None)}, [(0, 1), (1, 0)]),
        ({i: (str(i), None) for i in range(10)}, [(0, 1), (2, 3), (5, 6), (7, 8)]),
        ({0: ("a", "x"), 1: ("b", "x"), 2: ("c", "y"), 3: ("d", None)}, [(0, 2), (1, 2), (2, 0), (3, 0)]),
        ({0: ("a", "x"), 1: ("a", "y"), 2: ("b", "x")}, [(0, 2), (1, 2), (2, 1)]),
    ],
)
def test_which_rows_lend_their_images(rows: Any, pairs: list[tuple[int, int]]) -> None:
    assert pairs_of(rows) == pairs


def test_the_standard_error_is_that_of_groups() -> None:
    """Two groups with means 1 and 4; completions of a group say nothing new of the row."""

    def group(slot: int, *nats: float) -> GroupSight:
        return GroupSight(slot, 0, "r", tuple((n,) for n in nats), tuple(("",) for _ in nats))

    both = sight_metrics([group(0, 0.0, 2.0), group(1, 4.0, 4.0)])
    assert both == {"sight/nats": 2.5, "sight/nats_per_token": 2.5, "sight/nats_stderr": pytest.approx(1.5)}
    assert sight_metrics([group(0, 0.0, 2.0)])["sight/nats_stderr"] == pytest.approx(1.0)


def test_pieces_join_to_the_text(models: dict[str, Any]) -> None:
    processor = load_processor(str(models["qwen2_5_vl"]))
    text = "a naïve 犬 🙂 b"
    ids = processor.tokenizer(text)["input_ids"] + sorted(processor.stop_token_ids)[:1]  # type: ignore[attr-defined]
    pieces = pieces_of(processor, ids)
    assert len(pieces) == len(ids) and "".join(pieces) == text and pieces[-1] == "" and "犬" in pieces
