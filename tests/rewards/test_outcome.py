"""The gate of `outcome`: what wrong completions keep of the other rewards, in totals, by turn and under GDPO."""

from __future__ import annotations

from typing import Any

import pytest
from reward_entries import fails, named

from mm_grpo.algorithm.advantages import Objective, gdpo
from mm_grpo.config import AlgorithmConfig
from mm_grpo.rewards import Scorer, get, reward
from mm_grpo.rewards.options import RewardOptions
from mm_grpo.rollout.scored_groups import compute_advantages, with_scores
from mm_grpo.types import Completion, Group, Turn

TEXTS = "abcd"
RIGHT = {"a": 1.0, "b": 0.5, "c": 0.4, "d": None}
SHAPE = {"a": 1.0, "b": -1.0, "c": 1.0, "d": 1.0}


def of(scores: dict[str, Any]) -> Any:
    return lambda completion: scores[completion]


def entries(outcome: Any, weight: float = 0.2) -> list[Any]:
    return [named("shape", of(SHAPE), weight=weight), named("right", of(RIGHT), outcome=outcome)]


@pytest.mark.parametrize(
    ("outcome", "weight", "totals"),
    [
        (False, 0.2, [1.2, 0.3, 0.6, 0.2]),
        (True, 0.2, [1.2, 0.3, 0.4, 0.2]),  # c: 0.4 is below 0.5; d: it does not apply, and gates nothing
        (0.4, 0.2, [1.2, 0.3, 0.6, 0.2]),
        (1, 0.2, [1.2, 0.3, 0.4, 0.2]),  # b: a penalty stays
        (1, -0.2, [0.8, 0.5, 0.2, -0.2]),  # b: and what a negative weight makes a gain goes
    ],
)
@pytest.mark.field_bug("phantom-advantages")
def test_gains_are_withheld_where_the_outcome_is_no_success(rows, outcome, weight, totals):
    scores = Scorer(entries(outcome, weight)).score(*rows(TEXTS), step=1)
    assert scores.totals == pytest.approx(totals)
    assert scores.parts == {"shape": [1.0, -1.0, 1.0, 1.0], "right": [1.0, 0.5, 0.4, None]}
    assert scores.metrics["rewards/shape/mean"] == 0.5


def test_a_wrong_conversation_gains_in_none_of_its_turns(rows):
    turns = tuple(Turn("assistant", text, 1, seed=n) for n, text in enumerate("xy"))
    done = [Completion((1, 2), (0.0, 0.0), text, "stop", 0, turns=turns) for text in "ac"]
    by_turn = named("by_turn", lambda completion: [2.0, -1.0], per_turn=True)
    prompts, _ = rows("ac")
    scores = Scorer([by_turn, named("right", of(RIGHT), outcome=True)]).score(prompts, done, step=1)
    assert (scores.totals, scores.turns) == ([2.0, 0.4], [(2.0, 0.0), (0.0, 0.4)])


def test_gdpo_compares_the_scores_that_enter_totals(rows):
    scorer = Scorer(entries(True))
    prompts, done = rows("abc")
    scores = scorer.score(prompts, done, step=1)
    groups = with_scores([Group(0, prompts[0], tuple(done))], scores)
    config = AlgorithmConfig(multi_objective_aggregation="normalize_then_sum")
    got = compute_advantages(groups, scorer.specs, config)
    parts = [Objective(0.2, [[1.0, -1.0, 0.0]]), Objective(1.0, [[1.0, 0.5, 0.4]])]
    assert got == gdpo([scores.totals], parts)


def test_two_outcomes_of_the_same_rows_are_refused():
    def outcomes(**when: Any) -> list[Any]:
        return [named("a", of(RIGHT), outcome=True, when={"task": ["x", "y"]}), named("b", of(RIGHT), **when)]

    with fails("reward 'b': outcome"):
        Scorer(outcomes(outcome=1.0))
    with fails("reward 'b': outcome"):
        Scorer(outcomes(outcome=True, when={"task": ["z", "y"], "lang": "en"}))
    Scorer(outcomes(outcome=True, when={"task": "z"}))


def test_the_decorator_takes_it_and_what_is_no_mark_is_refused():
    @reward("own", outcome=0.7)
    def own(completion):
        return 1.0

    assert get("own").options.mark == 0.7 and RewardOptions(outcome=True).mark == 0.5
    assert RewardOptions().mark is None and RewardOptions(outcome=1).mark == 1.0
    with fails("reward 'own': outcome = 'yes'"):
        Scorer([{"name": "own", "outcome": "yes"}])
