"""Numbers in a text, and math in processes and threads. Scores by hand are in test_builtin_values.py."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_grpo.rewards import get
from mm_grpo.rewards.builtins.numeric import number_words, numbers, numeric


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
    matches = list(numbers("12 % of 5 cm, 3 m/s, 20°C, 4 percent, 7 m², 90^\\circ, 6\\%"))
    assert [number.value for number in matches] == [12, 5, 3, 20, 4, 7, 90, 6]
    assert [number.value for number in matches if number.percent] == [12, 4, 6]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", []),
        ("Seventeen dogs and twenty-three cats", [17, 23]),
        ("twenty thirty", [20, 30]),
        ("ten five", [10, 5]),
        ("sixty six, none and eighteen", [66, 0, 18]),
        ("bone, tent and often", []),
        ("a dozen and two", []),
    ],
)
def test_numbers_in_words(text, values):
    assert number_words(text) == values


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numeric_reads_every_float_as_python_writes_it(value):
    assert numeric(f"so <answer>{value!r}</answer>", repr(value)) == 1.0
    other = repr(value + max(1.0, abs(value)))
    assert numeric(other, value, tolerance=1e-9) in (0.0, float(math.isinf(value * 2)))


@pytest.mark.field_bug("math-thread")
def test_math_scores_from_any_thread_and_masks_what_hangs(rows, scorer):
    options = get("math").options
    assert options.isolated and options.on_timeout == "mask"
    batch = rows(["so \\boxed{\\frac{1}{2}}", "2"], answer=["0.5", "3"])
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(scorer("math").score, *batch, step=1).result().totals == [1.0, 0.0]
