import pytest
from reward_entries import fails

from mm_grpo.rewards import Scorer, get, resolve_entries, resolve_entry
from mm_grpo.rewards.spec import RewardSpec, RewardSum


def weights(entries) -> dict[str, float]:
    return {spec.name: spec.weight for spec in resolve_entries(entries)}


def test_a_factor_scales_the_weight():
    half = 0.5 * get("iou")
    assert isinstance(half, RewardSpec) and half.weight == 0.5 and get("iou").weight == 1.0
    assert (half * 3).weight == 1.5 and (-half).weight == -0.5
    assert weights([half]) == {"iou": 0.5}


def test_a_sum_is_its_parts_with_their_weights(rows):
    total = 0.75 * get("exact_match") + 0.25 * get("format")
    assert isinstance(total, RewardSum) and str(total) == "0.75 * exact_match + 0.25 * format"
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


def test_sums_of_sums():
    one = get("exact_match") + 2 * get("choice")
    assert weights([2 * (one + get("format")) - get("count")]) == {
        "exact_match": 2.0, "choice": 4.0, "format": 2.0, "count": -1.0}  # fmt: skip
    assert weights([get("count") - one]) == {"count": 1.0, "exact_match": -1.0, "choice": -2.0}
    assert weights([sum([get("iou"), get("giou")])]) == {"iou": 1.0, "giou": 1.0}
    assert weights([sum([one, get("giou")]), "format"]) == {
        "exact_match": 1.0, "choice": 2.0, "giou": 1.0, "format": 1.0}  # fmt: skip


def test_a_mapping_scales_and_renames_a_sum():
    total = get("iou") + 0.5 * get("format")
    assert weights([{"name": total, "weight": 0.5, "as": "both"}]) == {"both.iou": 0.5, "both.format": 0.25}


def test_options_survive_in_a_sum():
    spec = resolve_entry({"name": "iou", "threshold": 0.5, "as": "hit"})
    (iou, hit) = resolve_entries([get("iou") + 0.1 * spec])
    assert (iou.bound, hit.bound, hit.name, hit.weight) == ({}, {"threshold": 0.5}, "hit", 0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda one, total: resolve_entries([one + one]), "two entries are named 'iou'"),
        (lambda one, total: one + "format", r"'format' cannot be added to 1 \* iou"),
        (lambda one, total: 1 + one, r"1 cannot be added to 1 \* iou"),
        (lambda one, total: float("nan") * one, "reward 'iou': weight is nan"),
        (lambda one, total: total * "x", "weight is 'x'"),
        (lambda one, total: resolve_entry(total), "is not a reward"),
        (lambda one, total: resolve_entries([{"name": total, "threshold": 0.5}]), "no setting 'threshold'"),
        (lambda one, total: resolve_entries([{"name": total, "weight": "much"}]), "weight is 'much'"),
        (
            lambda one, total: resolve_entries([{"name": total, "as": "a b"}]),
            "reward name 'a b' is not legal",
        ),
    ],
)
def test_what_cannot_be_summed(make, message):
    with fails(message):
        make(get("iou"), get("iou") + get("format"))
