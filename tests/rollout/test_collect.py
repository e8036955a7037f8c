"""From scores to advantages: what of a reward's answers each aggregation looks at."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mm_grpo.algorithm.advantages import Objective, gdpo, grpo
from mm_grpo.config import AlgorithmConfig
from mm_grpo.rewards.resolve import resolve_entries
from mm_grpo.rewards.scorer import Scores
from mm_grpo.rollout.group_metrics import group_metrics, turn_metrics
from mm_grpo.rollout.scored_groups import compute_advantages, has_zero_std, with_scores
from mm_grpo.types import Completion, Group, Turn

GDPO = AlgorithmConfig(multi_objective_aggregation="normalize_then_sum")
WEIGHTS = {"right": 1.0, "short": 0.5, "seen": 0.0}
ENTRIES = [{"name": "exact_match", "as": name, "weight": weight} for name, weight in WEIGHTS.items()]
SPECS = resolve_entries(ENTRIES)
SCORES = Scores(
    totals=[1.0, 1.0, None, 1.5],
    parts={"right": [1.0, 0.0, 5.0, 1.0], "short": [0.0, 9.0, 5.0, 1.0], "seen": [7.0, 8.0, 9.0, None]},
    metrics={},
    extra={"note": ["a", "b", "c", None]},
)


def scored(*sizes: int, kl: tuple[tuple[float, ...], ...] = ((), ())) -> list[Group]:
    """The scores, cut for groups of these sizes. Nothing of a prompt or a completion is looked at."""
    anything: Any = SimpleNamespace(masked=None)
    groups = zip((4, 7), sizes, kl, strict=True)
    cut = [Group(slot, anything, (anything,) * size, kl=cost) for slot, size, cost in groups]
    return with_scores(cut, SCORES)


def test_scores_are_cut_in_order() -> None:
    first, second = scored(1, 3)
    assert (first.slot, first.rewards, first.parts["short"]) == (4, (1.0,), [0.0])
    assert (second.slot, second.rewards) == (7, (1.0, None, 1.5))
    assert (second.parts["right"], second.extra["note"]) == ([0.0, 5.0, 1.0], ["b", "c", None])
    masked: Any = (SimpleNamespace(masked=None), SimpleNamespace(masked="look: error"))
    (half,) = with_scores([replace(first, completions=masked)], replace(SCORES, totals=[1.0, 2.0]))
    assert half.rewards == (1.0, None)


def test_totals_are_what_sum_then_normalize_looks_at() -> None:
    want = grpo([[1.0, 1.0], [None, 1.5]])
    assert compute_advantages(scored(2, 2), SPECS, AlgorithmConfig()) == want == [(0.0, 0.0), (0.0, 0.0)]


def test_parts_of_unmasked_completions_are_what_normalize_then_sum_looks_at() -> None:
    parts = [Objective(1.0, [[1.0, 0.0], [None, 1.0]]), Objective(0.5, [[0.0, 9.0], [None, 1.0]])]
    want = gdpo([[1.0, 1.0], [None, 1.5]], parts)
    got = compute_advantages(scored(2, 2), SPECS, GDPO)
    assert got == want
    assert got[0][0] > 0 > got[0][1] and got[1] == (0.0, 0.0)


def test_the_kl_comes_off_the_totals() -> None:
    config = AlgorithmConfig(kl_in_reward=True, beta=0.5, kl_estimator="k1", scale_rewards="none")
    # 1 - 0.5 * 2 and 1 - 0.5 * -1: 0 and 1.5, less their mean of 0.75
    found = compute_advantages(scored(2, 2, kl=((2.0, -1.0), (9.0, 3.0))), SPECS, config)
    assert found == [(-0.75, 0.75), (0.0, 0.0)]


def test_zero_std_is_looked_for_where_advantages_are_and_before_any_kl() -> None:
    paid = scored(2, 2, kl=((2.0, -1.0), (9.0, 3.0)))
    taken = AlgorithmConfig(kl_in_reward=True, beta=0.5)
    assert [has_zero_std(s, SPECS, taken) for s in paid] == [True, True]  # totals 1, 1 and a lone 1.5
    assert [has_zero_std(s, SPECS, GDPO) for s in paid] == [False, True]  # the parts of the first differ
    (one, other) = scored(1, 3)
    assert has_zero_std(one, SPECS, AlgorithmConfig())
    assert not has_zero_std(other, SPECS, AlgorithmConfig(scale_rewards="batch"))


def test_metrics_of_groups_by_hand() -> None:
    prompt: Any = object()
    logprobs = [(-1.0, -2.0), (-3.0,), (-0.5, -0.5, -1.0), ()]
    reasons: list[Any] = ["stop", "length", "stop", "stop"]
    ids = [tuple(range(len(values))) for values in logprobs]
    sampled = zip(ids, logprobs, reasons, strict=True)
    answers = [Completion(tokens, values, "", reason, 0) for tokens, values, reason in sampled]
    groups = [
        Group(0, prompt, tuple(answers[:2]), (1.0, 4.0), kl=(0.5, 1.5)),
        Group(1, prompt, tuple(answers[2:]), (None, 1.0), kl=(2.0, -1.0)),
    ]
    found = group_metrics(groups)
    assert found["kl"] == pytest.approx(3 / 6)  # of a token, as that of the loss
    assert found["reward_std"] == pytest.approx(4.5**0.5 / 2)  # within groups, of a lone reward 0
    assert found["completions/mean_logprob"] == pytest.approx(-8 / 6)  # of tokens, not of completions
    assert (found["frac_reward_none"], found["frac_reward_zero_std"]) == (0.25, 0.5)
    assert (found["reward_min"], found["reward"], found["reward_max"]) == (1.0, 2.0, 4.0)
    assert found["completions/clipped_ratio"] == 0.25
    none = group_metrics([Group(0, prompt, tuple(answers[:2]), (None, None))])
    assert none["frac_reward_none"] == 1.0 and "reward" not in none and "reward_min" not in none


def test_metrics_of_conversations_by_hand() -> None:
    """Two calls of which one failed, three that ended well, and an answer without any."""
    model = Turn("assistant", "", 2)
    fine, failed = Turn("tool", "", 3, name="look"), Turn("tool", "", 5, name="look", fault="error")
    turns = ((model, fine, model, failed, model), (model, fine, fine, fine, model), (model,))
    metrics = turn_metrics([Completion((5,), (-1.0,), "", "stop", 0, turns=own) for own in turns])
    assert metrics == {
        "turns/mean": 2.0, "turns/max": 3, "tools/call_frequency": pytest.approx(5 / 3),
        "tools/failure_frequency": 0.2, "tools/observation_tokens": pytest.approx(17 / 3), "tools/masked": 0,
        "tools/failures/error": 1,
    }  # fmt: skip
