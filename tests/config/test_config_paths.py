"""Relative paths in a config file lead beside it when something is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from mm_grpo.config import GRPOConfig


def test_paths_beside_the_file_are_found_and_others_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "recipe"
    (folder / "base").mkdir(parents=True)
    for name in ("rows.jsonl", "held.jsonl", "mine.py"):
        (folder / name).touch()
    (folder / "config.yaml").write_text(
        "model: {path: base}\n"
        "data: {train: rows.jsonl, eval: {a: held.jsonl, b: elsewhere.jsonl, c: {task: shapes}}}\n"
        "rewards: [mine.py:fn, {name: 'mine.py:other', weight: 2}, exact_match, 'gone.py:fn']\n"
    )
    monkeypatch.chdir(tmp_path)
    config = GRPOConfig.from_yaml("recipe/config.yaml")
    assert config.model.path == "recipe/base"
    assert config.data.train == "recipe/rows.jsonl"
    assert config.data.eval == {"a": "recipe/held.jsonl", "b": "elsewhere.jsonl", "c": {"task": "shapes"}}
    assert config.rewards == [
        "recipe/mine.py:fn", {"name": "recipe/mine.py:other", "weight": 2}, "exact_match", "gone.py:fn",
    ]  # fmt: skip


def test_hub_names_absolute_paths_and_overrides_stay(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "config.yaml").write_text("model: {path: Qwen/Qwen2.5-VL-3B-Instruct}\n")
    assert GRPOConfig.from_yaml(tmp_path / "config.yaml").model.path == "Qwen/Qwen2.5-VL-3B-Instruct"
    assert GRPOConfig.from_yaml(tmp_path / "config.yaml", ["model.path=base"]).model.path == "base"
