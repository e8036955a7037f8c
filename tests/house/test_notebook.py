"""The notebooks of examples/: clean on disk, and each runs from top to bottom on a CPU and learns."""

from __future__ import annotations

import ast
import html
import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.metrics_page import not_on_the_page

from mm_grpo.preflight.estimate import phases, sizes_of
from mm_grpo.preflight.memory import GB

pytestmark = pytest.mark.usefixtures("own_rewards")

ROOT = Path(__file__).parents[2]
NOTEBOOKS = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "examples").glob("*.ipynb")
}


def cells(name: str, kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in NOTEBOOKS[name]["cells"] if cell["cell_type"] == kind]


def run_cell(source: str, names: dict[str, Any], where: str) -> Any:
    """Run a cell as a notebook does: the value of its last expression, or None."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, where, "exec"), names)
    return eval(compile(ast.Expression(last.value), where, "eval"), names) if last is not None else None


def run_notebook(name: str) -> tuple[dict[str, Any], list[Any]]:
    """Run all code cells in the working directory; return the variables, and the value of each cell."""
    names, code = dict[str, Any](__name__="notebook"), enumerate(cells(name, "code"))
    return names, [run_cell(source, names, f"{name}.ipynb, code cell {at}") for at, source in code]


def page_of(shown: list[Any]) -> str:
    """Return the page of the run; its frame is hardly longer than it is."""
    (frame,) = [one._repr_html_() for one in shown if hasattr(one, "_repr_html_")]
    page = html.unescape(re.findall("<iframe srcdoc='([^']*)'", frame)[0])
    assert len(frame) < 1.05 * len(page)
    return page


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_no_outputs_are_kept_and_links_lead_somewhere(name: str) -> None:
    code = [cell for cell in NOTEBOOKS[name]["cells"] if cell["cell_type"] == "code"]
    assert [cell for cell in code if cell["outputs"] or cell["execution_count"] is not None] == []
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", "".join(cells(name, "markdown")))
    assert len(links) >= 3 and [link for link in links if not (ROOT / "examples" / link).exists()] == []


@pytest.mark.long
def test_the_notebook_runs_and_the_model_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "examples" / "shapes" / "base", tmp_path / "shapes" / "base")
    monkeypatch.chdir(tmp_path)
    _, shown = run_notebook("notebook")
    (rewards,) = [one for one in shown if isinstance(one, tuple) and len(one) == 3]
    assert rewards == pytest.approx((1.0, 0.8, 0.0))
    (scores,) = [one for one in shown if isinstance(one, dict)]
    assert scores["accuracy_before"] < 0.45 and scores["accuracy_after"] > scores["accuracy_before"] + 0.25
    assert "right_and_short" in page_of(shown)
    rows = [json.loads(line) for line in Path("runs/notebook/metrics.jsonl").read_text().splitlines()]
    assert not_on_the_page({name for row in rows for name in row}) == []


@pytest.mark.long
def test_the_gpu_notebook_runs_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model learns to look and answers from the export; its table of memory is today's `estimate`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MM_GRPO_TINY", "1")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")  # the notebook sets it
    names, shown = run_notebook("gpu_notebook")
    scores, sight = names["summary"], list(names["sight"].values())
    assert scores["accuracy_before"] < 0.65 and scores["accuracy_after"] > 0.9
    assert names["blind"]["score"] < 0.65 and sight[-1] > sight[0] + 1
    assert True in shown and names["taught"]["steps"] == 2 and "sight" in page_of(shown)  # True is check's
    assert shown[-1] in {("left", "left"), ("right", "right")}  # the answer of the export, and the right one
    models = runpy.run_path(str(ROOT / "docs" / "make_memory.py"))["MODELS"]
    (text,) = [cell for cell in cells("gpu_notebook", "markdown") if "mm-grpo estimate" in cell]
    rows = [("Qwen3.5-0.8B", "float32"), ("Qwen3.5-2B", "float32"), ("Qwen2.5-VL-3B", "NF4")]
    for model, held in rows:
        (tmp_path / model).mkdir()
        config_json = json.dumps(models[model.removeprefix("Qwen2.5-VL-")])
        (tmp_path / model / "config.json").write_text(config_json)
        changes = {"model.path": str(tmp_path / model), "model.dtype": "float32"}
        config = names["config"].with_values(
            changes | {"model.quantization": "nf4"} if held == "NF4" else changes
        )
        learns, merged = phases(config, 16 * GB, processes=1).peak / GB, sizes_of(config)[0].sent(config) / GB
        assert f"\n| {model} | {held}, LoRA | {learns:.1f} | {merged:.1f} |" in text
