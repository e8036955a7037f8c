"""The programs in examples/ run as they are, and learn."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from PIL import Image
from transformers import AutoModelForImageTextToText

from mm_grpo import RunConfig

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_python_api(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    left = runpy.run_path(str(EXAMPLES / "python_api.py"), run_name="__main__")
    summary = json.loads((tmp_path / "runs/python_api/summary.json").read_text())
    assert summary == json.loads(json.dumps(left["summary"]))
    assert summary["score_before"] < 0.5 and summary["score_after"] > 0.9
    assert (
        f"held-out reward {summary['score_before']:.2f} -> {summary['score_after']:.2f}"
        in capsys.readouterr().out
    )
    if summary["steps"] < 20:  # the callback ended it
        assert summary["stopped"] == f"every held-out row is right after step {summary['steps']}"
        assert summary["score_after"] == 1
    assert (tmp_path / "runs/python_api/report.html").exists()
    AutoModelForImageTextToText.from_pretrained(tmp_path / "runs/python_api/copy")


@pytest.mark.slow
def test_loop() -> None:
    left = runpy.run_path(str(EXAMPLES / "loop.py"), run_name="__main__")
    assert len(left["scores"]) == 14 and left["scores"][0] < 0.45
    assert sum(left["scores"][-3:]) / 3 > 0.7
    seeds = [c.seed for group in left["groups"] for c in group.completions]
    assert seeds == [seed for slot in range(left["P"]) for seed in left["seeds"].group(14, slot)]


@pytest.mark.slow
@pytest.mark.usefixtures("own_rewards")
def test_own_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mm_grpo.RunConfig", lambda **fields: RunConfig(**{**fields, "max_steps": 2}))
    left = runpy.run_path(str(EXAMPLES / "own_reward.py"), run_name="__main__")
    summary = json.loads((tmp_path / "runs/own_reward/summary.json").read_text())
    assert summary["headline"] == "mean right" and summary["steps"] == 2
    parts = summary["first_set"]["after"]["parts"]
    assert set(parts) == {"right", "one_word", "seen"} and parts["right"] == summary["score_after"]
    right, one_word, seen = left["right"], left["one_word"], left["seen"]
    assert (right(" red\n", answer="red"), right("blue", answer="red")) == (1.0, 0.0)
    assert one_word([[{"content": "red"}], [{"content": "a red one"}]]) == [1.0, 0.0]
    red = Image.new("RGB", (84, 84), (220, 40, 40))
    assert [seen(text, images=[red]) for text in ("red", "blue", "many")] == [1.0, 0.0, None]
