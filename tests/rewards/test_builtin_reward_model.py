from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mm_grpo.errors import RewardError
from mm_grpo.rewards import Scorer

WORDS = ["[PAD]", "[UNK]", "a", "b", "c", "question", "0", "1", "2", "3", "user", "assistant"]
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny random classifier in a folder, with `labels` outputs."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, LlamaForSequenceClassification, LlamaModel, PreTrainedTokenizerFast

    def build(labels: int = 1, template: str | None = TEMPLATE, head: bool = True) -> str:
        folder: Path = tmp_path_factory.mktemp("reward_model")
        torch.manual_seed(labels)
        config = LlamaConfig(vocab_size=len(WORDS), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                             num_attention_heads=2, num_labels=labels, max_position_embeddings=64,
                             initializer_range=0.5)  # fmt: skip
        (LlamaForSequenceClassification if head else LlamaModel)(config).save_pretrained(folder)
        words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
        words.pre_tokenizer = Whitespace()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        return str(folder)

    return build


def by_hand(folder: str, text: str) -> list[float]:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    model.config.pad_token_id = 0
    with torch.inference_mode():
        logits = model(**AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")).logits
    return [float(value) for value in logits[0]]


def scored(folder: str, rows: Any, texts: list[str], **settings: Any) -> list[float | None]:
    conversational = settings.pop("conversational", True)
    entry = {"name": "reward_model", "model": folder, "device": "cpu", **settings}
    return Scorer([entry], conversational=conversational).score(*rows(texts), step=1).parts["reward_model"]


def test_one_output_is_the_score_whatever_the_batch(make: Any, rows: Any) -> None:
    folder, texts = make(), ["a", "a b c", "", "b b b b"]
    expected = [by_hand(folder, f"user question {i} assistant {text}")[0] for i, text in enumerate(texts)]
    assert len({round(value, 4) for value in expected}) == 4
    for batch_size in (1, 3, 8):
        assert scored(folder, rows, texts, batch_size=batch_size) == pytest.approx(expected, abs=1e-5)


def test_without_a_chat_template_texts_are_joined(make: Any, rows: Any) -> None:
    folder = make(template=None)
    expected = [by_hand(folder, "question 0 a b")[0]]
    assert scored(folder, rows, ["a b"]) == pytest.approx(expected, abs=1e-5)
    assert scored(folder, rows, ["a b"], conversational=False) == pytest.approx(expected, abs=1e-5)


def test_several_outputs(make: Any, rows: Any) -> None:
    folder = make(labels=3)
    logits = by_hand(folder, "user question 0 assistant a")
    assert scored(folder, rows, ["a"], output=2) == pytest.approx([logits[2]], abs=1e-5)
    for settings, message in (({}, "output=None; set the one of the model's 3"), ({"output": 3}, "output=3")):
        with pytest.raises(RewardError, match=message):
            scored(folder, rows, ["a"], **settings)


def test_what_cannot_be_scored(make: Any, rows: Any, tmp_path: Path) -> None:
    folder = make()
    for model, text, message in (
        (folder, "a " * 70, r"prompt and completion 1 have 74 tokens, and .* takes 64"),
        (make(head=False), "a", "is no trained sequence classifier; it lacks score.weight"),
        (str(tmp_path / "none"), "a", "cannot be loaded as a sequence classifier"),
    ):
        with pytest.raises(RewardError, match=message):
            scored(model, rows, ["a", text])
    with pytest.raises(RewardError, match=r"model=\['x'\].*set a folder or hub name"):
        Scorer(["reward_model"]).score(*rows(["a"], model=["x"]), step=1)


def test_code_that_a_reward_model_brings_along_is_not_run_and_nobody_is_asked(
    rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda words="": asked.append(words) or "n")
    (tmp_path / "own.py").write_text("raise AssertionError('it ran')\n")
    classes = {"AutoConfig": "own.C", "AutoTokenizer": ["own.T", None]}
    classes["AutoModelForSequenceClassification"] = "own.M"
    for name, key, value in (("config", "model_type", "own"), ("tokenizer_config", "tokenizer_class", "Own")):
        (tmp_path / f"{name}.json").write_text(json.dumps({key: value, "auto_map": classes}))
    with pytest.raises(RewardError, match="cannot be loaded as a sequence classifier"):
        scored(str(tmp_path), rows, ["a"])
    assert asked == []
