"""Which tests stay together where several processes run them (`pytest -n 2`).

pytest-xdist hands out groups of tests; its own groups would build engines, servers and runs that tests share in every
process. Its mark `xdist_group` does nothing with pytest 9.2.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TOGETHER = {
    "engines": (
        "test_vllm_engine",
        "test_vllm_families",
        "test_vllm_faults",
        "test_vllm_turns",
        "test_vllm_weights",
    ),
    "servers": ("test_vllm_served",),
}
"""How files are named, by group: each family's engine is started once for all that use it, and there are never more
servers of vLLM than those of one file, for each needs some 3 GB."""


@cache
def _holds(file: str, words: str) -> bool:
    return words in (ROOT / file).read_text(encoding="utf-8")


def group_of(nodeid: str) -> str:
    """A test's group: one of TOGETHER, its file where tests share a fixture or are quick, or else the test alone.

    >>> group_of("tests/engines/test_vllm_faults.py::test_what_vllm_itself_refuses_names_the_row[qwen2_vl]")
    'engines'
    >>> group_of("tests/run/test_charts.py::test_a[1::2]")
    'tests/run/test_charts.py'
    """
    file = nodeid.partition("::")[0]
    for group, files in TOGETHER.items():
        if Path(file).stem.startswith(files):
            return group
    return nodeid if _is_long(file) and not _holds(file, 'scope="module"') else file


def _is_long(file: str) -> bool:
    return _holds(file, "pytest.mark.long")


def sort(items: list[pytest.Item]) -> None:
    """Long tests first, so that no process is left with one at the end."""
    items.sort(key=lambda item: not _is_long(item.nodeid.partition("::")[0]))
    items.sort(key=lambda item: group_of(item.nodeid) not in TOGETHER)


def scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByGroup(config, log)
