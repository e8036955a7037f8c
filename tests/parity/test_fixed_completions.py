"""What the scores of fixed completions say: hand-worked numbers, partial updates, and rounding that raises no alarm."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from mm_grpo.parity.fixed_completions import FixedCompletions, ScoreHistory, Scores, not_followed, unmoved

TOKENS = 192


def values(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


class Sides:
    """Log-probs of a learner that moves by `step` an update, and of an engine that takes `share` of each move. Both
    are rounded apart with a standard deviation of `rounding`, anew for each version, as in bfloat16."""

    def __init__(self, step: float, rounding: float, seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.step, self.rounding = step, rounding
        self.exact = self.engine = 3 * self.noise(1.0) - 6
        self.direction = self.noise(1.0)
        self.history = ScoreHistory("bfloat16", {"": self.scores()})

    def noise(self, size: float) -> Tensor:
        return size * torch.randn(TOKENS, dtype=torch.float64, generator=self.random)

    def scores(self) -> Scores:
        return Scores(self.exact + self.noise(self.rounding), self.engine + self.noise(self.rounding))

    def update(self, share: float) -> str | None:
        move = self.step * self.direction + self.noise(self.step / 2)
        self.exact, self.engine = self.exact + move, self.engine + share * move
        self.history.add("", self.scores(), 7)
        return self.history.wrong_scores("", math.inf, "r:0")

    def stopped_at(self, shares: Sequence[float]) -> int | None:
        """The update, counted from 1, at which an engine that takes these shares is found out."""
        return next((i for i, share in enumerate(shares, 1) if self.update(share)), None)


def test_the_share_that_the_engine_follows_by_hand() -> None:
    start = Scores(values(-1, -2, -3, -4), values(-1, -2, -3, -4))
    sound = Scores(values(-1.1, -2.2, -3.1, -4.2), values(-1.1, -2.2, -3.1, -4.2))
    half = Scores(sound.learner, values(-1.05, -2.1, -3.05, -4.1))
    turned = Scores(sound.learner, values(-0.9, -1.8, -2.9, -3.8))
    assert not_followed(start, sound, 1e-6) is None
    assert "moved 0.50 times as far" in str(not_followed(start, half, 1e-6))
    assert "moved -1.00 times as far" in str(not_followed(start, turned, 1e-6))
    assert not_followed(start, half, 0.05) is None  # as much may be rounding
    assert not_followed(start, start, 1e-6) is None  # nothing moved
    apart = Scores(start.learner, start.engine + values(0.1, 0.2, 0.1, 0.2))  # as at the start
    assert not_followed(apart, Scores(sound.learner, apart.engine - values(0.1, 0.2, 0.1, 0.2)), 1e-6) is None


def test_an_update_is_unmoved_when_the_learner_moves_and_the_engine_does_not() -> None:
    before = Scores(values(-1, -2), values(-1, -2.001))

    assert unmoved(before, Scores(values(-1.001, -2.001), before.engine))
    moved = Scores(values(-1.001, -2.001), values(-1, -2.0011))  # however little
    assert not unmoved(before, moved)
    assert not unmoved(before, Scores(values(-1 - 1e-7, -2 - 1e-7), before.engine))  # nothing to see
    other = Scores(values(-1, -2, -3), values(-1, -2, -3))
    assert not unmoved(other, Scores(values(-1, -2, -3.1), other.engine))  # one token was rounded otherwise
    assert unmoved(other, Scores(values(-1, -2.1, -3.1), other.engine))


@pytest.mark.parametrize("share", [-1.0, 0.0, 0.5, 0.8, 1.3, 2.0])
def test_a_part_of_every_update_is_found_far_below_the_gap(share: float) -> None:
    sides = Sides(step=2e-3, rounding=1e-3)
    assert sides.history.gap_limit > 2e-2
    stopped = sides.stopped_at([share] * 10)
    assert stopped is not None and stopped >= 1
    assert sides.scores().gap.mean < sides.history.gap_limit  # what the gap alone would let pass


def test_an_engine_that_stops_following_later_is_found() -> None:
    stopped = Sides(step=3e-3, rounding=1e-3).stopped_at([1.0] * 300 + [0.5] * 20)
    assert stopped is not None and 300 < stopped <= 312


@pytest.mark.parametrize("step", [0.0, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1])
def test_rounding_is_no_part_of_an_update(step: float) -> None:
    """Also when the learner's move is nothing but its own rounding, which the engine does not have."""
    for seed in range(20):
        assert Sides(step, rounding=1e-3, seed=seed).stopped_at([1.0] * 50) is None


def test_rounding_may_grow_as_the_policy_gets_sure() -> None:
    sides = Sides(step=1e-2, rounding=1e-3)
    for _ in range(100):
        sides.rounding *= 1.015  # 4.4 times in the end
        assert sides.update(1.0) is None


def test_the_gap_at_the_start_is_the_scale_of_the_limit() -> None:
    learner = values(-1, -2, -3)
    assert ScoreHistory("float32", {"": Scores(learner, learner)}).gap_limit == pytest.approx(20 * 2e-6)
    apart = {"a": Scores(learner, learner), "b": Scores(learner, learner + values(1e-3, -3e-3, 2e-3))}
    history = ScoreHistory("bfloat16", apart)  # of several servers, the farthest one
    assert history.gap_limit == pytest.approx(20 * 2e-3)
    assert history.rounding == pytest.approx((14e-6 / 3) ** 0.5)
    for _ in range(3):
        history.add("b", Scores(learner, learner + 1.0), 7)
    assert history.gap_limit == pytest.approx(20 * 2e-3)


def test_lost_updates_count_in_a_row_and_by_server() -> None:
    still, moves = values(-1, -2), [values(-1 - 0.1 * i, -2 - 0.1 * i) for i in range(12)]
    history = ScoreHistory("bfloat16", {"a": Scores(still, still), "b": Scores(still, still)})

    def lost(name: str, learner: Tensor, engine: Tensor, tensors: int = 7) -> bool:
        history.add(name, Scores(learner, engine), tensors)
        return history.lost_updates(name, tensors, 0.1) is not None

    assert not any(lost("a", move, still) for move in moves[1:8]) and lost("a", moves[8], still)  # the eighth
    assert not lost("b", moves[8], still)
    assert not lost("a", moves[9], moves[9])  # it moved
    assert not lost("a", moves[10], moves[9], tensors=0)
    history = ScoreHistory("float32", {"": Scores(still, still)})
    assert lost("", moves[1], still)


def test_fixed_completions_are_legal_and_repeat() -> None:
    prompt = object()
    fixed = FixedCompletions.draw(prompt, 24, {3, 5}, seed=1)  # type: ignore[arg-type]
    assert [len(ids) for ids in fixed.token_ids] == [24] * 4 and fixed.prompt is prompt
    assert not {3, 5} & {token for ids in fixed.token_ids for token in ids}
    assert fixed == FixedCompletions.draw(prompt, 24, {3, 5}, seed=1)  # type: ignore[arg-type]
    assert fixed.token_ids != FixedCompletions.draw(prompt, 24, {3, 5}, seed=2).token_ids  # type: ignore[arg-type]
    assert [len(ids) for ids in FixedCompletions.draw(prompt, 500, (), 1).token_ids] == [64] * 3  # type: ignore[arg-type]
