import pytest

from mm_grpo.rewards import Scorer
from mm_grpo.rewards.builtins.choice import choice, chosen
from mm_grpo.rewards.builtins.exact_match import exact_match
from mm_grpo.rewards.builtins.format import follows_format
from mm_grpo.rewards.builtins.length import length

# exact_match -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "completion, answer, score",
    [
        ("3", "3", 1.0),
        ("3.", 3, 1.0),
        ("3", 3.0, 1.0),
        ("3.0", "3", 0.0),
        ("-3", "3", 0.0),
        ("Three", "three", 1.0),
        ("three or four", "three", 0.0),
        ("<think>4</think><answer> 3 </answer>", "3", 1.0),
        ("<answer>3</answer> <answer>4</answer>", "3", 0.0),
        ("<answer>$\\boxed{3}$</answer>", "<answer>3</answer>", 1.0),
        ("3", "\\boxed{3}", 1.0),
        ("", "3", 0.0),
        ("<answer></answer>", "3", 0.0),
        ("\x00\ufffd", "3", 0.0),
        ("", "?", 0.0),
        ("?", "?", 1.0),
        ("cafe\u0301", "caf\u00e9", 1.0),
        ("dog", ["cat", "dog"], 1.0),
        ("dog", ["cat", None], 0.0),
        ("true", True, 1.0),
        ("anything", None, None),
        ("", "", None),
        ("", " \n", None),
        ("dog", [], None),
        ("dog", [None], None),
    ],
)
def test_exact_match(completion, answer, score):
    assert exact_match(completion, answer) == score


def test_exact_match_with_case_and_strictly():
    assert exact_match("Cat", "cat", ignore_case=False) == 0.0
    assert exact_match("cat.", "cat", strict=True) == 0.0
    assert exact_match("cat", "cat", strict=True) == 1.0
    assert exact_match("<answer>cat</answer>", "cat", strict=True) == 0.0


# choice ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "B",
        "b",
        " B\n",
        "(B)",
        "(b)",
        "B.",
        "b.",
        "B)",
        "**B**",
        "**B.**",
        "[B]",
        "`B`",
        "B!",
        "B\r\n",
        "Answer: B",
        "answer: b",
        "ANSWER: B",
        "Answer : B.",
        "**Answer:** B",
        "**Answer**: (B) a dog",
        "Answer：B",
        "Answer:\nB",
        "The answer is B",
        "The answer is **B**",
        "the answer is (b) a dog",
        "the answer is 'B'.",
        "The answer is: B",
        "The answer is $B$",
        "The answer is B because A is small",
        "The answer is B, a dog",
        "The answer is option B",
        "The correct option is B.",
        "Final answer - B",
        "Option B is correct",
        "B is correct",
        "B is the right answer",
        "\\boxed{B}",
        "$\\boxed{\\text{B}}$",
        "\\boxed{(B)}",
        "\\boxed{B. a dog}",
        "The answer is \\boxed{B}.",
        "<answer>B</answer>",
        "<answer>b",
        "<answer> (B) a dog </answer>",
        "<think>Answer: A</think>\nB",
        "<answer>A</answer> no <answer>B</answer>",
        "Answer: A. No: the answer is B",
        "The answer is A? No.\nAnswer: B",
        "A\nB",
        "\\boxed{A} so \\boxed{B}",
        "b) a dog",
        "B) a dog",
        "(B) a dog",
        "B. a dog",
        "B: a dog",
        "B, because",
        "- B) a dog",
        "**B. a dog**",
        "B. The dog. Option A is wrong",
        "B\n\nBecause option A is wrong",
        "(B) since (A) is not",
        "I choose B",
        "It is (B)",
        "I think **B**",
        "that would be option B, then",
    ],
)
def test_many_ways_to_choose_b(text):
    assert chosen(text) == "B"
    assert choice(text, "B") == 1.0
    assert choice(text, "A") == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "a dog",
        "A dog",
        "Answer: A dog",
        "the answer is a dog",
        "Answer: Blue",
        "AB",
        "F",
        "é",
        "Ⓑ",
        "\x00",
        "A or B",
        "Answer: A or B",
        "Answer: A, B, C",
        "Answer: A/B",
        "\\boxed{A, B}",
        "A) a cat\nB) a dog",
        "either option A or option B",
        "it is not so",
        "The answer is not B",
        "The answer isn't B",
        "A's dog",
        "\\boxed{}",
        "The answer is B's dog",
        "the answer is e.g. a dog",
        "Banana",
        "<answer></answer>",
        "<answer>a dog</answer> B",
    ],
)
def test_what_chooses_nothing(text):
    assert chosen(text) is None
    assert choice(text, "A") == 0.0


def test_the_start_decides_over_later_mentions():
    assert chosen("(A) is red, (B) is blue") == "A"


@pytest.mark.parametrize("letter", "ABCDE")
def test_every_letter_is_read_in_every_form(letter):
    for form in (
        "{}",
        "({})",
        "{}) a dog",
        "Answer: {}",
        "The answer is {}.",
        "\\boxed{{{}}}",
        "It is ({})",
        "option {}",
    ):
        assert chosen(form.format(letter)) == letter
    assert chosen(f"({letter.lower()})") == letter


