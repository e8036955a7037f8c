"""Optional libraries of the built-in rewards, imported when a reward first scores.

`LIBRARIES` says which reward needs which; `require` is called when a config names a reward, so that a missing
package fails before a model is loaded, and `library` imports it. To add one: a line in the table, and the extra
in pyproject.toml.
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
    "mask_iou": ("pycocotools", "pycocotools", "masks"),
    "math": ("math_verify", "math-verify", "math"),
}


def require(reward: str) -> None:
    """RewardError when the library that a built-in needs is not installed."""
    if reward in LIBRARIES and importlib.util.find_spec(LIBRARIES[reward][0]) is None:
        raise RewardError(_missing(reward))


@functools.cache
def library(reward: str, submodule: str = "") -> Any:
    """The imported module that a built-in needs; RewardError when it is not installed."""
    try:
        return importlib.import_module(LIBRARIES[reward][0] + submodule)
    except ModuleNotFoundError as error:
        raise RewardError(_missing(reward)) from error


def _missing(reward: str) -> str:
    _, package, extra = LIBRARIES[reward]
    return (
        f"reward {reward!r} needs the package {package}, which is not installed; install it with "
        f"pip install {package}, or pip install 'mm_grpo[{extra}]'"
    )
