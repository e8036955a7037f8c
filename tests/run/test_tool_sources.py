"""On resuming, the code of tools and environments is compared, as that of rewards is."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from helpers.configs import small_config

from mm_grpo.environments.toolbox import toolbox_of
from mm_grpo.errors import ConfigError
from mm_grpo.run.manifest import Checkpoint
from mm_grpo.run.same_run import identity_of, refuse_another_run

BODY = '''
FACTOR = 2


def double(a: int) -> int:
    """Double a number.

    Args:
        a: The number.
    """
    return FACTOR * a


class World:
    def reset(self, **row): ...

    def step(self) -> str:
        """Go on."""
        return "on"
'''


def sources(folder: Path, body: str = BODY) -> list[dict[str, Any]]:
    file = folder / "own.py"
    file.write_text(body)
    rollout = {"tools": [f"{file}:double"], "environment": f"{file}:World", "environment_workers": 0}
    box = toolbox_of(small_config("m", rollout=rollout), None, None)
    assert box is not None
    tool_sources: list[dict[str, Any]] = identity_of({}, [], box, [])["tool_sources"]
    return tool_sources


def resume(then: Any, now: Any, **allowed: bool) -> None:
    extra = {"rows": {}, "rewards": [], "before": {}, "tools": [], "tool_sources": then}
    found = Checkpoint(Path("c"), {"step": 1, "extra": extra})
    identity = {"rows": {}, "rewards": [], "tools": [], "tool_sources": now}
    refuse_another_run(found, identity, 5, **allowed)


def test_changed_tools_are_refused_unless_allowed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    then = sources(tmp_path)
    assert [one["name"] for one in then] == ["double", "environment"]
    assert [(one["module"], one["qualname"]) for one in then] == [("own", "double"), ("own", "World")]
    resume(then, sources(tmp_path))
    now = sources(tmp_path, BODY.replace("FACTOR = 2", "FACTOR = 3"))  # beside the function, in its file
    assert now[0]["sha256"] == then[0]["sha256"]
    words = r"^tools: .*double, environment changed.*run.allow_changed_code=true"
    with pytest.raises(ConfigError, match=words):
        resume(then, now)
    with caplog.at_level(logging.WARNING, "mm_grpo"):
        resume(then, now, allow_changed_code=True)
    assert "the new ones are used, because run.allow_changed_code is true" in caplog.text
