"""A vLLM server with LoRA layers if vLLM has them for its model: `python -m ... SETTINGS FLAGS...`.

SETTINGS is an `EngineSettings` as JSON, FLAGS are those of vLLM's own server, which this becomes. vLLM takes seconds to
import, so this process and not the trainer's looks for LoRA layers. Requests name an adapter that is empty on disk,
until the learner's factors come from memory (`plugin.py`).
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
"""Factors of no layer: vLLM requires some, and accepts this one name without looking for its layer."""


def main() -> None:
    settings = EngineSettings(**json.loads(sys.argv.pop(1)))
    with temporary_folder("adapter") as folder:
        if lora := lora_arguments(settings):
            empty = {"r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
            (folder / "adapter_config.json").write_text(json.dumps(empty))
            save_file(NOTHING, folder / "adapter_model.safetensors")
            sys.argv += flags({**lora, "lora_modules": [f"{NAME}={folder}"]})
        runpy.run_module(ENTRY, run_name="__main__", alter_sys=True)


if __name__ == "__main__":  # the processes of vLLM import their parent's module again
    main()
