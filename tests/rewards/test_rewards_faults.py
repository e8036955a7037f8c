"""Law 9: nothing that a reward does wrong turns into a score."""

import asyncio
import math
import re
from pathlib import Path

import pytest
from helpers.metrics_page import metrics_of_the_page
from reward_entries import fails, named

from mm_grpo.errors import RewardError
from mm_grpo.rewards import Scorer
from mm_grpo.rewards.batch import Batch, TrainerState

HERE = Path(__file__).name
NAN, VAST = float("nan"), 10**400


def inner(box):
    return 1 / box


def logs(what, *values):
    """A batch function that logs something."""

    def f(completions, log_metric, log_extra):
        (log_metric if what == "metric" else log_extra)(*values)
        return [1.0, 1.0]

    return f


def test_no_metric_of_a_reward_has_a_name_of_the_trainers():
    batch = Batch([], [], (), conversational=False, state=TrainerState(1))
    for name in {*metrics_of_the_page(), "step", "log/wrong", "start/step", "run/checked"}:
        with pytest.raises(RewardError, match=re.escape(f"log_metric({name!r})")):
            batch.log_metric(name, 1.0)
    batch.log_metric("my/loss", 1.0)


def in_a_library(completion):
    return Path(completion).relative_to("/nowhere")


def line_of(fn):
    return f"at .*{HERE}:{fn.__code__.co_firstlineno + 1}\\."


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda completion: NAN, "row 'row:0' .*returned nan, which is not finite"),
        (lambda completion: "0.5", "row 'row:0' .*returned '0.5', a str"),
        (lambda completion: VAST, "returned 1000.*, which is not finite"),
        (lambda completion: -1e308, r"returned -1e\+308, which is not finite, or beyond 9.22e\+18"),
        (lambda completion: asyncio.sleep(0), "returned <coroutine .*, a coroutine that nobody awaits"),
        (
            lambda completions, **_: [1.0],
            "a batch of 2 .* .rows 'row:0', 'row:1'; .* 'x'.* 1 scores; legal is a list of 2",
        ),
        (lambda completions, **_: None, "a batch .*returned None; legal is a list of 2"),
        (lambda completions, **_: [1.0, NAN], "row 'row:1' with the completion 'y', returned nan"),
        (logs("metric", "m", NAN), r"log_metric\('m'\) got nan; legal is a finite number"),
        (logs("metric", "rewards/f/mean", 1), r"log_metric\('rewards/f/mean'\)"),
        (logs("extra", "e", [1, 2, 3]), r"log_extra\('e'\) got 3 values for 2 completions"),
        (lambda completion, box: inner(box), rf"row 'row:0' .*raised ZeroDivisionError: .* {line_of(inner)}"),
        (in_a_library, f"raised ValueError: .* {line_of(in_a_library)}"),  # of the user's file
        (lambda completions: [completions[0][0]["content"]["x"]], r"string ind.*set completions: messages"),
        (lambda completion, gone: gone[0], r"raised TypeError: .*'gone' is None; .*needs=\('gone',\)"),
    ],
)
def test_what_is_no_score_stops_the_run(rows, fn, message):
    batch = rows("xy", box=[0, 1], gone=[None, None])
    with fails(f"^reward 'f', on .*{message}"):
        Scorer([named("f", fn)]).score(*batch, step=1)


def test_an_exception_is_the_cause_and_a_long_completion_is_cut(rows):
    blamed = rf"row 'row:0' with the completion '{'x' * 80}'... \(100 characters\)"
    with fails(f"^reward 'f', on {blamed}, raised ZeroDivisionError") as caught:
        Scorer([named("f", lambda completion: inner(0))]).score(*rows(["x" * 100, "y"]), step=1)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_masking_leaves_that_completion_without_a_total(rows, caplog):
    def f(completion):
        return {"x": 1.0, "y": math.nan, "n": None}[completion]

    others = named("b", lambda completions, **kwargs: [0.5] * 4)
    scores = Scorer([named("f", f, on_error="mask"), others]).score(*rows("xyzn"), step=3)
    assert scores.totals == [1.5, None, None, 0.5]
    watched = Scorer([named("f", f, weight=0, on_error="mask"), others]).score(*rows("xyzn"), step=3)
    assert watched.totals == [0.5, None, None, 0.5]
    assert scores.parts == {"f": [1.0, None, None, None], "b": [0.5] * 4}
    assert [scores.metrics[f"rewards/f/{what}"] for what in ("errors", "timeouts", "none")] == [2, 0, 1]
    assert scores.metrics["rewards/b/errors"] == 0
    assert "2 completions masked at step 3: reward 'f', on row 'row:1'" in caplog.text


def test_masking_a_batch_masks_all_of_its_completions(rows):
    def raises(completions, **kwargs):
        raise ValueError("no server")

    for fn in (raises, lambda completions, **kwargs: [1.0]):
        scorer = Scorer([named("f", fn, on_error="mask"), named("b", lambda completion: 0.5)])
        scores = scorer.score(*rows("xy"), step=1)
        assert scores.totals == [None, None] and scores.parts == {"f": [None, None], "b": [0.5, 0.5]}
        assert (scores.metrics["rewards/f/errors"], scores.metrics["rewards/f/none"]) == (2, 0)
    nan = Scorer([named("f", lambda completions, **kwargs: [1.0, math.nan], on_error="mask")])
    assert nan.score(*rows("xy"), step=1).totals == [1.0, None]


def test_two_rewards_do_not_log_one_column(rows):
    def f(completion, log_extra):
        log_extra("parsed", 1)

    with fails(r"log_extra\('parsed'\): reward 'f' logs that column too"):
        Scorer([named("f", f), named("g", f)]).score(*rows("x"), step=1)


@pytest.mark.parametrize(
    "error",
    [GeneratorExit("x"), SystemExit("x"), type("Odd", (BaseException,), {})("x"), KeyboardInterrupt()],
)
def test_an_exception_past_exception_is_a_failure_too_but_ctrl_c(rows, error):
    def f(completion):
        raise error

    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            Scorer([named("f", f, on_error="mask")]).score(*rows("a"), step=1)
        return
    with fails(f"raised {type(error).__name__}: x at .*{HERE}"):
        Scorer([f]).score(*rows("a"), step=1)
    scores = Scorer([named("f", f, on_error="mask")]).score(*rows("a"), step=1)
    assert scores.totals == [None] and scores.metrics["rewards/f/errors"] == 1
