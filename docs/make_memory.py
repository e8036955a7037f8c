"""Writes docs/memory.md: `python docs/make_memory.py`. The figures are those of `mm-grpo estimate`."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from mm_grpo.config import GRPOConfig
from mm_grpo.preflight.estimate import GB, fit_sentence, peak_phase, show, sizes_of, what_fits

FILE = Path(__file__).with_name("memory.md")
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

TEXT = """<!-- made by docs/make_memory.py -->
# What a run holds of a GPU's memory

    mm-grpo estimate CONFIG [section.field=value ...] [--gpu 24 --gpu 80] [--processes 8]

needs the model's `config.json` and no weights, no GPU and no rows. The model is built on torch's meta device, with its
adapters and its frozen parts, so that counts of weights are exact. It prints what one process holds while it learns and
while it samples, and for GPUs of 24, 48 and 80 GB (and those of `--gpu`) whether that fits, or which settings make it
fit, in the order of what costs least: let vLLM sleep, give it a share in which its weights and one group fit,
gradient checkpointing, smaller packs, the optimizer in the host's memory, more processes (ZeRO-2), a frozen tower,
LoRA. A run prints the same arithmetic in one line when it starts. Where a group of the longest completions does not fit
one pack, the prompt that its packs share is counted too (`kept prompt`).

What is counted, with its formulas, stands at the head of `mm_grpo/learner/memory.py` and
`mm_grpo/preflight/estimate.py`. Weights, gradients and optimizer states of tiny models are counted to the byte in
`tests/preflight/test_estimate.py`; activations of the text are within a tenth of what autograd keeps, those of a vision
tower and of dense masks within a factor of 1.5. None of it was compared with a GPU's own counters yet;
`make gpu-proof` does that ([benchmarks](../benchmarks/README.md#on-a-gpu)). Not counted are
the buffers of kernels, the allocator's losses (leave a tenth) and what a tower's projector keeps. The host needs
12 bytes for each trained weight with `optim.offload_optimizer`, vLLM's weights at `sleep_level` 1, and, where
checkpoints are written in the background , 12 bytes for each trained weight, of all
processes together (of each of them at `optim.zero_stage` 0), from the first checkpoint to the end; 4 more for each
weight of a reference policy that moves (`algorithm.sync_ref_model`). Where the host has less free, checkpoints are
written while the run waits, with a warning.

## Worked: Qwen2.5-VL-3B, all weights, one GPU of 80 GB

16 prompts, 8 completions of at most 1,024 tokens, vLLM in the process, all else by default, images of at most 1,280
tokens. The shapes are those of the published config.json.

```
{worked}
```

- weights: {weights:,} numbers of 2 bytes = {weight_bytes:.2f} GB.
- gradients: 4 bytes each, summed in fp32 = {gradient_bytes:.2f} GB.
- optimizer: fp32 weights and AdamW's two means, 12 bytes each = {optimizer_bytes:.2f} GB.
- activations: a token keeps 2 x 8 x 2048 + 10 x 2048 + 8 x 11008 = 141,312 bytes in a layer. With checkpointing 36
  layers keep their inputs, 4,096 bytes, and one at a time has all:
  16,384 x (36 x 4,096 + 141,312) = {activation:.2f} GB.

So at `rollout.vllm.sleep_level` 0, where vLLM keeps its 24 GB, it does not fit, and at level 1, where its weights lie
in the host's memory, it does.

## Which card

The same settings; GB of one process at its peak, and what makes it fit.

{table}
"""


def main() -> None:
    FILE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The text of docs/memory.md."""
    with tempfile.TemporaryDirectory() as folder:
        rows = ["| model | trained | GPU | fits |", "|---|---|---|---|"]
        for name, shapes in MODELS.items():
            path = Path(folder) / name
            path.mkdir()
            (path / "config.json").write_text(json.dumps(shapes))
            for what, lora in (("all weights", None), ("LoRA, rank 16", {"rank": 16})):
                for card in CARDS:
                    config = config_of(path, lora)
                    found = fit_sentence(what_fits(config, card * GB, processes=1), card)
                    said = (
                        found.replace(f" on {card} GB", "")
                        .replace("fits with", "with")
                        .replace("fits (", "yes (")
                    )
                    rows.append(f"| {name} | {what} | {card} GB | {said} |")
        config = config_of(Path(folder) / "Qwen2.5-VL-3B", None)
        sizes, image = sizes_of(config)
        found_phases = peak_phase(sizes, image, config, 80 * GB, 1).learner
        out = Console(file=io.StringIO(), width=110, highlight=False)
        show(config, [80], processes=1, console=out)
        stream: Any = out.file
        worked = "\n".join(line.rstrip() for line in stream.getvalue().replace(f"{folder}/", "").splitlines())
    return TEXT.format(
        worked=worked,
        table="\n".join(rows),
        weights=sizes.weights,
        weight_bytes=found_phases.weights / GB,
        gradient_bytes=found_phases.gradients / GB,
        optimizer_bytes=found_phases.optimizer / GB,
        activation=found_phases.activations / GB,
    )


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
    main()
