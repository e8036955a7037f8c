"""The Triton kernels that FlexAttention runs on an H100, on a machine without a GPU: interpreted or assembled.

    triton_on_cpu.py FOLDER interpret 4/2/16/float32
    triton_on_cpu.py FOLDER assemble 16/2/128/bfloat16

FOLDER is new, and takes what torch and Triton write. A case is heads / heads of keys and values / size of a
head / dtype; `flex.fault` goes through it as it does on a GPU, and `main` prints its answer as JSON.

torch has no backward pass of FlexAttention on a CPU, and writes no Triton kernels without a GPU. So this process, in
which nothing else can be done, makes torch believe in one: its graphs, traced on the CPU, are on cuda:0 when inductor
gets them, and inductor's program around the kernels takes memory of the CPU. flex.py, inductor's choices and the text
of the kernels are unchanged. The names that are replaced are those of torch 2.13 and Triton 3.7.

The interpreter cannot show races, because it takes one place of the grid after the other; rounding to TF32; bfloat16,
whose bits it multiplies as integers. float16 has the same block sizes and stands in for it.
"""

import os
import sys

os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["TRITON_CACHE_DIR"] = sys.argv[1]
os.environ["TRITON_INTERPRET"] = "1" if sys.argv[2] == "interpret" else "0"  # read when Triton is imported
os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # other processes would not have these patches
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a real GPU would contradict

import io
import json
import re
import traceback
from collections import Counter
from contextlib import nullcontext, redirect_stdout
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.nn.attention import flex_attention
from torch.utils._pytree import tree_map_only
from triton.backends.compiler import GPUTarget
from triton.runtime import interpreter

from mm_grpo.learner import flex

H100 = SimpleNamespace(
    name="H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block_optin=232448,
)


def allow_gradients() -> None:
    options = flex_attention._apply_kernel_options

    def as_on_a_gpu(*args: Any) -> dict[str, Any]:
        # on a CPU it is always False, and the backward pass would have nothing to start from
        return {**options(*args), "OUTPUT_LOGSUMEXP": torch.is_grad_enabled()}

    flex_attention._apply_kernel_options = as_on_a_gpu
    flex_attention._validate_device = lambda *tensors: None


def compile_for_gpu(graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
    """`compile_fx_inner`, inductor's half of torch.compile, for a graph that is moved to cuda:0."""
    mode = detect_fake_mode(inputs)

    def moved(x: Tensor) -> Tensor:
        with mode:  # a tensor without memory
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda:0")

    for module in graph.modules():  # the functions of mask and score are graphs of their own
        for node in module.graph.nodes:
            assert "device" not in node.kwargs, f"{node} is made on {node.kwargs['device']}: move it as well"
            if "val" in node.meta:
                node.meta["val"] = tree_map_only(Tensor, moved, node.meta["val"])
    return compile_fx.compile_fx_inner(graph, tree_map_only(Tensor, moved, inputs), **options)


def pretend_gpu() -> None:
    # where this is True, dynamo and tensors without memory set up a real GPU; it may ask for the device count below
    torch.cuda.is_available = lambda: False
    CudaInterface.is_available = CudaInterface.is_bf16_supported = lambda **options: True
    CudaInterface.get_device_properties = torch.cuda.get_device_properties = lambda *device: H100
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    driver = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, H100.warp_size))
    triton.runtime.driver.set_active(driver)
    triton_helpers.set_driver_to_gpu = lambda: None  # each kernel's file would look for a real one


def stay_on_cpu() -> None:
    guards = torch._C._dynamo.guards
    guards._empty_strided_cuda = guards._empty_strided_cpu
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    torch.cuda.set_device = lambda device: None
    torch.cuda._DeviceGuard = nullcontext


def count_launches(seen: list[str]) -> None:
    """Kernels are interpreted, as inductor itself does under TRITON_INTERPRET; their names go to `seen`."""
    run = CachingAutotuner.run

    def counted(self: CachingAutotuner, *args: Any, **options: Any) -> None:
        # on a GPU the fastest is measured; here the first is taken, so let it be the one with the smallest grid
        self.configs.sort(key=lambda config: config.kwargs.get("XBLOCK", 1), reverse=True)
        run(self, *args, **options)
        seen.append(self.fn.__name__)

    CachingAutotuner.run = counted
    # a third of the time goes to a check of overflows that inductor turns off for a GPU too
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def assemble(seen: list[dict[str, Any]]) -> None:
    """Kernels are compiled and assembled for sm_90, and not run; what they take goes to `seen`."""

    def precompile(self: CachingAutotuner, *args: Any, **options: Any) -> None:
        with redirect_stdout(io.StringIO()) as log:
            binary = self._precompile_config(self.configs[0]).kernel
        figures = {"registers": r"Used (\d+) registers", "spilled": r"(\d+) bytes spill stores"}
        found = {name: int(re.search(pattern, log.getvalue())[1]) for name, pattern in figures.items()}
        threads = self.configs[0].num_warps * H100.warp_size
        seen.append({"name": self.fn.__name__, "shared": binary.shared, "threads": threads, **found})

    CachingAutotuner.precompile = precompile
    CachingAutotuner.run = lambda *args, **options: None


def main(interpreted: bool, case: str) -> dict[str, Any]:
    """What `fault` said, and what was seen. Interpreted: the distances by number of rows, and launches by kernel.
    Assembled: the bytes of shared memory, threads, and registers and bytes spilled per thread, of each kernel;
    `fault` has compared what lay in memory."""
    heads, kv_heads, size, dtype = case.split("/")
    seen: list[Any] = []
    distances: dict[int, dict[str, float]] = {}
    compare = flex._distances

    def noted(segments: Tensor, inputs: list[Tensor]) -> dict[str, float]:
        if len(segments) == 1 and not interpreted:
            return {}  # takes as long as several rows, and differs by a few registers
        try:
            distances[len(segments)] = compare(segments, inputs)
        except Exception:
            traceback.print_exc()  # of which `fault` tells a line
            raise
        return distances[len(segments)]

    allow_gradients()
    pretend_gpu()
    stay_on_cpu()
    (count_launches if interpreted else assemble)(seen)
    backend = partial(compile_fx.compile_fx, inner_compile=compile_for_gpu)
    torch.compile = partial(torch.compile, backend=backend)
    flex._distances = noted
    fault = flex.fault(torch.device("cpu"), getattr(torch, dtype), int(heads), int(kv_heads), int(size))
    if interpreted:
        return {"fault": fault, "distances": distances, "launches": Counter(seen)}
    return {"fault": fault, "kernels": seen}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[2] == "interpret", sys.argv[3])))
