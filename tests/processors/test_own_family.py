"""A family in a file outside the package is trained through the command line, exactly as those that ship."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers import tiny
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from mm_grpo.config import GRPOConfig, ModelConfig
from mm_grpo.errors import ConfigError, DataError
from mm_grpo.import_path import load_named
from mm_grpo.learner.forward import PackForward
from mm_grpo.learner.model import load_model
from mm_grpo.messages import with_limits
from mm_grpo.processors.base import Processor, load_processor
from mm_grpo.rollout.prefetch import Prefetcher

FILE = Path(__file__).with_name("picture_llama.py")
NAMED = f"{FILE}:PictureLlamaProcessor"
UNREAD = (".encoder.layers.2.", "post_layernorm")  # features are those of the layer before


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = load_named(f"{FILE}:build", "model.processor", ConfigError)
    folder: Path = build(tmp_path_factory.mktemp("picture_llama"))
    return folder


@pytest.fixture(scope="module")
def processor(path: Path) -> Processor:
    return load_processor(str(path), processor=NAMED)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("layer_types", ["full_attention", "sliding_attention"], "its layers have sliding_attention"),
        ("sliding_window", 64, "its layers have sliding_attention"),
        ("final_logit_softcapping", 30.0, r"its final_logit_softcapping is 30\.0"),
        ("attention_dropout", 0.1, r"its attention_dropout is 0\.1"),
        ("bias", True, "its head has a bias"),
    ],
)
def test_inexact_models_fail(path: Path, processor: Processor, field: str, value: Any, words: str) -> None:
    model = load_model(ModelConfig(path=str(path), device="cpu"), processor.family)
    processor.family.check(model)
    if field == "bias":
        model.set_output_embeddings(torch.nn.Linear(32, 272, bias=True))
    else:
        setattr(model.config.text_config, field, value)
    with pytest.raises(ConfigError, match=f"a llama cannot be trained exactly: {words};"):
        PackForward(model, processor, GRPOConfig.from_dict({"model": {"path": "x"}}))


def test_it_is_trained_through_the_command_line(path: Path, tmp_path: Path, command: Any) -> None:
    shutil.copy(FILE, tmp_path / "my_family.py")
    rows = []
    for i in range(4):
        tiny.picture(i).save(tmp_path / f"{i}.png")
        rows.append({"prompt": "what is it", "image": f"{i}.png"} if i else {"prompt": "just words"})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text("def mine(completion):\n    return sum(map(ord, completion)) % 7\n")
    config = {
        "model": {"path": str(path), "processor": "my_family.py:PictureLlamaProcessor"},
        "data": {"train": "rows.jsonl"},
        "rollout": {"prompts_per_step": 4, "num_generations": 3, "max_completion_length": 8},
        "rewards": ["mine.py:mine"],
        "optim": {"learning_rate": 1e-3},
        "run": {"dir": str(tmp_path / "run"), "max_steps": 2},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    for name in ("check", "train"):
        done = command(name, tmp_path / "config.yaml")
        assert done.code == 0, done
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 2
    assert metrics[0]["sync/logp_gap"] <= 1e-5
    for row in metrics:
        assert row["sampling/sampling_logp_difference/max"] <= 1e-5
        assert row["learner/update_norm"] > 0
    trained = tmp_path / "run" / "model"
    before, after = (load_file(folder / "model.safetensors") for folder in (path, trained))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) == any(part in name for part in UNREAD), name
    again = load_processor(str(trained), processor=NAMED)
    assert again.prompt(tiny.sample("r", "hello")).token_ids == tuple(again.tokenizer("hello")["input_ids"])  # type: ignore[attr-defined]
    assert AutoModelForImageTextToText.from_pretrained(trained).config.model_type == "picture_llama"


def test_the_package_knows_nothing_of_it(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no processor for model type 'picture_llama'; .* name it in"):
        load_processor(str(path))


def test_a_row_with_settings_needs_a_processor_that_says_it_follows_them(path: Path) -> None:
    row = tiny.sample("train:7", "what", (tiny.picture(1),))
    limited = replace(row, messages=with_limits(row.messages, {"max_pixels": 9}))
    arguments = replace(row, chat_template_kwargs={"n": 1})
    processor: Any = load_processor(str(path), processor=NAMED)
    prefetcher = Prefetcher(processor, 0)
    prefetcher.process(row)
    for wanted in (limited, arguments):
        with pytest.raises(DataError, match=r"^train:7: .*PictureLlamaProcessor \(model.processor\)"):
            prefetcher.process(wanted)
    processor.follows_rows = True
    assert prefetcher.process(limited).uid == "train:7"
