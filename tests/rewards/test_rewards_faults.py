"""Law 9: nothing that a reward does wrong turns into a score."""

import math
from pathlib import Path

import numpy as np
import pytest
from reward_entries import fails, named

from mm_grpo.rewards import Scorer

HERE = Path(__file__).name


@pytest.mark.parametrize(
    "value, message",
    [
        (float("nan"), "nan, which is not finite"),
        ("0.5", "'0.5', a str"),
        ([1.0], r"\[1.0\], a list"),
        (10**400, "1000.*, which is not finite"),
        (-1e308, r"-1e\+308, which is not finite, or beyond 9.22e\+18"),
        (1j, "1j, a complex"),
        (np.float32("nan"), ".*nan.*, which is not finite"),
    ],
)
def test_what_is_no_score_stops_the_run(rows, value, message):
    scorer = Scorer([named("a", lambda completion: value)])
    with fails(rf"reward 'a', on row 'row:0' .*returned {message}"):
        scorer.score(*rows(["some text"]), step=1)


def test_an_exception_stops_the_run_and_names_its_line(rows):
    def inner(box):
        return 1 / box

    def f(completion, box):
        return inner(box)

    prompts, completions = rows(["x" * 100, "y"], box=[0, 1])
    line = inner.__code__.co_firstlineno + 1
    blamed = rf"row 'row:0' with the completion '{'x' * 80}'... \(100 characters\)"
    with fails(rf"^reward 'f', on {blamed}, raised ZeroDivisionError: .* at .*{HERE}:{line}\.") as caught:
        Scorer([named("f", f)]).score(prompts, completions, step=1)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_the_place_is_in_the_users_file_when_a_library_raised(rows):
    def f(completion):
        return Path(completion).relative_to("/nowhere")

    with fails(rf"raised ValueError: .* at .*{HERE}:{f.__code__.co_firstlineno + 1}\."):
        Scorer([named("f", f)]).score(*rows("x"), step=1)


def test_a_failure_on_an_absent_column_names_the_remedy(rows):
    def f(completion, box):
        return box[0]

    with fails(r"raised TypeError: .*'box' is None; .*needs=\('box',\)"):
        Scorer([named("f", f)]).score(*rows("xy", box=[None, (1,)]), step=1)


@pytest.mark.parametrize(
    "answer, message",
    [
        (
            [1.0],
            "a batch of 2 completions .rows 'row:0', 'row:1'; .* 'x'.*returned 1 scores; legal is a list of 2",
        ),
        (None, "a batch .*returned None; legal is a list of 2"),
        ("ab", "a batch .*returned 'ab'; legal"),
        ((1.0 for _ in "ab"), "a batch .*generator"),
        (np.zeros((2, 1)), "a batch .*legal is a list"),
        ([1.0, math.nan], "row 'row:1' with the completion 'y', returned nan"),
    ],
)
def test_a_batch_answers_with_one_score_per_completion(rows, answer, message):
    with fails(f"reward 'f', on {message}"):
        Scorer([named("f", lambda completions, **kwargs: answer)]).score(*rows("xy"), step=1)


def test_masking_leaves_that_completion_without_a_total(rows, caplog):
    def f(completion):
        return {"x": 1.0, "y": math.nan, "n": None}[completion]

    others = named("b", lambda completions, **kwargs: [0.5] * 4)
    scores = Scorer([named("f", f), others], on_error="mask").score(*rows("xyzn"), step=3)
    assert scores.totals == [1.5, None, None, 0.5]
    watched = Scorer([named("f", f, weight=0), others], on_error="mask").score(*rows("xyzn"), step=3)
    assert watched.totals == [0.5, None, None, 0.5]
    assert scores.parts == {"f": [1.0, None, None, None], "b": [0.5] * 4}
    assert [scores.metrics[f"rewards/f/{what}"] for what in ("errors", "timeouts", "none")] == [2, 0, 1]
    assert scores.metrics["rewards/b/errors"] == 0
    assert "2 completions masked at step 3: reward 'f', on row 'row:1'" in caplog.text


def test_masking_a_batch_masks_all_of_its_completions(rows):
    def raises(completions, **kwargs):
        raise ValueError("no server")

    for fn in (raises, lambda completions, **kwargs: [1.0]):
        scorer = Scorer([named("f", fn), named("b", lambda completion: 0.5)], on_error="mask")
        scores = scorer.score(*rows("xy"), step=1)
        assert scores.totals == [None, None] and scores.parts == {"f": [None, None], "b": [0.5, 0.5]}
        assert (scores.metrics["rewards/f/errors"], scores.metrics["rewards/f/none"]) == (2, 0)
    nan = Scorer([named("f", lambda completions, **kwargs: [1.0, math.nan])], on_error="mask")
    assert nan.score(*rows("xy"), step=1).totals == [1.0, None]
    for key in ("on_error", "on_timeout"):
        with fails(f"{key} is 'skip'; legal are 'stop' and 'mask'"):
            Scorer(["length"], **{key: "skip"})


@pytest.mark.parametrize(
    "log, message",
    [
        (lambda metric, extra: metric("m", math.nan), r"log_metric\('m'\) got nan; legal is a finite number"),
        (lambda metric, extra: metric("m", None), r"log_metric\('m'\) got None"),
        (lambda metric, extra: metric("m", 10**400), r"log_metric\('m'\) got 1000"),
        (lambda metric, extra: metric("rewards/f/mean", 1), r"log_metric\('rewards/f/mean'\)"),
        (lambda metric, extra: extra("e", [1, 2, 3]), r"log_extra\('e'\) got 3 values for 2 completions"),
    ],
)
def test_what_is_logged_is_checked(rows, log, message):
    def f(completions, log_metric, log_extra):
        log(log_metric, log_extra)
        return [1.0, 1.0]

    with fails(message):
        Scorer([named("f", f)]).score(*rows("xy"), step=1)


def test_two_rewards_do_not_log_one_column(rows):
    def f(completion, log_extra):
        log_extra("parsed", 1)

    with fails(r"log_extra\('parsed'\): reward 'f' logs that column too"):
        Scorer([named("f", f), named("g", f)]).score(*rows("x"), step=1)


@pytest.mark.parametrize(
    "error", [GeneratorExit("x"), SystemExit("x"), type("Odd", (BaseException,), {})("x")]
)
def test_an_exception_past_exception_is_a_failure_too(rows, error):
    def f(completion):
        raise error

    with fails(f"raised {type(error).__name__}: x at .*{HERE}"):
        Scorer([f]).score(*rows("a"), step=1)
    scores = Scorer([f], on_error="mask").score(*rows("a"), step=1)
    assert scores.totals == [None] and scores.metrics["rewards/f/errors"] == 1


def test_ctrl_c_in_a_reward_is_no_failure_of_the_reward(rows):
    def f(completion):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Scorer([f], on_error="mask").score(*rows("a"), step=1)


def test_the_message_of_an_exception_is_cut(rows):
    def f(completion):
        raise ValueError("x" * 10_000_000)

    with fails(r"raised ValueError: x+\.\.\. \(10000000 characters\) at") as caught:
        Scorer([f]).score(*rows("a"), step=1)
    assert len(str(caught.value)) < 3000
