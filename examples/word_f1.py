"""A reward for long texts, such as captions: words in common with the nearest gold. `mm-grpo init --from` copies it.

It knows no synonyms and no order, and the commonest words of the golds please it: a `judge` reads better.
"""

import re
from collections import Counter


def word_f1(completion: str, answer: str | list[str]) -> float:
    """F1 of the words in completion and gold text, each as often as it occurs; the best of several golds."""
    golds = [answer] if isinstance(answer, str) else answer
    return max(_f1(_words(completion), _words(gold)) for gold in golds)


def _words(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text.casefold()))


def _f1(words: Counter[str], gold: Counter[str]) -> float:
    return 2 * (words & gold).total() / max(1, words.total() + gold.total())


assert word_f1("A red bus", ["a bus", "the red car"]) == 0.8
