"""Writes the table of cards in docs/choosing.md, by `mm-grpo estimate`: `python docs/make_memory.py`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from mm_grpo.config import GRPOConfig
from mm_grpo.preflight.estimate import find_remedy, fit_sentence
from mm_grpo.preflight.memory import GB

PAGE = Path(__file__).with_name("choosing.md")
CARDS = (24, 48, 80)


def qwen2_5_vl(
    hidden: int, inner: int, layers: int, heads: tuple[int, int], words: int, tie: bool
) -> dict[str, Any]:
    """The shapes of a Qwen2.5-VL, as its config.json has them; `heads` with those of keys and values."""
    return {
        "model_type": "qwen2_5_vl", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "vocab_size": words,
        "max_position_embeddings": 128000, "tie_word_embeddings": tie,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": hidden, "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    }  # fmt: skip


MODELS = {
    "Qwen2.5-VL-3B": qwen2_5_vl(2048, 11008, 36, (16, 2), 151_936, tie=True),
    "Qwen2.5-VL-7B": qwen2_5_vl(3584, 18944, 28, (28, 4), 152_064, tie=False),
}
"""Shapes from the models' published config.json files, as assumed here."""

KINDS: dict[str, dict[str, Any]] = {
    "all weights": {}, "LoRA": {"lora": {"rank": 16}}, "QLoRA": {"lora": {"rank": 16}, "quantization": "nf4"},
    "QLoRA, vLLM too": {"lora": {"rank": 16}, "quantization": "nf4"},
}  # fmt: skip

START, END = "<!-- cards: written by docs/make_memory.py -->", "<!-- end of the cards -->"


def page(text: str) -> str:
    """The page with its table of cards made anew."""
    head, tail = text.split(START)[0], text.split(END)[1]
    return f"{head}{START}\n{cards()}\n{END}{tail}"


def cards() -> str:
    """A table of models and GPUs."""
    rows = ["| | " + " | ".join(f"{card} GB" for card in CARDS) + " |", "|---" * (len(CARDS) + 1) + "|"]
    with tempfile.TemporaryDirectory() as folder:
        for name, shapes in MODELS.items():
            path = Path(folder) / name
            path.mkdir()
            (path / "config.json").write_text(json.dumps(shapes))
            for what, model in KINDS.items():
                kwargs = {"quantization": "nf4"} if what.endswith("vLLM too") else {}
                cells = [cell({"path": str(path), **model}, card, kwargs) for card in CARDS]
                rows.append(f"| {name}, {what} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def cell(model: dict[str, Any], card: int, kwargs: dict[str, Any]) -> str:
    found = fit_sentence(find_remedy(config_of(model, kwargs), card * GB, processes=1), card)
    short = found.replace(f" on {card} GB", "").partition(", whatever")[0]
    return short.replace("does not fit", "refused").replace("fits with", "needs")


def config_of(model: dict[str, Any], kwargs: dict[str, Any]) -> GRPOConfig:
    return GRPOConfig.from_dict(
        {
            "model": model,
            "rollout": {
                "engine": "vllm",
                "vllm": {"engine_kwargs": kwargs},
                "prompts_per_step": 16,
                "num_generations": 8,
                "max_completion_length": 1024,
            },
        }
    )


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
