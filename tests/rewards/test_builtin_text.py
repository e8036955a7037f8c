"""The letter that a text chooses. Scores by hand are in test_builtin_values.py."""

import pytest

from mm_grpo.rewards.builtins.text import choice, chosen

CHOICES_OF_B = [
    "B", "(B)", "b.", "**B**", "**B.**", "B!", "answer: b", "ANSWER: B", "**Answer:** B", "Answer:\nB",
    "the answer is (b) a dog", "The answer is $B$", "The answer is option B", "Final answer - B",
    "Option B is correct", "\\boxed{B}", "\\boxed{B. a dog}", "The answer is \\boxed{B}.", "<answer>b",
    "<answer>A</answer> no <answer>B</answer>", "A\nB", "\\boxed{A} so \\boxed{B}", "B) a dog", "B: a dog",
    "**B. a dog**", "(B) since (A) is not", "I think **B**", "答案：B", "答案是 B。", "故选B", "答案为：(B)",
    "Ｂ", "（Ｂ）", "选项B",
]  # fmt: skip
NO_CHOICES = [
    "", "a dog", "Answer: A dog", "the answer is a dog", "Answer: Blue", "F", "é", "Ⓑ", "A or B",
    "Answer: A, B, C", "\\boxed{A, B}", "A) a cat\nB) a dog", "either option A or option B", "it is not so",
    "The answer is not B", "A's dog", "\\boxed{}", "The answer is B's dog", "Banana", "<answer>a dog</answer> B",
]  # fmt: skip


FORMS_OF_D = [
    "D", "(D)", "D) a dog", "Answer: D", "The answer is D.", "\\boxed{D}", "It is (D)", "option D", "(d)",
    "(D) is red, (B) is blue",  # the start decides
]  # fmt: skip
LETTERS = {"B": CHOICES_OF_B, "D": FORMS_OF_D, None: NO_CHOICES}


@pytest.mark.parametrize(
    ("text", "letter"), [(text, letter) for letter in LETTERS for text in LETTERS[letter]]
)
def test_the_letter_that_is_chosen(text, letter):
    assert chosen(text) == letter
    assert choice(text, "B") == float(letter == "B")
    assert choice(text, "A") == 0.0
