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
        ("none here", []),
        ("3", [3.0]),
        ("-3 and +4", [-3.0, 4.0]),
        ("\u22123", [-3.0]),
        ("5-3", [5.0, 3.0]),
        ("x-3", [3.0]),
        ("1,234,567.5", [1234567.5]),
        ("1,23", [1.0, 23.0]),
        ("12,345,67", [12345.0, 67.0]),
        ("1{,}234", [1234.0]),
        ("1\\,234", [1234.0]),
        ("1\u202f234", [1234.0]),
        (".5 and 0.25.", [0.5, 0.25]),
        ("3.2e5", [320000.0]),
        ("3.2 \\times 10^{-2}", [0.032]),
        ("3×10^2", [300.0]),
        ("1/2", [0.5]),
        ("\\frac{3}{4}", [0.75]),
        ("-\\dfrac{3}{4}", [-0.75]),
        ("\\frac34", [0.75]),
        ("2 1/2", [2.5]),
        ("2\\frac{1}{2}", [2.5]),
        ("1½", [1.5]),
        ("¾", [0.75]),
        ("1/0", []),
        ("1 1/0", []),
        ("$1.5 million", [1500000.0]),
        ("1e999", []),
        ("9" * 400, []),
        ("３", [3.0]),
        ("٣", [3.0]),
        ("NaN inf", []),
        ("1.2.3", [1.2, 0.3]),
        ("12:30", [12.0, 30.0]),
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
        ("seven", [7]),
        ("Seventeen dogs and twenty-three cats", [17, 23]),
        ("twenty three", [23]),
        ("one two three", [1, 2, 3]),
        ("twenty thirty", [20, 30]),
        ("ten five", [10, 5]),
        ("one hundred and five", [105]),
        ("two hundred thousand", [200_000]),
        ("three thousand four hundred and twelve", [3412]),
        ("two million three thousand", [2_003_000]),
        ("a dozen", [12]),
        ("two dozen eggs, half of them", [24]),
        ("a hundred", [100]),
        ("none of them", [0]),
        ("one and two", [1, 2]),
        ("anyone, often, tense", []),
        ("one hundred one hundred", [101, 100]),
        ("a thousand", []),
    ],
)
def test_numbers_in_words(text, values):
    assert number_words(text) == values


# numeric ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("3", 3, 1.0),
        ("3.0", "3", 1.0),
        ("It is 3.", 3.0, 1.0),
        ("first 4, then 3", 3, 1.0),
        ("<answer>3</answer> or 4", 3, 1.0),
        ("<think>4</think> three", 3, 1.0),
        ("\\boxed{3} is not 4", 3, 1.0),
        ("\\boxed{\\frac{\\pi}{2}}", 2, 0.0),
        ("\\boxed{\\sqrt{2}}", 2, 0.0),
        ("\\boxed{5\\text{ cm}}", "5 cm", 1.0),
        ("3.0000001", 3, 1.0),
        ("3.0001", 3, 0.0),
        ("1,000", "1000", 1.0),
        ("50%", "50%", 1.0),
        ("50%", 50, 1.0),
        ("50%", 0.5, 1.0),
        ("0.5", "50%", 1.0),
        ("0.5%", "50%", 0.0),
        ("5%", 50, 0.0),
        ("-3", 3, 0.0),
        ("0", 0, 1.0),
        ("0.0001", 0, 0.0),
        ("5 m", "5 cm", 1.0),
        ("$5", "$5.00", 1.0),
        ("1e999", 3, 0.0),
        ("nan", 3, 0.0),
        ("", 3, 0.0),
        ("猫", 3, 0.0),
        ("7", [3, "7"], 1.0),
        ("7", None, None),
        ("7", "", None),
        ("1e300", 1e300, 1.0),
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
    with pytest.raises(ValueError, match=r"tolerance=-1.*; both must be finite and at least 0"):
        numeric("3", 3, tolerance=-1)
    for gold in ("red", "3 or 4", "\\sqrt{2}", "2x + 1", "1e999"):
        with pytest.raises(ValueError, match=r"the gold answer .* is not one number; see the rewards math"):
            numeric("3", gold)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numeric_reads_every_float_as_python_writes_it(value):
    assert numeric(f"so <answer>{value!r}</answer>", repr(value)) == 1.0
    assert numeric(repr(value + max(1.0, abs(value))), value, tolerance=1e-9) in (
        0.0,
        float(math.isinf(value * 2)),
    )


