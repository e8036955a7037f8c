"""Calls of tools as a run makes them, with a wait until they are answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mm_grpo.environments.host import Episode
from mm_grpo.environments.observation import Observation
from mm_grpo.environments.toolbox import Toolbox


def call_all(box: Toolbox, calls: Sequence[tuple[Episode, str, Mapping[str, Any]]]) -> list[Observation]:
    """Make calls of many conversations, and return the answers in order."""
    tasks = box.host.start(calls)
    while not all(task.finished for task in tasks):
        box.host.work(wait=True)
    return [task.answer for task in tasks]


def call_tool(box: Toolbox, episode: Episode, name: str, arguments: Mapping[str, Any]) -> Observation:
    return call_all(box, [(episode, name, arguments)])[0]


def reward(box: Toolbox, episode: Episode) -> float | None:
    return box.host.rewards([episode])[0]
