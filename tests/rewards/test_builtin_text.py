"""exact_match, choice, contains, anls and edit_similarity."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_grpo.rewards.builtins.text import anls, choice, chosen, contains, edit_similarity, exact_match

# exact_match -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "completion, answer, score",
    [
        ("3.", 3, 1.0),
        ("Three", "three", 1.0),
        ("<answer>$\\boxed{3}$</answer>", "<answer>3</answer>", 1.0),
        ("3", "\\boxed{3}", 1.0),
        ("", "3", 0.0),
        ("dog", ["cat", "dog"], 1.0),
        ("anything", None, None),
    ],
)
def test_exact_match(completion, answer, score):
    assert exact_match(completion, answer) == score


def test_exact_match_with_case_and_strictly():
    assert exact_match("Cat", "cat", ignore_case=False) == 0.0
    strictly = [exact_match(text, "cat", strict=True) for text in ("cat", "cat.", "<answer>cat</answer>")]
    assert strictly == [1.0, 0.0, 0.0]


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


@pytest.mark.parametrize("gold", ["b", "(B)", " B. ", "B. a dog", "<answer>B</answer>", "\\boxed{B}"])
def test_forms_of_the_gold_letter(gold):
    assert choice("Answer: B", gold) == 1.0


def test_other_letters():
    assert choice("Answer: I", "I", letters="ABCDEFGHI") == 1.0


# contains --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("A tabby cat.", "tabby cat", 1.0),
        ("concatenate", "cat", 0.0),
        ("C++ code", "C++", 1.0),
        ("the number 123", "12", 0.0),
        ("<think>a cat</think> a dog", "cat", 0.0),
        ("是一只猫。", "猫", 0.0),
        (".*", ".*", 1.0),
        ("dog", ["cat", "dog", None], 1.0),
        ("dog", None, None),
    ],
)
def test_contains(completion, answer, score):
    assert contains(completion, answer) == score


def test_contains_with_its_options():
    assert contains("是一只猫。", "猫", whole_words=False) == 1.0
    assert contains("Cat", "cat", ignore_case=False) == 0.0
    assert contains("red, blue", ["red", "blue", "green"], mode="share") == pytest.approx(2 / 3)
    assert contains("red, blue", ["red", "blue", "green"], mode="all") == 0.0
    assert contains("red, blue", ["red", "blue"], mode="all") == 1.0
    assert contains("one two three cat", "cat", max_words=3) == 0.0
    assert contains("one two cat", "cat", max_words=3) == 1.0


# anls ------------------------------------------------------------------------------------------


def edits(one, other) -> int:
    """The Levenshtein distance by its definition."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        above, row = row, [i]
        for j, b in enumerate(other, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (a != b)))
    return row[-1]


def reference_anls(given: str, golds: list[str], threshold: float) -> float:
    """ANLS as its paper states it."""
    best = 0.0
    for gold in golds:
        given_, gold_ = (" ".join(text.lower().split()) for text in (given, gold))
        share = edits(given_, gold_) / max(len(given_), len(gold_), 1)
        best = max(best, 1 - share if share < threshold else 0.0)
    return best


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("  BOEING\n", "boeing", 1.0),
        ("boeng", "boeing", 5 / 6),
        ("boe", "boeing", 0.0),  # 3 edits of 6 are not below a half
        ("boei", "boeing", 4 / 6),
        ("<answer>boeing</answer> 747", "boeing", 1.0),
        ("the boeing company", "boeing", 0.0),
        ("12.5%", "12.5 %", 5 / 6),
        ("dog", None, None),
    ],
)
def test_anls(completion, answer, score):
    assert anls(completion, answer) == (score if score is None else pytest.approx(score))


words = st.text(alphabet="abAB 1é", max_size=8)
not_blank = st.tuples(words, st.sampled_from("abAB1é"), words).map("".join)


@given(words, st.lists(not_blank, min_size=1, max_size=3), st.sampled_from([0.3, 0.5, 1.0]))
def test_anls_is_that_of_the_paper(completion, golds, threshold):
    expected = reference_anls(completion, golds, threshold)
    assert anls(completion, golds, threshold=threshold) == pytest.approx(expected)


# edit_similarity -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "answer", "unit", "score"),
    [
        ("kitten", "sitting", "characters", 4 / 7),
        ("a  b\nc", "a b c", "characters", 1.0),
        ("ABC", "abc", "characters", 0.0),
        ("abc", "", "characters", 0.0),
        ("", "", "characters", 1.0),
        ("the cat sat", "the cat sat down", "words", 0.75),
        ("x", None, "words", None),
    ],
)
def test_edit_similarity(completion, answer, unit, score):
    expected = score if score is None else pytest.approx(score)
    assert edit_similarity(completion, answer, unit=unit) == expected


def test_edit_similarity_with_its_options():
    assert edit_similarity("ABC", "abc", ignore_case=True) == 1.0
    start = time.thread_time()
    assert edit_similarity("ab" * 50_000, "ba" * 5_000) == pytest.approx(0.1, abs=0.001)
    assert time.thread_time() - start < 10  # 0.06 s; a thousand million steps of Python take minutes
