"""A vLLM server with LoRA layers, where vLLM has such layers for its model: `python -m ... SETTINGS FLAGS...`.

SETTINGS is an `EngineSettings` as JSON, FLAGS are those of vLLM's own server, which this becomes. Whether the model has
LoRA layers is asked here, for vLLM takes seconds to import. The adapter that requests name stands empty on disk, until
the learner's factors come from memory (`plugin.py`).
"""

from __future__ import annotations

import json
import runpy
import sys

import torch
from safetensors.torch import save_file

from mm_grpo.files import temporary_folder
from mm_grpo.rollout.served.launch import ENTRY, flags
from mm_grpo.rollout.vllm.adapters import NAME, PREFIX
from mm_grpo.rollout.vllm.launch import EngineSettings, lora_arguments

NOTHING = {f"{PREFIX}none.base_layer.lora_{part}.weight": torch.zeros(1, 1) for part in "AB"}
"""Factors of no layer: vLLM takes no adapter without any, and asks of no other name whether it is one of its layers."""


def main() -> None:
    settings = EngineSettings(**json.loads(sys.argv.pop(1)))
    with temporary_folder("adapter") as folder:
        if lora := lora_arguments(settings):
            empty = {"r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
            (folder / "adapter_config.json").write_text(json.dumps(empty))
            save_file(NOTHING, folder / "adapter_model.safetensors")
            sys.argv += flags({**lora, "lora_modules": [f"{NAME}={folder}"]})
        runpy.run_module(ENTRY, run_name="__main__", alter_sys=True)


if __name__ == "__main__":  # vLLM's processes import their parent's module again
    main()
