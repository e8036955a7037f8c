"""The reward `exact_match`: the final answer is the gold text."""

from __future__ import annotations

from mm_grpo.rewards.builtins.answers import Answer, boxed, final_part, gold_texts, normalise
from mm_grpo.rewards.registry import reward


@reward("exact_match", needs=("answer",))
def exact_match(
    completion: str, answer: Answer, *, ignore_case: bool = True, strict: bool = False
) -> float | None:
    r"""Whether the completion's final answer is the gold answer.

    The final answer is the inside of the last `<answer>` block, else what follows `</think>`, else the
    whole completion; and within that the inside of the last `\boxed{...}`, if there is one. The gold
    text is read in the same way, so a column with "<answer> 3 </answer>" serves as it is. White space,
    the punctuation that ends a sentence and wrapping quotes, asterisks or backticks do not count;
    nor does case, unless `ignore_case=False`. Texts are compared, not numbers: "3.0" is not "3".
    A list of gold answers means any of them. A whole gold float such as 3.0 is the text "3".

    `strict=True` compares the raw completion with the raw gold text, character for character.

    Returns 1.0 or 0.0; None when the row has no gold answer (None, an empty or blank text, an empty list).
    For short answers of one spelling: the recipe shapes, VQA.
    The column is `answer`; another one is named in data.columns ({answer: solution}).

    >>> exact_match("<think>two and one</think> <answer>Three.</answer>", answer="three")
    1.0
    >>> exact_match("three or four", answer="three")
    0.0
    >>> exact_match(r"So it is \boxed{12}.", answer=["12", "twelve"])
    1.0
    """
    texts = gold_texts(answer)
    if not texts:
        return None
    if strict:
        return float(completion in texts)
    given = _final(completion, ignore_case)
    return float(bool(given) and any(given == _final(text, ignore_case) for text in texts))


def _final(text: str, ignore_case: bool) -> str:
    part = final_part(text)
    inner = boxed(part)
    return normalise(part if inner is None else inner, ignore_case=ignore_case)
