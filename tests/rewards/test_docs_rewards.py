"""docs/rewards.md is true: its list is current, its Python runs, its entries resolve."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import yaml

from mm_grpo.rewards import Scorer, resolve_entry
from mm_grpo.rewards.registry import BUILTINS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "rewards.md"
TEXT = PAGE.read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_the_list_is_current() -> None:
    assert runpy.run_path(str(ROOT / "docs" / "make_rewards.py"))["page"](TEXT) == TEXT
    assert set(re.findall(r"^\| `(\w+)` \| ", TEXT, re.MULTILINE)) >= set(BUILTINS)


def test_the_list_says_range_and_use_of_each() -> None:
    for line in re.findall(r"^\| `\w+` \| .* \| .* \| .* \|$", TEXT, re.MULTILINE):
        if line.split("`")[1] in BUILTINS:
            assert "Range: " in line and "For " in line, line


def test_the_python_runs_from_top_to_bottom(rows: Any) -> None:
    names: dict[str, Any] = {"__name__": "docs_rewards"}
    for block in blocks("python"):
        exec(compile(block, str(PAGE), "exec"), names)
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
    shown = [entry for block in blocks("yaml") for entry in yaml.safe_load(block)["rewards"]]
    own = [entry for entry in shown if isinstance(entry, str) and ":" in entry]
    assert len(own) == 2
    for entry in shown:
        if entry not in own:
            resolve_entry(entry)
    resolve_entry({"name": "exact_match", "only_if": "format"})


def test_links_within_the_page() -> None:
    heads = {
        re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-")
        for head in re.findall(r"^## (.*)$", TEXT, re.M)
    }
    assert set(re.findall(r"\]\(#([\w-]+)\)", TEXT)) <= heads
