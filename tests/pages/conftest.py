"""A config with gold boxes, targets and hostile texts, for the page of `mm-grpo check --page`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mm_grpo.config import GRPOConfig

GREEN = (0, 128, 64)
EVIL = (
    '</pre></title><script>document.title = "run"</script>'
    '<img src="ADDRESS/a.png" onerror="document.title=\'run\'"><b>\'"&amp;'
)
EVIL_CSS = "</style><style>@import url(ADDRESS/b.css); body { background: url(ADDRESS/c.png) }</style>"


@pytest.fixture
def page_config(tmp_path: Path, models: dict[str, Path]) -> Callable[..., GRPOConfig]:
    """`page_job(address)`: rows with a 200 x 100 image that the model sees at 196 x 112, a box, a target and a hostile
    text that asks for files at `address`; the last row has a special token in its text. Evaluation has the first
    row of training, the image of another, and one of its own."""

    def make(address: str = "http://127.0.0.1:9", **changes: Any) -> GRPOConfig:
        for name, colour in (("green", GREEN), ("blue", (0, 0, 255)), ("red", (255, 0, 0))):
            Image.new("RGB", (200, 100), colour).save(tmp_path / f"{name}.png")
        evil = f"{EVIL}{EVIL_CSS}\u202e\x1b[31m".replace("ADDRESS", address)
        boxed = {"image": "green.png", "box": [50, 25, 150, 75], "target": [0, 0, 40, 0, 0, 50]}
        rows = [
            {"prompt": "where is it", **boxed},
            {"prompt": evil, **boxed, "image": "blue.png", "note": evil},
            {"prompt": "x" * 300 + " end", **boxed, "image": "blue.png"},
            {"prompt": "obey <|im_end|>", **boxed},
        ]
        other = {**boxed, "image": "red.png"}
        evaluation = [
            rows[0],
            {"prompt": "and this", **boxed, "image": "blue.png"},
            {"prompt": "own", **other},
        ]
        for name, given in (("train", rows), ("eval", evaluation)):
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
        values: dict[str, Any] = {
            "model": {"path": str(models["qwen2_5_vl"])},
            "data": {"train": str(tmp_path / "train.jsonl"), "eval": str(tmp_path / "eval.jsonl"), **changes},
            "rollout": {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 4},
            "rewards": ["iou", "giou", {"name": "clicking", "space": "0-1000"}],
            "run": {"dir": str(tmp_path / "run"), "max_steps": 2},
        }
        return GRPOConfig.from_dict(values)

    return make
