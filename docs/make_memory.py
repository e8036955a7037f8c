"""Writes the table of docs/several-gpus.md, by `mm-grpo estimate`: `python docs/make_memory.py`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from mm_grpo.config import GRPOConfig
from mm_grpo.preflight.estimate import find_remedy, phases, sizes_of
from mm_grpo.preflight.memory import GB, Lengths, Servers, moved_bytes

PAGE = Path(__file__).with_name("several-gpus.md")


def qwen2_5_vl(
    hidden: int, inner: int, layers: int, heads: tuple[int, int], words: int, tie: bool, tower: int = 3420
) -> dict[str, Any]:
    """The shapes of a Qwen2.5-VL, as its config.json has them; `heads` with those of keys and values."""
    return {
        "model_type": "qwen2_5_vl", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "vocab_size": words,
        "max_position_embeddings": 128000, "tie_word_embeddings": tie,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {
            "depth": 32, "hidden_size": 1280, "intermediate_size": tower, "num_heads": 16, "patch_size": 14,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": hidden, "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    }  # fmt: skip


def qwen3_5(hidden: int, inner: int, depth: int, tower: int) -> dict[str, Any]:
    """The shapes of a small Qwen3.5, as its config.json has them; `depth` and `tower` are the vision tower's."""
    return {
        "model_type": "qwen3_5", "tie_word_embeddings": True,
        "text_config": {
            "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 24, "num_attention_heads": 8,
            "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "vocab_size": 248_320,
            "tie_word_embeddings": True,
        },
        "vision_config": {
            "depth": depth, "hidden_size": tower, "intermediate_size": 4 * tower, "num_heads": tower // 64,
            "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": hidden,
            "num_position_embeddings": 2304,
        },
    }  # fmt: skip


QWEN3_TOWER = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 2048, "num_position_embeddings": 2304,
}  # fmt: skip

MODELS: dict[str, dict[str, Any]] = {
    "Qwen3.5-0.8B": qwen3_5(1024, 3584, 12, 768),
    "Qwen3.5-2B": qwen3_5(2048, 6144, 24, 1024),
    "3B": qwen2_5_vl(2048, 11008, 36, (16, 2), 151_936, tie=True),
    "7B": qwen2_5_vl(3584, 18944, 28, (28, 4), 152_064, tie=False),
    "32B": qwen2_5_vl(5120, 27648, 64, (40, 8), 152_064, tie=False, tower=3456),
    "30B-A3B": {
        "model_type": "qwen3_vl_moe", "tie_word_embeddings": False,
        "text_config": {
            "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
            "head_dim": 128, "intermediate_size": 6144, "num_experts": 128, "num_experts_per_tok": 8,
            "moe_intermediate_size": 768, "norm_topk_prob": True, "vocab_size": 151_936,
        },
        "vision_config": {**QWEN3_TOWER, "deepstack_visual_indexes": [8, 16, 24]},
    },
    "35B-A3B": {
        "model_type": "qwen3_5_moe", "tie_word_embeddings": False,
        "text_config": {
            "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2,
            "head_dim": 256, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "vocab_size": 248_320,
        },
        "vision_config": QWEN3_TOWER,
    },
}  # fmt: skip
"""Shapes of Qwen2.5-VL (3B, 7B, 32B), Qwen3-VL and Qwen3.5 from the models' published config.json files, as assumed
here; examples/gpu_notebook.ipynb has the first two. The last is that of its model card and of transformers' defaults
for it; its tower is taken to be Qwen3-VL's, and its layer that predicts several tokens, which transformers does not
load, is left out."""

LORA = {"rank": 16, "target_modules": "all-linear"}
KINDS: dict[str, dict[str, Any]] = {
    "all": {"freeze_vision": True}, "LoRA": {"lora": LORA}, "NF4": {"lora": LORA, "quantization": "nf4"},
}  # fmt: skip
"""What is trained, as the layers full, lora and qlora have it; lora on every linear layer, which experts are not."""


class Row(NamedTuple):
    """A run: `processes` GPUs learn, and `servers` of `tensor_parallel` GPUs sample; without one, vLLM in process."""

    model: str
    kind: str
    processes: int
    stage: int = 2
    servers: int = 0
    tensor_parallel: int = 1
    shared: bool = False
    card: int = 80


