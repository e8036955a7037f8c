"""Tools and environments: what the model is told of them, what they answer, and what is wrong with one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.configs import small_config
from helpers.tiny import picture

from mm_grpo.config import GRPOConfig
from mm_grpo.environments.builtins import Zoom
from mm_grpo.environments.toolbox import Toolbox, toolbox_of
from mm_grpo.errors import ConfigError


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def config(**rollout: Any) -> GRPOConfig:
    return small_config("model", rollout={"environment_workers": 0, **rollout})


def untyped(a):  # type: ignore[no-untyped-def]
    """Do nothing.

    Args:
        a: Anything.
    """


def placed(a: int, /) -> None:
    """Do nothing.

    Args:
        a: Anything.
    """


NUMBER = 3


class NoReset:
    def count(self) -> None:
        """Count."""


class NoTools:
    def reset(self) -> None: ...


class Broken:
    def __init__(self) -> None:
        raise OSError("no route to the server")


@pytest.mark.parametrize(
    ("tools", "factory", "told"),
    [
        ([untyped], None, "untyped"),
        ([lambda x: x], None, "lambda"),
        ([placed], None, "placed takes 'a'"),
        ([add, add], None, "add"),
        ([NUMBER], None, "3"),
        ([partial(add, b=2)], None, "partial"),
        ([], NoReset, "NoReset.*reset"),
        ([], NoTools, "NoTools"),
        ([], NUMBER, "3"),
        ([], Broken, "Broken.*no route to the server"),
    ],
)
def test_a_tool_or_an_environment_that_cannot_serve(tools: Any, factory: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=f"rollout.(tools|environment): .*{told}"):
        Toolbox(config(), tools, factory)


def test_tools_and_environments_that_a_config_names(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        'def twice(a: int) -> int:\n    """Double.\n\n    Args:\n        a: What.\n    """\n    return 2 * a\n'
    )
    box = toolbox_of(config(tools=[f"{file}:twice"], environment="zoom"), None, None)
    assert box is not None and [s["function"]["name"] for s in box.schemas] == ["twice", "zoom"]
    assert toolbox_of(config(), None, None) is None
    with pytest.raises(ConfigError, match=r"rollout.environment = 'zom'"):
        toolbox_of(config(environment="zom"), None, None)


def test_zoom_cuts_at_full_resolution() -> None:
    image = picture(4, 200, 100)
    zoom = Zoom()
    zoom.reset([image])
    cut = zoom.zoom([250, 500, 750, 1000])
    assert cut.size == (100, 50) and cut.tobytes() == image.crop((50, 50, 150, 100)).tobytes()
    assert zoom.zoom([0, 0, 1, 1]).size == (1, 1)
    for bbox in ([0, 0, 0, 5], [0, 0, 1001, 5], [1, 2, 3], "all", [0, 0, "a", 1]):
        with pytest.raises(ValueError, match="bbox is"):
            zoom.zoom(bbox)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="image is 1; there are 1, counted from 0"):
        zoom.zoom([0, 0, 10, 10], image=1)
