"""A small config for the commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from helpers import tiny


@pytest.fixture
def config_path(tmp_path: Path, models: dict[str, Path]) -> Path:
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
