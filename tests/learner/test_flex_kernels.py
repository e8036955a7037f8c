"""The kernels that a GPU runs for FlexAttention, without a GPU: what they compute, and that an H100 can hold them.

triton_on_cpu.py makes them as for an H100, and has Triton's interpreter run them or ptxas assemble them. Distances are
those of `flex.fault`, for a small pack with every kind of place in it and for its first row alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: there are no kernels to make")

SCRIPT = Path(__file__).with_name("triton_on_cpu.py")
FORWARD = "triton_tem_fused_flex_attention_0"
BACKWARD = "triton_tem_fused_flex_attention_backward_1"
SHARED, REGISTERS = 232_448, 65_536  # of an H100: bytes and registers that one block of threads can have


def kernels(how: str, case: str, folder: Path, deadline: float) -> dict[str, Any]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # vLLM sets it when it is imported, as by a test before
    command = [sys.executable, str(SCRIPT), str(folder), how, case]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=deadline)
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    print(answer, done.stderr[-3000:])  # shown where an assertion fails
    return answer


@pytest.mark.long
def test_kernels_compute_plain_attention(tmp_path: Path) -> None:
    """For several groups of heads, of no power of two."""
    answer = kernels("interpret", "6/2/128/float16", tmp_path, deadline=500)
    # forward and backward ran for two rows and for one, and the forward pass without gradients as well
    launches = {name: n for name, n in answer["launches"].items() if "_tem_" in name}
    assert launches == {FORWARD: 4, BACKWARD: 2}, answer
    assert answer["fault"] is None
    assert sorted(answer["distances"]) == ["1", "2"]
    for rows, distances in answer["distances"].items():
        assert len(distances) == 5
        for what, distance in distances.items():  # 0 would be plain attention against itself
            assert 0 < distance <= 2e-3, (rows, what)


@pytest.mark.long
def test_kernels_of_bfloat16_fit_an_h100(tmp_path: Path) -> None:
    seen = kernels("assemble", "28/4/128/bfloat16", tmp_path, deadline=500)["kernels"]  # of Qwen2.5-VL-7B
    assert [x["name"] for x in seen if "_tem_" in x["name"]] == [FORWARD, BACKWARD, FORWARD]
    for kernel in seen:
        assert 0 < kernel["shared"] <= SHARED, kernel
        assert 0 < kernel["registers"] * kernel["threads"] <= REGISTERS, kernel
        assert kernel["spilled"] <= (1024 if kernel["name"] == BACKWARD else 0), kernel  # bytes per thread
