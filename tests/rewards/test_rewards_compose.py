import pytest
from reward_entries import fails

from mm_grpo.rewards import Scorer, get, resolve_entries, resolve_entry
from mm_grpo.rewards.spec import RewardSpec


def weights(entries) -> dict[str, float]:
    return {spec.name: spec.weight for spec in resolve_entries(entries)}


def test_a_sum_is_its_parts_with_their_weights(rows):
    half = 0.5 * get("iou")
    assert isinstance(half, RewardSpec) and half.weight == 0.5 and get("iou").weight == 1.0
    total = 0.75 * get("exact_match") + 0.25 * get("format")
    scores = Scorer([total]).score(
        *rows(["<think>a</think> <answer>b</answer>", "b", "c"], answer=["b", "b", "b"]), step=1
    )
    assert scores.totals == [1.0, 0.75, 0.0]
    assert scores.parts == {"exact_match": [1.0, 1.0, 0.0], "format": [1.0, 0.0, 0.0]}
    assert scores.metrics["rewards/format/mean"] == pytest.approx(1 / 3)


def test_a_part_that_does_not_apply_leaves_the_rest(rows):
    total = get("exact_match") + resolve_entry({"name": "length", "max_length": 2})
    scores = Scorer([total]).score(*rows(["b"], answer=[None]), step=1)
    assert scores.totals == [1.0] and scores.parts == {"exact_match": [None], "length": [1.0]}


def test_sums_of_sums_keep_options():
    hit = resolve_entry({"name": "iou", "threshold": 0.5, "as": "hit"})
    total = 2 * (get("exact_match") + 2 * get("choice")) + (get("iou") + 0.1 * hit)
    assert weights([total, "format"]) == {
        "exact_match": 2.0, "choice": 4.0, "iou": 1.0, "hit": 0.1, "format": 1.0}  # fmt: skip
    assert [spec.bound for spec in resolve_entries([total])][2:] == [{}, {"threshold": 0.5}]


def test_what_cannot_be_summed():
    one = get("iou")
    for make, message in (
        (lambda: resolve_entries([one + one]), "two entries are named 'iou'"),
        (lambda: float("nan") * one, "reward 'iou': weight is nan"),
        (lambda: "x" * (one + one), "weight is 'x'"),
        (lambda: resolve_entry(one + get("format")), "is not a reward"),
        (lambda: resolve_entries([one + 3]), "3 is not a reward"),
    ):
        with fails(message):
            make()
