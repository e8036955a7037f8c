"""The answer of a completion that begins with thinking: what follows `</think>` for rewards with `strip_thinking`.

Thinking models write `<think>...</think>answer`. The chat templates of some of them end the prompt with `<think>`, and
the completion then has the closing tag alone (`Prompt.opens_thinking`).
"""

from __future__ import annotations

import re

OPEN = "<think>"
_TAG = re.compile(r"<(/?)think>", re.IGNORECASE)


def without_thinking(text: str, *, opened: bool = False) -> str:
    """The text behind the last `</think>`, without the white space that it starts with.

    `opened` says that the prompt ended with `<think>`. Thinking that is never closed leaves no answer: the result is
    the empty text. A text that does not think stays as it is.

    >>> without_thinking("<think>2 + 2</think>\\n\\n4"), without_thinking("2 + 2</think>4", opened=True)
    ('4', '4')
    >>> without_thinking("<think>2 + 2"), without_thinking("2 + 2", opened=True), without_thinking("4")
    ('', '', '4')
    """
    tags = list(_TAG.finditer(text))
    if not tags:
        return "" if opened else text
    return text[tags[-1].end() :].lstrip() if tags[-1][1] else ""
