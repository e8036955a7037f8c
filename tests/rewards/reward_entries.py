"""What tests of rewards say often: that an error names something, and entries of a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mm_grpo.errors import RewardError

FILE = Path(__file__).with_name("rewards_to_isolate.py")


def fails(match: str) -> pytest.RaisesExc[RewardError]:
    return pytest.raises(RewardError, match=match)


def named(name: str, fn: Any, **settings: Any) -> dict[str, Any]:
    return {"name": fn, "as": name, **settings}


def isolated(name: str, **settings: Any) -> dict[str, Any]:
    """The entry of a reward of rewards_to_isolate.py, named `r`."""
    return {"name": f"{FILE}:{name}", "as": "r", "isolated": True, "timeout": 20, **settings}
