"""One command in this process, as the console script runs it, and a small job for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from helpers import tiny

from mm_grpo import cli


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    def call(*arguments: Any) -> Result:
        monkeypatch.setattr(sys, "argv", ["mm-grpo", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
        got = capsys.readouterr()
        return Result(code, got.out, got.err)

    return call


@pytest.fixture
def job(tmp_path: Path, models: dict[str, Path]) -> Path:
    """A config with four rows in a JSONL file and images beside it, and a reward in a Python file."""
    for i in range(4):
        tiny.picture(i).save(tmp_path / f"{i}.png")
    rows = [{"prompt": "what is it", "image": f"{i}.png", "answer": "x"} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "mine.py").write_text("def mine(completion):\n    return len(set(completion))\n")
    config = {
        "model": {"path": str(models["qwen2_5_vl"])},
        "data": {"train": str(tmp_path / "rows.jsonl")},
        "rollout": {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 4},
        "rewards": [f"{tmp_path}/mine.py:mine"],
        "run": {"dir": str(tmp_path / "run"), "max_steps": 2},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path