ROWS = [
    Row("3B", "NF4", 1, card=24),
    Row("3B", "LoRA", 1, card=24),
    Row("3B", "all", 1),
    Row("3B", "all", 8, card=48),
    Row("7B", "NF4", 1, card=24),
    Row("7B", "LoRA", 1, card=48),
    Row("7B", "all", 1),
    Row("7B", "all", 8),
    Row("7B", "all", 4, servers=4),
    Row("7B", "all", 8, 3, servers=8, shared=True, card=48),
    Row("32B", "NF4", 1),
    Row("32B", "NF4", 4, servers=2, tensor_parallel=2),
    Row("32B", "LoRA", 8),
    Row("32B", "LoRA", 8, 3, servers=4, tensor_parallel=2, shared=True),
    Row("32B", "LoRA", 8, 3, servers=2, tensor_parallel=4, shared=True, card=48),
    Row("32B", "all", 8, 3, servers=4, tensor_parallel=2, shared=True),
    Row("32B", "all", 16, 3, servers=8, tensor_parallel=2, shared=True),
    Row("32B", "all", 64, 3, servers=16, tensor_parallel=4, shared=True),
    Row("30B-A3B", "LoRA", 4, servers=2, tensor_parallel=2),
    Row("30B-A3B", "LoRA", 8, 3, servers=4, tensor_parallel=2, shared=True),
    Row("30B-A3B", "all", 8, 3, servers=4, tensor_parallel=2, shared=True),
    Row("30B-A3B", "all", 16, 3, servers=8, tensor_parallel=2, shared=True),
    Row("30B-A3B", "all", 64, 3, servers=32, tensor_parallel=2, shared=True),
    Row("35B-A3B", "LoRA", 8, 3, servers=4, tensor_parallel=2, shared=True),
    Row("35B-A3B", "all", 16, 3, servers=8, tensor_parallel=2, shared=True),
    Row("35B-A3B", "all", 64, 3, servers=32, tensor_parallel=2, shared=True),
]

START, END = "<!-- runs: written by docs/make_memory.py -->", "<!-- end of the runs -->"


def page(text: str) -> str:
    """The page with its table of runs made anew."""
    head, tail = text.split(START)[0], text.split(END)[1]
    return f"{head}{START}\n{table()}\n{END}{tail}"


def table() -> str:
    """A table of runs, with GB of a GPU."""
    names = "model", "GPUs x GB", "vLLM", "stage", "learns", "samples", "GPUs send", "sync", "needs"
    with tempfile.TemporaryDirectory() as folder:
        rows = [names, ("---",) * len(names), *(cells(row, Path(folder) / row.model) for row in ROWS)]
    return "\n".join(f"|{'|'.join(row)}|" for row in rows)


def config_of(row: Row, path: Path) -> GRPOConfig:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(MODELS[row.model]))
    options: dict[str, Any] = {"sleep_level": 1} if row.shared and row.kind == "LoRA" else {}
    if row.servers and not row.shared:
        options["gpu_memory_utilization"] = 0.9  # as `mm-grpo serve` takes it
    if row.kind == "NF4" and not row.servers:
        options["engine_kwargs"] = {"quantization": "nf4"}
    return GRPOConfig.from_dict(
        {
            "model": {"path": str(path), **KINDS[row.kind]},
            "rollout": {
                "engine": "vllm_server" if row.servers else "vllm",
                "vllm": options,
                "prompts_per_step": 64,
                "num_generations": 8,
                "max_completion_length": 1024,
            },
            "optim": {"zero_stage": row.stage},
        }
    )


def cells(row: Row, path: Path) -> list[str]:
    """The cells of a run with the settings that make it fit, or as it is."""
    config, card = config_of(row, path), row.card * GB
    servers = Servers(row.tensor_parallel, row.shared) if row.servers else None
    remedy = find_remedy(config, card, processes=row.processes, servers=servers)
    settings = (
        {name: yaml.safe_load(value) for name, _, value in (s.partition("=") for s in remedy.settings)}
        if remedy
        else {}
    )
    fits = remedy is not None and not settings.keys() & {
        "model.lora",
        "model.quantization",
        "optim.zero_stage",
    }
    if fits:
        config = config.with_values(settings)
    memory = phases(config, card, processes=row.processes, servers=servers)
    sizes, largest = sizes_of(config)
    moved = moved_bytes(sizes, config, Lengths.of(config, largest, row.processes), row.processes, servers)
    total = row.processes + (0 if row.shared else row.servers * row.tensor_parallel)
    layout = f"{row.servers}x{row.tensor_parallel} {'shared' if row.shared else 'beside'}"
    needs = ", ".join(f"{name.rpartition('.')[2]}={value}".lower() for name, value in settings.items())
    return [
        f"{row.model} {row.kind}",
        f"{total}x{row.card}",
        layout if row.servers else "inside",
        str(row.stage) if row.processes > 1 else "",
        *(f"{sum(part.values()) / GB:.0f}" for part in (memory.learner, memory.rollout)),
        *(figure(size) for size in (moved["gathered weights"] + moved["gradients"], moved["sync"])),
        needs if fits else "does not fit",
    ]


def figure(size: int) -> str:
    """GB in two digits."""
    return f"{float(f'{size / GB:.2g}'):g}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
