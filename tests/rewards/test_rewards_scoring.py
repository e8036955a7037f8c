import numpy as np
import pytest
from reward_entries import fails, named

from mm_grpo.rewards import Scorer, TrainerState, reward


def given(*scores):
    """A reward that answers these, in order."""
    left = list(scores)
    return lambda completion: left.pop(0)


def test_totals_are_weighted_sums_of_the_rewards_that_apply(rows):
    applied = [named("a", given(1.0, None, 0.5, None)), named("b", given(0.25, 2.0, None, None), weight=2)]
    scorer = Scorer([*applied, named("watched", lambda completion: 1.0, weight=0)])
    scores = scorer.score(*rows("wxyz"), step=1)
    assert scores.totals == [1.5, 4.0, 0.5, None]  # a weight of 0 makes no total
    assert (scores.parts["a"], scores.parts["b"]) == ([1.0, None, 0.5, None], [0.25, 2.0, None, None])
    assert scores.parts["watched"] == [1.0] * 4 and scores.metrics["rewards/watched/mean"] == 1.0


def test_metrics_are_over_the_completions_that_a_reward_applies_to(rows):
    scores = {"a": (1.0, None, 0.5, 0.0), "b": (None, None, None, 3.0), "nowhere": (None,) * 4}
    scorer = Scorer([named(name, given(*values)) for name, values in scores.items()])
    metrics = scorer.score(*rows("wxyz"), step=1).metrics
    assert not {"rewards/nowhere/mean", "rewards/nowhere/std"} & metrics.keys()
    # a: 1, .5, 0 have mean .5 and sample variance (.25 + 0 + .25) / 2
    assert metrics["rewards/a/mean"] == 0.5 and metrics["rewards/a/std"] == 0.5
    assert metrics["rewards/a/none"] == 1
    assert metrics["rewards/b/mean"] == 3.0 and metrics["rewards/b/std"] == 0.0
    assert metrics["rewards/b/none"] == 3
    assert 0 <= metrics["time/reward/a"] < 1
    assert all(type(value) is float for value in metrics.values())


def test_torch_scalars_and_tensors_are_scores(rows):
    torch = pytest.importorskip("torch")
    one = named("one", lambda completion: torch.tensor(0.5, requires_grad=True))
    batch = named("batch", lambda completions, **kwargs: torch.tensor([1, 2]))
    array = named("array", lambda completions, **kwargs: np.array([True, None], dtype=object))
    scores = Scorer([one, batch, array]).score(*rows("xy"), step=1)
    assert scores.parts == {"one": [0.5, 0.5], "batch": [1.0, 2.0], "array": [1.0, None]}


def test_a_function_gets_what_it_asks_for_by_name(rows):
    seen = {}

    def f(
        completion,
        prompt,
        images,
        sample,
        completion_ids,
        trainer_state,
        box,
        label="none",
        *,
        k=2,
        **columns,
    ):
        seen.update(locals())
        return 1.0

    prompts, completions = rows(["xyz"], box=[(1, 2)], label=["cat"], area=[7])
    Scorer([named("f", f)], max_steps=9).score(prompts, completions, step=4)
    assert seen["completion"] == "xyz" and seen["completion_ids"] == [0, 1, 2]
    assert seen["prompt"] == prompts[0].sample.messages
    assert [i.tobytes() for i in seen["images"]] == [i.tobytes() for i in prompts[0].engine_prompt.images]
    assert seen["images"][0].size == (2, 2) and seen["sample"].uid == prompts[0].sample.uid
    assert seen["trainer_state"] == TrainerState(global_step=4, max_steps=9)
    assert (seen["box"], seen["label"], seen["k"], seen["columns"]) == ((1, 2), "cat", 2, {"area": 7})


def test_a_row_without_a_needed_column_is_not_asked(rows):
    asked = []

    def one(completion, box):
        asked.append(completion)
        return 1.0

    def batch(completions, box, **kwargs):
        assert box == [3] and kwargs["label"] == ["b"]
        kwargs["log_extra"]("seen", ["yes"])
        return [2.0]

    reward("one", needs=("box",))(one)
    reward("batch", needs=("box",))(batch)
    scorer = Scorer(["one", "batch"])
    scores = scorer.score(*rows("xyz", box=[None, 3, 5], label=["a", "b", "c"], absent=[2]), step=1)
    assert asked == ["y"]
    assert scores.totals == [None, 3.0, None]
    assert scores.extra == {"seen": [None, "yes", None]}


def test_a_column_that_a_row_lacks_reads_none_or_the_default(rows):
    got = []

    def f(completion, box, label="none", **columns):
        got.append((box, label, columns))
        return 1.0

    Scorer([named("f", f)]).score(*rows("xy", box=[1, 2], label=["a", "b"], area=[3, 4], absent=[1]), step=1)
    assert got == [(1, "a", {"area": 3}), (None, "none", {"area": None})]


def test_log_metric_is_the_mean_and_log_extra_a_column(rows):
    def f(completion, log_metric, log_extra):
        log_metric("words", len(completion.split()))
        if completion != "b":
            log_extra("parsed", completion.upper())
        return 0.0

    scores = Scorer([named("f", f)]).score(*rows(["a a a", "b"]), step=1)
    assert scores.metrics["words"] == 2.0
    assert scores.extra == {"parsed": ["A A A", None]}


def test_columns_that_do_not_supply_what_a_reward_asks_for_are_refused_at_the_start(rows):
    def f(completion, box):
        return 1.0

    @reward("n", needs=("box",))
    def n(completion, sample):
        return 1.0

    for entry, columns, message in (
        (named("f", f), ["answer", "label"], "reward 'f' asks for 'box', .*columns: answer, label"),
        ("exact_match", [], "^reward 'exact_match' asks for 'answer', [^\n]*columns: none[^\n]*$"),
        ("n", ["answer"], "reward 'n' needs the column 'box', .*columns: answer"),
        ("length", ["max_length"], "reward 'length': 'max_length' is an option .* a column of that name"),
    ):
        with fails(message):
            Scorer([entry]).check(columns)
    with fails("asks for 'box'"):
        Scorer([named("f", f)]).score(*rows("x", answer=["a"]), step=1)
    Scorer([named("f", f, box=1)]).check([])
    Scorer([{"name": "length", "max_length": 3}]).check(["max_length"])
