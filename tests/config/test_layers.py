"""Layers over a config: what is merged, what is replaced, and where relative paths start."""

from __future__ import annotations

from pathlib import Path

from mm_grpo import GRPOConfig
from mm_grpo.config.yaml_file import merge


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_sections_are_merged_and_everything_else_is_replaced() -> None:
    model = {"path": "m", "lora": {"rank": 8, "alpha": 4.0}}
    data = {"train": {"task": "shapes", "size": 4}, "eval": {"a": "a.jsonl"}, "columns": {"answer": "x"}}
    base = {"model": model, "data": data, "rewards": ["iou", "format"]}
    layer = {
        "model": {"lora": {"rank": 2}},
        "data": {"train": {"path": "b.jsonl"}, "eval": {"b": "b.jsonl"}, "columns": {"box": "y"}},
        "rewards": ["count"],
        "run": {"seed": 1},
    }
    merged = merge(base, layer, sources=("data.train", "data.eval"))
    assert merged == {
        "model": {"path": "m", "lora": {"rank": 2, "alpha": 4.0}},
        "data": {
            "train": {"path": "b.jsonl"},  # a source is one value: half of two would be neither
            "eval": {"a": "a.jsonl", "b": "b.jsonl"},
            "columns": {"answer": "x", "box": "y"},
        },
        "rewards": ["count"],
        "run": {"seed": 1},
    }
    merged["model"]["lora"]["rank"] = 5
    assert base["model"]["lora"] == {"rank": 8, "alpha": 4.0} and layer["model"] == {"lora": {"rank": 2}}
    assert merge(base, {"model": {"lora": None}})["model"] == {"path": "m", "lora": None}


def test_later_layers_win_and_fields_win_over_all(tmp_path: Path) -> None:
    base = written(tmp_path / "c.yaml", "model: {path: m}\nrun: {seed: 1, max_steps: 3}\n")
    first = written(tmp_path / "1.yaml", "run: {seed: 2}\nmodel: {lora: {rank: 4}}\n")
    second = written(tmp_path / "2.yaml", "run: {seed: 3}\noptim: {zero_stage: 1}\n")
    config = GRPOConfig.from_yaml(base, layers=[first, second])
    assert (config.run.seed, config.run.max_steps, config.optim.zero_stage) == (3, 3, 1)
    assert config.model.lora is not None and config.model.lora.rank == 4
    assert GRPOConfig.from_yaml(base, layers=[second, first]).run.seed == 2
    assert GRPOConfig.from_yaml(base, ["run.seed=9"], layers=[first]).run.seed == 9
    saved = tmp_path / "saved.yaml"
    config.save(saved)
    assert GRPOConfig.from_yaml(saved) == config
