"""What a GPU machine without an index is given of vLLM."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ASKED = """Requires-Dist: mistral_common[image]>=1.11.5
Requires-Dist: xgrammar<1.0.0,>=0.2.1; platform_machine == "x86_64"
Requires-Dist: mistral_common[audio]; extra == "audio"
"""
INFO = "vllm-0.25.1.dist-info"
KEPT = ("third_party/pynvml.py", "vllm_flash_attn/_vllm_fa3_C.abi3.so", "_C_stable_libtorch.abi3.so")
GONE = ("third_party/deep_gemm/a.h", "vllm_flash_attn/_vllm_fa2_C.abi3.so", "_moe_C_stable_libtorch.abi3.so")


def test_what_finds_the_gpu_stays_and_vllm_says_versions(
    script: Callable[[str], Any], tmp_path: Path
) -> None:
    wheels, wheel = script("gpu_wheels"), tmp_path / "vllm-0.25.1-cp38-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as whole:
        for name in (*KEPT, *GONE):
            whole.writestr(f"vllm/{name}", "x")
        whole.writestr(f"{INFO}/METADATA", ASKED)
        record = "".join(f"vllm/{name},sha256=a,1\n" for name in (KEPT[0], GONE[0]))
        whole.writestr(f"{INFO}/RECORD", f"{record}{INFO}/RECORD,,\n")
    wheels.trim(wheel)
    with zipfile.ZipFile(wheel) as found:
        own = [f"{INFO}/METADATA", f"{INFO}/RECORD"]
        assert found.namelist() == [*(f"vllm/{name}" for name in KEPT), *own]
        lines = found.read(own[1]).decode().splitlines()
    assert lines == [f"vllm/{KEPT[0]},sha256=a,1", f"{INFO}/RECORD,,"]
    asked = wheels.asked_by(wheel, ["mistral-common", "xgrammar", "loguru"])
    assert asked == ["mistral_common[image]>=1.11.5", "xgrammar<1.0.0,>=0.2.1", "loguru"]