@pytest.mark.parametrize("gold", ["B", "b", "(B)", " B. ", "B. a dog", "<answer>B</answer>", "\\boxed{B}"])
def test_forms_of_the_gold_letter(gold):
    assert choice("Answer: B", gold) == 1.0


def test_other_letters_and_bad_golds():
    assert choice("Answer: H", "H", letters="ABCDEFGH") == 1.0
    assert choice("Answer: I", "I", letters="ABCDEFGHI") == 1.0
    assert choice("Answer: B", None) is None
    assert choice("Answer: B", " ") is None
    with pytest.raises(
        ValueError, match="the gold answer 'F' names none of the options ABCDE; see the option `letters`"
    ):
        choice("Answer: B", "F")
    with pytest.raises(
        ValueError, match="letters='abc'; it lists the options as two or more different capitals"
    ):
        choice("Answer: B", "B", letters="abc")


# format ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, score",
    [
        ("<think>a</think> <answer>b</answer>", 1.0),
        ("\n<think>\na\n\nb\n</think>\n\n<answer>b</answer>\n", 1.0),
        ("<think>a</think><answer>b</answer>", 1.0),
        ("<think>猫</think> <answer>é</answer>", 1.0),
        ("<think>a < b > c</think> <answer>b</answer>", 1.0),
        ("", 0.0),
        ("b", 0.0),
        ("<think>a</think>", 0.0),
        ("<answer>b</answer>", 0.0),
        ("<think> </think> <answer>b</answer>", 0.0),
        ("<think>a</think> <answer></answer>", 0.0),
        ("<think>a</think> and <answer>b</answer>", 0.0),
        ("so <think>a</think> <answer>b</answer>", 0.0),
        ("<think>a</think> <answer>b</answer> so", 0.0),
        ("<think>a</think> <answer>b</answer> <answer>c</answer>", 0.0),
        ("<think>a</think> <think>b</think> <answer>c</answer>", 0.0),
        ("<think>a</think> <answer>b</answer></answer>", 0.0),
        ("<answer>b</answer> <think>a</think>", 0.0),
        ("<Think>a</Think> <answer>b</answer>", 0.0),
    ],
)
def test_the_default_format(text, score):
    assert follows_format(text) == score


def test_other_templates_and_patterns():
    assert follows_format("a</think> <answer>b</answer>", template="...</think> <answer>...</answer>") == 1.0
    assert (
        follows_format("<think>a</think> <answer>b</answer>", template="...</think> <answer>...</answer>")
        == 1.0
    )
    assert follows_format("The answer is this.", template="The answer is ...") == 1.0
    assert follows_format("The answer is ", template="The answer is ...") == 0.0
    assert follows_format("I think so", template="...so") == 1.0
    assert follows_format("yes", template="yes") == 1.0
    assert follows_format("yes!", template="yes") == 0.0
    assert follows_format("a\nb", pattern="a.b") == 1.0
    assert follows_format("a\nbc", pattern="a.b") == 0.0
    with pytest.raises(ValueError, match="a template or a pattern, not both"):
        follows_format("a", template="a", pattern="a")
    for template in ("", "<a>......</a>"):
        with pytest.raises(ValueError, match="is empty or has two neighbouring"):
            follows_format("a", template=template)


# length ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size, score",
    [
        (0, 0.0),
        (5, 0.5),
        (9, 0.9),
        (10, 1.0),
        (20, 1.0),
        (21, 0.95),
        (30, 0.5),
        (40, 0.0),
        (100_000, 0.0),
    ],
)
def test_length_falls_linearly_outside_its_bounds(size, score):
    assert length("é" * size, min_length=10, max_length=20) == pytest.approx(score, abs=1e-12)


def test_length_with_its_own_decay_and_in_tokens():
    assert length("x" * 8, min_length=10, decay=4) == 0.5
    assert length("x" * 3, min_length=10, decay=4) == 0.0
    assert length("x" * 21, max_length=20, decay=2) == 0.5
    assert length("x", max_length=0) == 0.0
    assert length("x" * 99, [1, 2, 3], max_length=2, unit="tokens") == 0.5
    assert length("x" * 99, (), min_length=2, unit="tokens") == 0.0


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, "length has no bound; set min_length, max_length or both"),
        (
            {"min_length": 3, "max_length": 2},
            "min_length=3, max_length=2; legal is 0 <= min_length <= max_length",
        ),
        ({"min_length": -1}, "legal is 0 <= min_length"),
        ({"max_length": 2, "decay": 0}, "decay=0; it counts characters"),
        ({"max_length": 2, "unit": "words"}, "unit='words'; legal are 'characters' and 'tokens'"),
    ],
)
def test_length_refuses_settings_that_mean_nothing(arguments, message):
    with pytest.raises(ValueError, match=message):
        length("x", **arguments)


# together --------------------------------------------------------------------------------------


def test_the_built_ins_score_rows(rows):
    entries = ["choice", {"name": "format", "weight": 0.5, "template": "<answer>...</answer>"},
               {"name": "length", "weight": 0.25, "max_length": 2, "unit": "tokens"}]  # fmt: skip
    scores = Scorer(entries).score(*rows(["<answer>B</answer>", "B", ""], answer=["B", "B", None]), step=1)
    assert scores.parts == {"choice": [1.0, 1.0, None], "format": [1.0, 0.0, 0.0], "length": [0.0, 1.0, 1.0]}
    assert scores.totals == [1.5, 1.25, 0.25]
