"""The docs are true: generated pages are current, snippets run, links lead somewhere."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(ROOT / "docs").glob("*.md"),
    *ROOT.glob("examples/**/*.md"),
]


def test_the_page_of_fields_is_current() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make_config.py"))["page"]
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == page()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target
        if anchor and (target.endswith(".md") or not target):
            assert anchor in anchors(page.parent / target if target else page), f"{target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the forge makes them."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", heading).replace("`", "") for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in plain}


def snippets(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.slow
def test_the_readmes_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    example, reward = snippets(ROOT / "README.md")
    exec(
        compile(example.replace("runs/python", str(tmp_path / "run")), "README.md", "exec"),
        {"__name__": "readme"},
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["score_before"] < 0.5 and summary["score_after"] > 0.8  # it learns, and one can see it
    after = re.search(r"# reward on held-out rows: ([0-9.]+) -> ([0-9.]+)", example)
    assert after is not None and float(after[1]) == pytest.approx(summary["score_before"], abs=0.05)
    assert float(after[2]) == pytest.approx(summary["score_after"], abs=0.1)
    names: dict[str, object] = {"__name__": "readme_reward"}
    exec(compile(reward, "README.md", "exec"), names)
    score = names["says_a_number"]
    assert callable(score)
    assert (score("it is 12", answer="12"), score("it is 3", answer="12"), score("3", answer="red")) == (
        1.0,
        0.0,
        None,
    )


def test_the_snippets_on_data_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, snippet in enumerate(snippets(ROOT / "docs" / "data.md")):
        exec(compile(snippet, f"data.md, snippet {number}", "exec"), {"__name__": "data"})


@pytest.mark.slow
def test_the_snippets_on_python_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "python"}
    for number, snippet in enumerate(snippets(ROOT / "docs" / "python.md")):
        code = snippet.replace("examples/shapes/base", str(ROOT / "examples" / "shapes" / "base"))
        exec(compile(code, f"python.md, snippet {number}", "exec"), names)
    assert (names["summary"]["steps"], names["summary"]["stopped"]) == (3, "three steps are enough here")
    rows = [json.loads(line) for line in (tmp_path / "runs/page/metrics.jsonl").read_text().splitlines()]
    assert [row.get("my/right") == row.get("rewards/exact_match/mean") for row in rows] == [True] * 4 + [
        False
    ]
    assert (tmp_path / "page_model" / "config.json").exists()


def test_the_snippets_on_turns_run() -> None:
    for number, snippet in enumerate(snippets(ROOT / "docs" / "turns.md")):
        exec(compile(snippet, f"turns.md, snippet {number}", "exec"), {"__name__": "turns"})


def test_the_readmes_arithmetic_is_what_a_run_prints() -> None:
    from mm_grpo.config import GRPOConfig

    config = GRPOConfig(model={"path": "x"}, rollout={"prompts_per_step": 16})
    assert config.batch_sentence(processes=1) in (ROOT / "README.md").read_text(encoding="utf-8")


def words(text: str) -> str:
    return " ".join(text.replace("**", "").split())


def test_every_promise_of_the_readme_has_a_test() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    table = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(table) >= 25
    for promise, tests in table:
        assert words(promise) in words(readme)
        for name in re.findall(r"`([^`]+)`", tests):
            file, _, function = name.partition("::")
            code = (ROOT / "tests" / file).read_text(encoding="utf-8")
            assert f"def {function}(" in code if function else "def test_" in code, name
    first_list = [words(bold) for bold in re.findall(r"^- \*\*(.+?)\*\*", readme, re.DOTALL | re.MULTILINE)]
    assert len(first_list) == 8
    assert [bold for bold in first_list if not any(bold in words(promise) for promise, _ in table)] == []
