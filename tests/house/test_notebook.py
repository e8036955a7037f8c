"""examples/notebook.ipynb: clean on disk, and it runs from top to bottom on a CPU and learns."""

from __future__ import annotations

import ast
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.metrics_page import not_on_the_page

ROOT = Path(__file__).parents[2]
NOTEBOOK = json.loads((ROOT / "examples" / "notebook.ipynb").read_text(encoding="utf-8"))
CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def run_cell(source: str, names: dict[str, Any], number: int) -> Any:
    """Run a cell as a notebook does: the value of its last expression, or None."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    where = f"notebook.ipynb, code cell {number}"
    exec(compile(tree, where, "exec"), names)
    return eval(compile(ast.Expression(last.value), where, "eval"), names) if last is not None else None


def test_no_outputs_are_kept_and_links_lead_somewhere() -> None:
    assert [cell for cell in CELLS if cell["outputs"] or cell["execution_count"] is not None] == []
    links = re.findall(r"\]\(([^)#:]+)\)", "".join("".join(cell["source"]) for cell in NOTEBOOK["cells"]))
    assert len(links) >= 3 and [link for link in links if not (ROOT / "examples" / link).exists()] == []


@pytest.mark.long
def test_the_notebook_runs_and_the_model_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "examples" / "shapes" / "base", tmp_path / "shapes" / "base")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "notebook"}
    shown = [run_cell("".join(cell["source"]), names, at) for at, cell in enumerate(CELLS)]
    (rewards,) = [one for one in shown if isinstance(one, tuple) and len(one) == 3]
    assert rewards == pytest.approx((1.0, 0.8, 0.0))
    (scores,) = [one for one in shown if isinstance(one, dict)]
    assert scores["accuracy_before"] < 0.45 and scores["accuracy_after"] > scores["accuracy_before"] + 0.25
    assert [one for one in shown if "<iframe srcdoc=" in getattr(one, "_repr_html_", str)()]
    rows = [json.loads(line) for line in Path("runs/notebook/metrics.jsonl").read_text().splitlines()]
    assert not_on_the_page({name for row in rows for name in row}) == []
