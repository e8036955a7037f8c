"""The letter that a text chooses, and anls by its definition. Scores by hand are in test_builtin_values.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_grpo.rewards.builtins.text import anls, choice, chosen

# choice ----------------------------------------------------------------------------------------


CHOICES_OF_B = [
    "B", "(B)", "b.", "**B**", "**B.**", "B!", "answer: b", "ANSWER: B", "**Answer:** B", "Answer:\nB",
    "the answer is (b) a dog", "The answer is $B$", "The answer is option B", "Final answer - B",
    "Option B is correct", "\\boxed{B}", "\\boxed{B. a dog}", "The answer is \\boxed{B}.", "<answer>b",
    "<answer>A</answer> no <answer>B</answer>", "A\nB", "\\boxed{A} so \\boxed{B}", "B) a dog", "B: a dog",
    "**B. a dog**", "(B) since (A) is not", "I think **B**",
]  # fmt: skip
NO_CHOICES = [
    "", "a dog", "Answer: A dog", "the answer is a dog", "Answer: Blue", "F", "é", "Ⓑ", "A or B",
    "Answer: A, B, C", "\\boxed{A, B}", "A) a cat\nB) a dog", "either option A or option B", "it is not so",
    "The answer is not B", "A's dog", "\\boxed{}", "The answer is B's dog", "Banana", "<answer>a dog</answer> B",
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "letter"), [*((text, "B") for text in CHOICES_OF_B), *((text, None) for text in NO_CHOICES)]
)
def test_the_letter_that_is_chosen(text, letter):
    assert chosen(text) == letter
    assert choice(text, "B") == float(letter == "B")
    assert choice(text, "A") == 0.0


@pytest.mark.parametrize("letter", "ACDE")
def test_every_letter_is_read_in_every_form(letter):
    forms = [
        "{}",
        "({})",
        "{}) a dog",
        "Answer: {}",
        "The answer is {}.",
        "\\boxed{{{}}}",
        "It is ({})",
        "option {}",
    ]
    assert [chosen(form.format(letter)) for form in forms] == [letter] * len(forms)
    assert chosen(f"({letter.lower()})") == letter
    assert chosen(f"({letter}) is red, (B) is blue") == letter  # the start decides


# anls ------------------------------------------------------------------------------------------


def edits(one, other) -> int:
    """The Levenshtein distance by its definition."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        above, row = row, [i]
        for j, b in enumerate(other, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (a != b)))
    return row[-1]


def reference_anls(given: str, golds: list[str]) -> float:
    """ANLS as its paper states it."""
    best = 0.0
    for gold in golds:
        given_, gold_ = (" ".join(text.lower().split()) for text in (given, gold))
        share = edits(given_, gold_) / max(len(given_), len(gold_), 1)
        best = max(best, 1 - share if share < 0.5 else 0.0)
    return best


words = st.text(alphabet="abAB 1é", max_size=8)
not_blank = st.tuples(words, st.sampled_from("abAB1é"), words).map("".join)


@given(words, st.lists(not_blank, min_size=1, max_size=3))
def test_anls_is_that_of_the_paper(completion, golds):
    assert anls(completion, golds) == pytest.approx(reference_anls(completion, golds))
