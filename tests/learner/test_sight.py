"""Sight against transformers' own forward, and its choice of rows."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.steps import learner_of, make_groups, plain_logp
from torch import Tensor

from mm_grpo.data.blind import reordered
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.sight import GroupSight, Row, measure, pairs_of, pieces_of
from mm_grpo.parity.images import log_columns, sight_metrics
from mm_grpo.processors.base import Processor, load_processor
from mm_grpo.types import Completion, Group, Tail

PACK = 4096


@pytest.fixture
def learner(models: dict[str, Any]) -> Learner:
    return learner_of(models["qwen2_5_vl"])


@pytest.fixture
def groups(learner: Learner) -> list[Group]:
    return make_groups(learner.processor)


@pytest.fixture
def film_groups(learner: Learner) -> list[Group]:
    """Groups of an image and a video, two videos, no media, an image, a video whose frames are one picture, a video."""
    still = tiny.video(9, 2, 56, 56)
    media: list[Any] = [
        ((tiny.picture(1),), (tiny.video(1, 6, 56, 84),)),
        ((), (tiny.video(2, 3, 56, 56), tiny.video(3, 4, 84, 56, fps=1.0))),
        ((), ()),
        ((tiny.picture(2, 56, 112),), ()),
        ((), (replace(still, frames=(still.frames[0],) * 4, times=(1.0, 2.0, 3.0, 4.0)),)),
        ((), (tiny.video(4, 8, 56, 56, fps=4.0),)),
    ]
    samples = [tiny.sample(f"r:{slot}", "what", *shown) for slot, shown in enumerate(media)]
    lists = make_groups(learner.processor)
    prompts = map(learner.processor.prompt, samples)
    return [replace(lists[slot % 4], slot=slot, prompt=prompt) for slot, prompt in enumerate(prompts)]


def by_plain(learner: Learner, group: Group, lender: Group) -> list[Tensor]:
    """Sight [T] of each completion by a forward of its whole text with either media."""
    own, other, lent = group.prompt.engine_prompt, lender.prompt.engine_prompt, dict[str, Any]()
    for kind in ("images", "videos"):
        mine, theirs = getattr(own, kind), getattr(other, kind)
        lent[kind] = tuple(theirs[k % len(theirs)] for k in range(len(mine)))
    return differences(learner, group, **lent)


def differences(learner: Learner, group: Group, **media: Any) -> list[Tensor]:
    """What the plain log-probs [T] of each completion lose with other media in the row."""
    processor: Processor = learner.processor
    unseen = replace(group, prompt=processor.prompt(replace(group.prompt.sample, **media)))
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


@pytest.mark.parametrize("packs", [PACK, 120])
def test_videos_are_lent_by_rows_with_videos_and_their_order_is_measured(
    packs: int, learner: Learner, film_groups: list[Group]
) -> None:
    """The image of 3 has 0's in its place, 0 has no other row with both; the frames of 4 are all the same."""
    found = measure(film_groups, learner, packs, Ranks())
    lenders = [(1, "r:4"), (3, "r:0"), (4, "r:5"), (5, "r:0")]
    assert [(one.slot, one.lender) for one in found] == [*lenders, (0, None), (1, None), (5, None)]
    for one in found:
        group = film_groups[one.slot]
        if one.lender is not None:
            wanted = by_plain(learner, group, film_groups[int(one.lender[2:])])
        else:
            rng = random.Random(f"frames/{group.prompt.uid}")
            videos = group.prompt.engine_prompt.videos
            moved = tuple(replace(video, frames=reordered(video.frames, rng)) for video in videos)
            pairs = zip(videos, moved, strict=True)
            assert any(a.frames != b.frames and a.times == b.times for a, b in pairs)
            wanted = differences(learner, group, videos=moved)
        for ours, theirs in zip(one.tokens, wanted, strict=True):
            assert float(theirs.abs().max()) > 1e-4
            assert ours == pytest.approx(theirs.tolist(), abs=1e-5)
    metrics = sight_metrics(found)
    nats = [value for one in found if one.lender is None for value in one.nats]
    assert metrics["sight/order_nats"] == pytest.approx(sum(nats) / len(nats))
    assert metrics["sight/order_nats_stderr"] > 0
    entries = log_columns(found)
    assert entries[1, 0, 0]["sight"]["other"] == "r:4"  # type: ignore[index]
    assert entries[1, 0, 0]["order"]["nats"] == pytest.approx(found[5].nats[0], abs=1e-4)  # type: ignore[index]
    assert set(entries[0, 0, 0]) == {"order"} and set(entries[3, 0, 0]) == {"sight"}


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
    longest = {s: max(c.run_length for c in groups[s].completions) for s in whole}
    tokens = {s: len(groups[s].prompt.token_ids) + longest[s] for s in whole}
    assert tokens[2] < min(tokens[0], tokens[3])
    assert [one.slot for one in measure(groups, learner, tokens[2], Ranks())] == [2]


def test_rows_without_images_are_never_measured(learner: Learner, groups: list[Group]) -> None:
    for rows in (groups[1:2], groups[:2], []):  # the second ones have none but the row's own images
        assert measure(rows, learner, PACK, Ranks()) == []


def test_a_conversation_goes_on_after_the_other_prompt(learner: Learner, groups: list[Group]) -> None:
    """A tail without observations is the completion itself, wherever the prompt before it ends."""
    other = tiny.sample("r:3", "who", (tiny.picture(7, 140, 140),))
    groups[3] = replace(groups[3], prompt=learner.processor.prompt(other))

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
        ({3: ("a",)}, []),
        ({0: ("ab",), 1: ("ac",), 2: ("ba",)}, [(0, 2), (1, 2), (2, 0)]),
        ({0: ("aba",), 1: ("ba",)}, [(0, 1), (1, 0)]),
        ({i: (str(i),) for i in range(10)}, [(0, 1), (2, 3), (5, 6), (7, 8)]),
        (
            {0: ("a", "", "x"), 1: ("b", "", "x"), 2: ("c", "", "y"), 3: ("d",)},
            [(0, 2), (1, 2), (2, 0), (3, 0)],
        ),
        ({0: ("a", "", "x"), 1: ("a", "", "y"), 2: ("b", "", "x")}, [(0, 2), (1, 2), (2, 1)]),
        # videos are lent for videos, by rows that may have images too
        ({0: ("", "v"), 1: ("a", ""), 2: ("b", "w")}, [(0, 2), (1, 2)]),
        ({0: ("a", "v"), 1: ("b", "v"), 2: ("a", "w"), 3: ("c", "wx")}, [(0, 3), (1, 2), (2, 1), (3, 0)]),
        ({0: ("", "vw"), 1: ("", "x"), 2: ("", "v")}, [(0, 1), (1, 2), (2, 1)]),
    ],
)
def test_which_rows_lend_their_media(rows: Any, pairs: list[tuple[int, int]]) -> None:
    assert pairs_of({slot: Row(*row) for slot, row in rows.items()}) == pairs


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
