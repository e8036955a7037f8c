"""Writes the table of cards in docs/choosing.md, by `mm-grpo estimate`: `python docs/make_memory.py`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from mm_grpo.config import GRPOConfig
from mm_grpo.preflight.estimate import fit_sentence, what_fits
from mm_grpo.preflight.memory import GB

PAGE = Path(__file__).with_name("choosing.md")
CARDS = (24, 48, 80)


def qwen3_vl(hidden: int, inner: int, tower: tuple[int, int, int], tie: bool) -> dict[str, Any]:
    """The shapes of a dense Qwen3-VL, as its config.json has them; `tower` is depth, hidden and inner size."""
    depth, width, wide = tower
    text = {
        "model_type": "qwen3_vl_text", "hidden_size": hidden, "intermediate_size": inner, "head_dim": 128,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936,
        "max_position_embeddings": 262144, "tie_word_embeddings": tie,
        "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]},
    }  # fmt: skip
    vision = {
        "depth": depth, "hidden_size": width, "intermediate_size": wide, "num_heads": 16, "patch_size": 16,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304, "out_hidden_size": hidden,
        "deepstack_visual_indexes": [5, 11, 17] if depth == 24 else [8, 16, 24],
    }  # fmt: skip
    return {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": tie,
        "text_config": text,
        "vision_config": vision,
    }


MODELS: dict[str, dict[str, Any]] = {
    "Qwen2.5-VL-3B": {
        "model_type": "qwen2_5_vl", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 128000,
        "tie_word_embeddings": True, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 2048, "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    },
    "Qwen3-VL-4B": qwen3_vl(2560, 9728, (24, 1024, 4096), tie=True),
    "Qwen3-VL-8B": qwen3_vl(4096, 12288, (27, 1152, 4304), tie=False),
}  # fmt: skip
"""Shapes from the models' published config.json files, as assumed here."""

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
            for what, lora in (("all weights", None), ("LoRA", {"rank": 16})):
                cells = [cell(path, lora, card) for card in CARDS]
                rows.append(f"| {name}, {what} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def cell(path: Path, lora: dict[str, int] | None, card: int) -> str:
    found = fit_sentence(what_fits(config_of(path, lora), card * GB, processes=1), card)
    short = found.replace(f" on {card} GB", "").replace("fits with", "with").replace("fits (", "yes (")
    return short.partition(", whatever")[0]


def config_of(path: Path, lora: dict[str, int] | None) -> GRPOConfig:
    return GRPOConfig.from_dict(
        {
            "model": {"path": str(path), "lora": lora},
            "rollout": {
                "engine": "vllm",
                "prompts_per_step": 16,
                "num_generations": 8,
                "max_completion_length": 1024,
            },
        }
    )


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
