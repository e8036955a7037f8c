"""docs/own-data.md is true: each row that it shows is read by the config below it, to the last column."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from mm_grpo.config import GRPOConfig
from mm_grpo.data.sources import load_train
from mm_grpo.rewards.scorer import Scorer

PAGE = Path(__file__).parents[2] / "docs" / "own-data.md"
SHOWN = re.findall(r"```json\n(.*?)```\s.*?```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
READ: list[tuple[str, int, dict[str, Any]]] = [  # layout, images, columns
    ("trl", 1, {"answer": "3"}),
    ("trl", 2, {"answer": "first"}),
    ("trl", 1, {"answer": "stop"}),
    ("openai", 1, {"answer": "red"}),
    ("verl", 1, {"answer": "4", "data_source": "clevr"}),
    ("verl", 1, {"answer": "12"}),
    ("ms_swift", 1, {"box": [4, 4, 20, 24]}),
    ("sharegpt", 1, {"answer": "red", "id": "000000033471"}),
    ("r1v", 1, {"answer": "3"}),
]


def test_every_row_shown_is_expected_here() -> None:
    assert len(SHOWN) == len(READ)


@pytest.mark.parametrize("number", range(len(READ)), ids=[f"{i}-{one[0]}" for i, one in enumerate(READ)])
def test_a_row_shown_is_read_by_the_config_below_it(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, config_text = SHOWN[number]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    for at, side in enumerate((32, 40)):
        Image.new("RGB", (side, side)).save(tmp_path / "images" / f"{at}.png")
    assert json.loads(row)
    (tmp_path / "rows.jsonl").write_text(row)
    config = GRPOConfig.from_dict({"model": {"path": "m"}, **yaml.safe_load(config_text)})
    scorer = Scorer(config.rewards)
    dataset = load_train(config, needs=scorer.check)
    layout, images, columns = READ[number]
    sample = dataset.sample(0)
    assert dataset.fields(0).layout == layout
    assert [image.size[0] for image in sample.images] == [32, 40][:images]
    assert {name: sample.columns.get(name) for name in columns} == columns
    roles = [message["role"] for message in sample.messages]
    assert roles[-1] == "user"
    texts = [part["text"] for message in sample.messages for part in message["content"] if "text" in part]
    assert not any("<image>" in text or "<ref-object>" in text for text in texts)
