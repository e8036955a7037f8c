"""format, length, soft_overlong, cosine_length, repetition_penalty and language."""

import pytest

from mm_grpo.rewards import Scorer
from mm_grpo.rewards.builtins.shaping import (
    SCRIPTS,
    cosine_length,
    follows_format,
    language,
    length,
    repetition_penalty,
    soft_overlong,
)

# format ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, score",
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("<think>a < b > c</think> <answer>b</answer>", 1.0),
        ("", 0.0),
        ("<think>a</think>", 0.0),
        ("<answer>b</answer>", 0.0),
        ("<think>a</think> <answer></answer>", 0.0),
        ("<think>a</think> <answer>b <answer>c</answer>", 0.0),
        ("so <think>a</think> <answer>b</answer>", 0.0),
        ("<think>a</think> <answer>b</answer> so", 0.0),
    ],
)
def test_the_default_format(text, score):
    assert follows_format(text) == score


@pytest.mark.parametrize(
    ("text", "options", "score"),
    [
        ("a</think> <answer>b</answer>", {"template": "...</think> <answer>...</answer>"}, 1.0),
        ("<think>a</think> <answer>b</answer>", {"template": "...</think> <answer>...</answer>"}, 1.0),
        ("The answer is this.", {"template": "The answer is ..."}, 1.0),
        ("The answer is ", {"template": "The answer is ..."}, 0.0),
        ("I think so", {"template": "...so"}, 1.0),
        ("yes!", {"template": "yes"}, 0.0),
        ("a\nb", {"pattern": "a.b"}, 1.0),
        ("a\nbc", {"pattern": "a.b"}, 0.0),
    ],
)
def test_other_templates_and_patterns(text, options, score):
    assert follows_format(text, **options) == score
    with pytest.raises(ValueError, match="a template or a pattern, not both"):
        follows_format("a", template="a", pattern="a")


# length ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "score"),
    [(0, 0.0), (5, 0.5), (9, 0.9), (10, 1.0), (20, 1.0), (21, 0.95), (30, 0.5), (40, 0.0), (100_000, 0.0)],
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
    with pytest.raises(ValueError, match="length has no bound"):
        length("x")


# soft_overlong ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "score"),
    [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (20481, -1.0)],
)
def test_soft_overlong_with_the_numbers_of_its_paper(tokens, score):
    assert soft_overlong("", range(tokens), max_length=20480, buffer=4096) == score


def test_soft_overlong_needs_its_bounds(rows):
    with pytest.raises(Exception, match="reward 'soft_overlong' asks for 'max_length'"):
        Scorer(["soft_overlong"]).score(*rows(["a"]), step=1)
    entry = {"name": "soft_overlong", "max_length": 4, "buffer": 2}
    scores = Scorer([entry]).score(*rows(["a", "abc", "abcdefg"]), step=1)  # a token each
    assert scores.parts == {"soft_overlong": [0.0, -0.5, -1.0]}


# cosine_length ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "tokens", "score"),
    [
        ("3", 0, 1.0),
        ("3", 500, 0.75),
        ("3", 1000, 0.5),
        ("3", 6000, 0.5),
        ("4", 0, -1.0),
        ("4", 500, -0.75),
        ("4", 1000, -0.5),
        ("", 250, -0.9267766952966369),
    ],
)
def test_cosine_length(completion, tokens, score):
    assert cosine_length(completion, "3", range(tokens), max_length=1000) == pytest.approx(score)


def test_cosine_length_with_the_numbers_of_its_paper():
    worth = {"right_short": 2.0, "right_long": 1.0, "wrong_short": -10.0, "wrong_long": 0.0}
    assert cosine_length("3", "3", [], max_length=10, **worth) == 2.0
    assert cosine_length("4", "3", [], max_length=10, **worth) == -10.0
    assert cosine_length("4", "3", range(5), max_length=10, **worth) == pytest.approx(-5.0)


def test_cosine_length_asks_another_reward_what_is_right():
    assert cosine_length("three sheep", "3", [], max_length=10, correct="count") == 1.0
    assert cosine_length("three sheep", "3", [], max_length=10) == -1.0
    assert cosine_length("\\boxed{6/2}", "3", [], max_length=10, correct="math") == 1.0
    assert cosine_length("3", None, [], max_length=10) is None


# repetition_penalty ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "options", "score"),
    [
        ("", {}, 0.0),
        ("a b", {}, 0.0),
        ("a b c d", {}, 0.0),
        ("A a a A", {}, -0.5),
        ("a a a a", {"ngram": 1}, -0.75),
        ("a a a a", {"max_penalty": -2.0}, -1.0),
        ("哈哈哈哈哈", {"unit": "characters", "ngram": 2}, -0.75),
    ],
)
def test_repetition_penalty(text, options, score):
    assert repetition_penalty(text, **options) == pytest.approx(score)


def test_repetition_penalty_of_tokens():
    assert repetition_penalty("", [5, 6, 5, 6, 5, 6], ngram=2, unit="tokens") == pytest.approx(-0.6)


# language --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code", "score"),
    [
        ("Hello", "fr", 1.0),
        ("你好", "zh", 1.0),
        ("ｶﾀｶﾅ", "ja", 1.0),
        ("\u1112\u1161\u11ab", "ko", 1.0),
        ("สวัสดี", "th", 1.0),
        ("你好 ok", "zh", 0.5),
        ("cafe\u0301", "en", 1.0),
        ("", "zh", 1.0),
    ],
)
def test_language(text, code, score):
    assert language(text, code=code) == score


def test_the_languages_in_the_docstring():
    assert " ".join(sorted(SCRIPTS)) in " ".join((language.__doc__ or "").split())


# together --------------------------------------------------------------------------------------


def test_the_built_ins_score_rows(rows):
    entries = ["choice", {"name": "format", "weight": 0.5, "template": "<answer>...</answer>"},
               {"name": "length", "weight": 0.25, "max_length": 2, "unit": "tokens"}]  # fmt: skip
    scores = Scorer(entries).score(*rows(["<answer>B</answer>", "B", ""], answer=["B", "B", None]), step=1)
    assert scores.parts == {"choice": [1.0, 1.0, None], "format": [1.0, 0.0, 0.0], "length": [0.0, 1.0, 1.0]}
    assert scores.totals == [1.5, 1.25, 0.25]
