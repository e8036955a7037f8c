"""The answer of a completion that begins with thinking: what follows `</think>`, for rewards with `strip_thinking`.

Thinking models write `<think>...</think>answer`. The chat templates of some of them end the prompt with `<think>`, and
the completion then has the closing tag alone (`Prompt.opens_thinking`).
"""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def without_thinking(text: str, *, opened: bool = False) -> str:
    """The text behind the last `</think>`, without the white space that it starts with.

    `opened` says that the prompt ended with `<think>`. Thinking that is never closed leaves no answer: the result is
    the empty text. A text that does not think stays as it is.

    >>> without_thinking("<think>2 + 2</think>\\n\\n4"), without_thinking("2 + 2</think>4", opened=True)
    ('4', '4')
    >>> without_thinking("<think>2 + 2"), without_thinking("2 + 2", opened=True), without_thinking("4")
    ('', '', '4')
    """
    _, closed, answer = text.rpartition(CLOSE)
    if OPEN in answer or (opened and not closed):
        return ""
    return answer.lstrip() if closed else text
