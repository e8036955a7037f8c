"""What a GPU machine without an index is given of vLLM."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

METADATA = """Metadata-Version: 2.4
Requires-Dist: mistral_common[image]>=1.11.5
Requires-Dist: fastapi[standard]<0.137.0,>=0.133.0
Requires-Dist: xgrammar<1.0.0,>=0.2.1; platform_machine == "x86_64"
Requires-Dist: mistral_common[audio]; extra == "audio"
"""


def test_what_finds_the_gpu_stays_and_versions_are_those_that_vllm_asks_for(
    script: Callable[[str], Any], tmp_path: Path
) -> None:
    wheels, wheel = script("gpu_wheels"), tmp_path / "vllm-0.25.1-cp38-abi3-linux_x86_64.whl"
    flash, kept = "vllm/vllm_flash_attn/", ["vllm/third_party/__init__.py", "vllm/third_party/pynvml.py"]
    kept += [flash + "_vllm_fa3_C.abi3.so", "vllm/_C_stable_libtorch.abi3.so"]
    gone = [flash + "_vllm_fa2_C.abi3.so", "vllm/_moe_C_stable_libtorch.abi3.so", "vllm/vllm-rs"]
    gone += ["vllm/third_party/deep_gemm/include/a.h"]
    with zipfile.ZipFile(wheel, "w") as whole:
        for name in [*kept, *gone]:
            whole.writestr(name, "x")
        whole.writestr("vllm-0.25.1.dist-info/METADATA", METADATA)
    wheels.trim(wheel)
    with zipfile.ZipFile(wheel) as found:
        assert found.namelist() == [*kept, "vllm-0.25.1.dist-info/METADATA"]
    assert wheels.asked_by(wheel, ["mistral-common", "fastapi", "xgrammar", "loguru"]) == [
        "mistral_common[image]>=1.11.5", "fastapi[standard]<0.137.0,>=0.133.0", "xgrammar<1.0.0,>=0.2.1", "loguru",
    ]  # fmt: skip
