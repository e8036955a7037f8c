"""The rewards that ship with mm_grpo, one subject a file. docs/rewards.md lists them with their options.

- `text.py`          exact_match, contains, choice, anls, edit_similarity
- `numeric.py`       numeric, count, chart_relaxed; numbers in digits and words
- `maths.py`         math
- `grounding.py`     iou, giou, box_match
- `boxes.py`         boxes and points in a text, coordinate spaces
- `clicking.py`      clicking; points and polygons
- `temporal.py`      temporal_iou; intervals of time in a text
- `documents.py`     json_schema
- `shaping.py`       format, length, soft_overlong, repetition_penalty
- `judge.py`         judge, with `chat.py`, the client of its server
- `reward_model.py`  reward_model
- `answers.py`       the final answer of a completion, gold answers, normal forms of texts

To add one: a function whose docstring gives units, range, edge cases, the data it serves and a doctest; its name in
`registry.BUILTINS`; a test of its boundaries; then `python docs/make_rewards.py`. Each takes time linear in the
length of the completion, except edit distances, which have short golds or fast code.

Optional packages are imported when their reward first scores. `LIBRARIES` maps a reward to its package. `require` is
called when a config names a reward, so that a missing package fails before a model is loaded; `library` imports it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

from mm_grpo.errors import RewardError

# reward: (module, package on the index, extra of mm_grpo that installs it)
LIBRARIES = {
    "anls": ("rapidfuzz", "rapidfuzz", "text"),
    "edit_similarity": ("rapidfuzz", "rapidfuzz", "text"),
    "json_schema": ("jsonschema", "jsonschema", "json"),
    "judge": ("openai", "openai", "judge"),
    "math": ("math_verify", "math-verify", "math"),
}


def require(reward: str) -> None:
    """Raise RewardError if the library that a built-in needs is not installed."""
    if reward in LIBRARIES and importlib.util.find_spec(LIBRARIES[reward][0]) is None:
        raise RewardError(_missing(reward))


@functools.cache
def library(reward: str, submodule: str = "") -> Any:
    """Import and return the library of a built-in. Raise RewardError if it is not installed."""
    try:
        return importlib.import_module(LIBRARIES[reward][0] + submodule)
    except ModuleNotFoundError:
        raise RewardError(_missing(reward)) from None


def _missing(reward: str) -> str:
    _, package, extra = LIBRARIES[reward]
    return (
        f"reward {reward!r} needs the package {package}, which is not installed; install it with "
        f"pip install {package}, or pip install 'mm_grpo[{extra}]'"
    )
