"""docs/rewards.md is true: its list is current, its Python runs, its entries resolve."""

from __future__ import annotations

import re
import runpy
from typing import Any

import yaml
from helpers.documents import ROOT, blocks, read

from mm_grpo.rewards import Scorer, resolve_entry

TEXT = read("docs/rewards.md")


def test_the_list_is_current_and_says_range_and_use_of_each() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_rewards.py"))
    assert made["page"](TEXT) == TEXT
    listed = re.findall(r"^\| `(\w+)` \| .* \| .* \| (.*) \|$", made["listing"](), re.MULTILINE)
    assert [name for name, about in listed if "Range: " not in about or "For " not in about] == []


def test_the_python_runs_from_top_to_bottom(rows: Any) -> None:
    names: dict[str, Any] = {"__name__": "docs_rewards"}
    for block in blocks(TEXT, "python"):
        exec(compile(block, "rewards.md", "exec"), names)
    entries = [{"name": names["short_answer"], "longest": 4}, names["slow_check"], names["shortest_wins"]]
    scorer = Scorer(entries)
    scores = scorer.score(*rows(["red.", "it is red", "blue"], answer=["red", "red", None]), step=1)
    scorer.close()
    assert scores.parts == {
        "short_answer": [1.0, 0.5, None],
        "slow_check": [1.0, 0.0, 0.0],
        "shortest_wins": [1.0, 0.0, 1.0],
    }


def test_the_entries_resolve() -> None:
    shown = [entry for block in blocks(TEXT, "yaml") for entry in yaml.safe_load(block)["rewards"]]
    shipped = [entry for entry in shown if not (isinstance(entry, str) and ":" in entry)]
    assert len(shown) == len(shipped) + 2
    for entry in shipped:
        resolve_entry(entry)
