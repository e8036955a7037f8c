"""Numbers in a text; numeric, count, chart_relaxed and math."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_grpo.rewards import get
from mm_grpo.rewards.builtins.maths import maths
from mm_grpo.rewards.builtins.numeric import chart_relaxed, count, number_words, numbers, numeric

# numbers in text -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", []),
        ("x-3", [3.0]),
        ("1\u202f234", [1234.0]),
        ("\\frac{3}{4}", [0.75]),
        ("2 1/2", [2.5]),
        ("1/0", []),
        ("1 1/0", []),
        ("$1.5 million", [1500000.0]),
        ("1e999", []),
    ],
)
def test_numbers_in_digits(text, values):
    assert [number.value for number in numbers(text)] == pytest.approx(values)


def test_percent_and_units():
    read = [
        (n.value, n.percent, n.unit)
        for n in numbers("12 % of 5 cm, 3 m/s, 20°C, 4 percent, 7 m², 90^\\circ, 6\\%")
    ]
    assert read == [
        (12, True, "of"), (5, False, "cm"), (3, False, "m/s"), (20, False, "°c"), (4, True, ""), (7, False, "m²"),
        (90, False, "°"), (6, True, "")]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", []),
        ("Seventeen dogs and twenty-three cats", [17, 23]),
        ("twenty thirty", [20, 30]),
        ("ten five", [10, 5]),
        ("two million three thousand", [2_003_000]),
        ("three thousand four hundred and twelve", [3412]),
        ("a dozen", [12]),
        ("a hundred", [100]),
        ("one hundred one hundred", [101, 100]),
    ],
)
def test_numbers_in_words(text, values):
    assert number_words(text) == values


# numeric ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("<think>4</think> three", 3, 1.0),
        ("\\boxed{3} is not 4", 3, 1.0),
        ("\\boxed{\\frac{\\pi}{2}}", 2, 0.0),
        ("50%", 0.5, 1.0),
        ("50%", 50, 1.0),
        ("three or four", 4, 1.0),
        ("0.5", "50%", 1.0),
        ("0.5%", "50%", 0.0),
        ("7", [3, "7"], 1.0),
        ("7", None, None),
    ],
)
def test_numeric(completion, answer, score):
    assert numeric(completion, answer) == score


def test_numeric_with_its_options():
    assert numeric("3.3", "10/3", tolerance=0.02) == 1.0
    assert numeric("3.2", "10/3", tolerance=0.01) == 0.0
    assert numeric("0.09", 0, absolute_tolerance=0.1) == 1.0
    assert numeric("5 m", "5 cm", match_unit=True) == 0.0
    assert numeric("5 CM", "5 cm", match_unit=True) == 1.0
    assert numeric("-105", -100, tolerance=0.05) == 1.0


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numeric_reads_every_float_as_python_writes_it(value):
    assert numeric(f"so <answer>{value!r}</answer>", repr(value)) == 1.0
    other = repr(value + max(1.0, abs(value)))
    assert numeric(other, value, tolerance=1e-9) in (0.0, float(math.isinf(value * 2)))


# count -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("3", "three", 1.0),
        ("3.0", 3, 1.0),
        ("-3", 3, 0.0),
        ("1,024 dots", 1024, 1.0),
        ("I see 2 dogs, one of them black", 2, 1.0),
        ("None.", 0, 1.0),
        ("twenty-one", 21, 1.0),
        ("3", None, None),
    ],
)
def test_count(completion, answer, score):
    assert count(completion, answer) == score
    assert count("9", 10, tolerance=1) == 1.0 and count("8", 10, tolerance=1) == 0.0


# chart_relaxed ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("105", 100, 1.0),
        ("0", 0, 1.0),
        ("12%", "0.12", 1.0),
        ("The answer is 100", "100", 0.0),
        ("<answer>Blue.</answer>", "blue", 1.0),
        ("", "blue", 0.0),
        ("1_00", "100", 0.0),
        ("x", None, None),
    ],
)
def test_chart_relaxed(completion, answer, score):
    assert chart_relaxed(completion, answer) == score


def test_chart_relaxed_with_its_options():
    assert chart_relaxed("2010", "2015", exact_years=True) == 0.0
    assert chart_relaxed("2015.0", "2015", exact_years=True) == 1.0
    assert chart_relaxed("2010.4", "2010.5", exact_years=True) == 1.0
    assert chart_relaxed("101", "100", exact_years=True) == 1.0
    assert chart_relaxed("101", "100", tolerance=0) == 0.0


# math ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("\\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("<answer>2\\sqrt{2}</answer>", "\\sqrt{8}", 1.0),
        ("2\\sqrt{2}", "2", 0.0),
        ("\\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        ("\\boxed{(x+1)^2}", "x^2+2x+2", 0.0),
        ("\\boxed{(1,2)}", "(1, 2)", 1.0),
        ("\\boxed{(2,1)}", "(1, 2)", 0.0),
        ("\\boxed{x=5}", "5", 1.0),
        ("so it is 7.", 7, 1.0),
        ("\\boxed{B}", "B", 1.0),
        ("", 1, 0.0),
        ("\\boxed{9^{9^{9^9}}}", 3, 0.0),
        ("\\boxed{100000!}", 3, 0.0),
        ("2", None, None),
        ("\\boxed{\\text{Monday}}", "\\text{Monday}", 1.0),
        ("\\boxed{\\text{Friday}}", "\\text{Monday}", 0.0),
    ],
)
def test_math(completion, answer, score):
    assert maths(completion, answer) == score


def test_math_runs_isolated_and_masks_what_hangs():
    options = get("math").options
    assert options.isolated and options.on_timeout == "mask"


def test_math_works_in_many_threads_at_once():
    texts = [(f"\\boxed{{\\frac{{{i}}}{{7}}}}", f"{i}/7", f"{i + 1}/7") for i in range(40)]
    here = threading.get_ident()

    def grade(case):
        assert threading.get_ident() != here  # signals work in the main thread alone
        return maths(case[0], case[1]), maths(case[0], case[2])

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(grade, texts)) == [(1.0, 0.0)] * 40


def test_math_logs_nothing_about_its_own_time_out(caplog):
    maths("\\boxed{3}", "3")
    assert "Timeout is disabled" not in caplog.text
