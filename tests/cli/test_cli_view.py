"""`mm-grpo view`: the page of one run, or of several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers.runs import run


def test_the_page_of_a_run_is_written_into_its_folder(tmp_path: Path, command: Any) -> None:
    folder = run(tmp_path / "one", steps=3)
    assert not folder.paths.report.exists()
    done = command("view", tmp_path / "one")
    assert done.code == 0 and done.out.startswith(f"page: {folder.paths.report} (")
    assert "<title>one – mm_grpo</title>" in folder.paths.report.read_text()
    folder.paths.report.write_text("an older version's")  # the run's own by its mark
    assert command("view", tmp_path / "one").code == 0


def test_several_runs_are_one_page(tmp_path: Path, command: Any, monkeypatch: Any) -> None:
    for name in ("one", "two"):
        run(tmp_path / name, steps=3)
    monkeypatch.chdir(tmp_path)
    done = command("view", "one", "two")
    assert done.code == 0 and f"page: {tmp_path / 'view.html'} (" in done.out
    assert "<title>one, two – mm_grpo</title>" in (tmp_path / "view.html").read_text()
    done = command("view", "one", "two", "--output", "both.html")
    assert done.code == 0 and (tmp_path / "both.html").exists()
    assert not (tmp_path / "one" / "report.html").exists()


def test_an_impossible_page_is_one_message(tmp_path: Path, command: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    run(tmp_path / "one", steps=3)
    (tmp_path / "notes.html").write_text("mine")
    for arguments, words in (
        (["empty"], "'empty' is no run folder: it has no config.yaml"),
        (["one", "one"], "is named twice"),
        (["one", "-o", "notes.html"], "--output 'notes.html'"),
    ):
        done = command("view", *arguments)
        assert (done.code, done.err.count("\n")) == (2, 1) and words in done.err, arguments
    assert (tmp_path / "notes.html").read_text() == "mine"
    with (tmp_path / "one" / "metrics.jsonl").open("a") as file:
        file.write("{oops\n")
    done = command("view", "one")
    assert done.code == 2 and "one/metrics.jsonl" in done.err