# count -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("3", 3, 1.0),
        ("three", "3", 1.0),
        ("3", "three", 1.0),
        ("There are THREE sheep.", 3, 1.0),
        ("3.0", 3, 1.0),
        ("3.5", 3, 0.0),
        ("-3", 3, 0.0),
        ("3%", 3, 0.0),
        ("1,024 dots", 1024, 1.0),
        ("I see one cat and two dogs: 3", 3, 1.0),
        ("I see 2 dogs, one of them black", 2, 1.0),
        ("<answer>4</answer>", 3, 0.0),
        ("None.", 0, 1.0),
        ("twenty-one", 21, 1.0),
        ("1e3", 1000, 1.0),
        ("1e400", 3, 0.0),
        ("", 3, 0.0),
        ("many", 3, 0.0),
        ("٣", 3, 1.0),
        ("3", None, None),
        ("4", [3, 4], 1.0),
    ],
)
def test_count(completion, answer, score):
    assert count(completion, answer) == score


def test_count_with_its_options():
    assert count("9", 10, tolerance=1) == 1.0 and count("8", 10, tolerance=1) == 0.0
    with pytest.raises(ValueError, match="tolerance=-1; it is a number of things"):
        count("3", 3, tolerance=-1)
    for gold in ("red", 2.5, "-1"):
        with pytest.raises(ValueError, match=r"the gold answer '.*' is no count, such as 3 or three"):
            count("3", gold)


# chart_relaxed ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("100", "100", 1.0),
        ("105", 100, 1.0),
        ("95", 100, 1.0),
        ("105.1", 100, 0.0),
        ("94.9", 100, 0.0),
        ("-100", 100, 0.0),
        ("-102", -100, 1.0),
        ("0", 0, 1.0),
        ("0.01", 0, 0.0),
        ("12%", "0.12", 1.0),
        ("12%", "12", 0.0),
        ("1,050", "1000", 1.0),
        ("$5", "5", 1.0),
        ("2010", "2015", 1.0),
        ("The answer is 100", "100", 0.0),
        ("<answer>Blue.</answer>", "blue", 1.0),
        ("blue", "light blue", 0.0),
        ("", "blue", 0.0),
        ("nan", "nan", 1.0),
        ("inf", "100", 0.0),
        ("1_00", "100", 0.0),
        ("1e999", "100", 0.0),
        ("x", None, None),
        ("Yes", ["No", "yes"], 1.0),
    ],
)
def test_chart_relaxed(completion, answer, score):
    assert chart_relaxed(completion, answer) == score


def test_chart_relaxed_with_its_options():
    assert chart_relaxed("2010", "2015", exact_years=True) == 0.0
    assert chart_relaxed("2015.0", "2015", exact_years=True) == 1.0
    assert chart_relaxed("2010.4", "2010.5", exact_years=True) == 1.0
    assert chart_relaxed("101", "100", tolerance=0) == 0.0
    with pytest.raises(ValueError, match=r"tolerance=5; it is a share of the gold number, in \[0, 1\)"):
        chart_relaxed("1", "1", tolerance=5)


# math ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("\\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("\\boxed{2\\sqrt{2}}", "\\sqrt{8}", 1.0),
        ("<answer>2\\sqrt{2}</answer>", "\\sqrt{8}", 1.0),
        ("2\\sqrt{2}", "2", 0.0),
        ("\\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        ("\\boxed{(x+1)^2}", "x^2+2x+2", 0.0),
        ("\\boxed{(1,2)}", "(1, 2)", 1.0),
        ("\\boxed{(2,1)}", "(1, 2)", 0.0),
        ("\\boxed{90^\\circ}", "90", 1.0),
        ("\\boxed{x=5}", "5", 1.0),
        ("<answer>5 cm</answer>", "5", 1.0),
        ("<answer>3,000</answer>", 3000, 1.0),
        ("The answer is $\\frac{3}{4}$.", "0.75", 1.0),
        ("so it is 7.", 7, 1.0),
        ("\\boxed{1} then \\boxed{2}", 2, 1.0),
        ("\\boxed{B}", "B", 1.0),
        ("\\boxed{\\frac{1}{0}}", 1, 0.0),
        ("\\boxed{}", 1, 0.0),
        ("", 1, 0.0),
        ("猫", 1, 0.0),
        ("\\boxed{" + "(" * 900 + "1" + ")" * 900 + "}", 1, 0.0),
        ("\\boxed{9^{9^{9^9}}}", 3, 0.0),
        ("\\boxed{100000!}", 3, 0.0),
        ("\\boxed{2^{100}}", str(2**100), 1.0),
        ("\\boxed{2^{100000}}", "2^{100000}", 1.0),
        ("2", ["1", "2"], 1.0),
        ("2", None, None),
    ],
)
def test_math(completion, answer, score):
    assert maths(completion, answer) == score


def test_math_refuses_a_gold_answer_that_it_cannot_read():
    for gold in ("<answer></answer>", "\\boxed{}", "1" * 501):
        with pytest.raises(
            ValueError, match=r"the gold answer '.*' is no mathematics; see the rewards exact_match"
        ):
            maths("3", f"\\boxed{{{gold}}}" if gold.isdigit() else gold)
    assert maths("\\boxed{\\text{Monday}}", "\\text{Monday}") == 1.0
    assert maths("\\boxed{\\text{Friday}}", "\\text{Monday}") == 0.0


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
