"""Peak memory of the log-probs of a group's tokens, against the size of the vocabulary: ours and TRL's.

    OMP_NUM_THREADS=2 python benchmarks/memory.py [--json FILE] [--vocabularies 8192,32768,151936]
    python benchmarks/memory.py --device cuda --dtype bfloat16 --tokens 8192 --width 2048

Measured is one forward and backward from M hidden states and a head [V, D] to log-probs, entropies and the
gradients of both: ours is `token_logprobs`, TRL's the function under its fused head, with the tile that its trainer
uses. Both take the same tensors, and their gradients are asserted equal. Per-token results cost next to
nothing, so what is left are the logits, or the tiles of them that exist at one time.

`extra` is the peak over what was allocated before, less the two gradients, which every way has to hold. Each
figure comes from a process of its own. On a CPU the peak is the kernel's high-water mark of resident memory (VmHWM,
set back by /proc/self/clear_refs), so it needs Linux; blocks from 64 KiB on are made to go straight to the kernel
(MALLOC_MMAP_THRESHOLD_), or freed memory from before would hide part of a peak; and a run at a small size comes
first, for the buffers that a library makes once. On a GPU it is torch.cuda.max_memory_allocated. Each process
also allocates 32 MiB and asserts that the method reports them within 1 MiB.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from common import Machine
from harness import arguments, machine_of, parse, positive, positives, run, versions
from torch import Tensor

from mm_grpo.learner.logprobs import chunk_bytes_of, token_logprobs

MIB = 1 << 20
PROBE = 32 * MIB
LIMIT = 600
"""Seconds that one process may take."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02}
"""Largest difference of the gradients, of their norm. bf16 sums of tiles round, in TRL's way and in ours."""


def ours(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    return token_logprobs(hidden, head, targets)[0]


def trl(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    results = ChunkedLogProbFunction.apply(
        hidden, head, None, targets, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ("log_probs", "entropy")
    )
    logp: Tensor = results[0]
    return logp


SIDES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"ours": ours, "trl": trl}


class Problem:
    """The tensors of one measurement: M states, a head of V entries, M targets and a weight for each."""

    def __init__(self, tokens: int, width: int, vocabulary: int, machine: Machine) -> None:
        torch.manual_seed(0)
        made = {"device": machine.device, "dtype": machine.dtype}
        self.hidden = torch.randn(tokens, width, **made).requires_grad_()
        self.head = (torch.randn(vocabulary, width, **made) * width**-0.5).requires_grad_()
        self.targets = torch.randint(0, vocabulary, (tokens,), device=machine.device)
        self.weights = torch.randn(tokens, device=machine.device)

    def run(self, side: str) -> None:
        (SIDES[side](self.hidden, self.head, self.targets) * self.weights).sum().backward()

    def gradients(self, side: str) -> list[Tensor]:
        self.run(side)
        found = [t.grad for t in (self.hidden, self.head) if t.grad is not None]
        self.hidden.grad = self.head.grad = None
        return found

    @property
    def gradient_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.hidden, self.head))


def peak_over_now(run: Callable[[], Any], machine: Machine) -> int:
    """Bytes by which memory rose above the present at the highest moment of `run`."""
    if machine.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(machine.device)
        before = torch.cuda.memory_allocated(machine.device)
        run()
        return torch.cuda.max_memory_allocated(machine.device) - before
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the high-water mark falls to what is resident now
    before = resident("VmRSS")
    run()
    return resident("VmHWM") - before


def resident(name: str) -> int:
    """Bytes of a field of /proc/self/status, such as VmRSS."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def check_the_method(machine: Machine) -> int:
    """Bytes reported for a block of PROBE bytes that is filled and freed."""
    found = peak_over_now(lambda: torch.ones(PROBE, dtype=torch.uint8, device=machine.device), machine)
    assert abs(found - PROBE) < MIB, f"{PROBE} bytes were allocated, and {found} measured"
    return found


def measure(side: str, problem: Problem, machine: Machine) -> int:
    """The extra bytes of one side; runs in a process of its own."""
    width = problem.hidden.shape[1]
    Problem(64, width, 4096, machine).run(side)
    check_the_method(machine)
    return peak_over_now(lambda: problem.run(side), machine) - problem.gradient_bytes


def difference(problem: Problem, machine: Machine) -> float:
    """The larger difference of the two gradients between the sides, of their norm."""
    pairs = zip(problem.gradients("ours"), problem.gradients("trl"), strict=True)
    found = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)
    assert found < TOLERANCE[machine.dtype], f"the gradients differ by {found:.1e} of their norm"
    return found


def in_a_fresh_process(side: str, vocabulary: int, tokens: int, width: int, machine: Machine) -> list[float]:
    """Run this script with --child and read the numbers that it prints last."""
    command = [sys.executable, __file__, "--child", side, "--vocabularies", str(vocabulary)]
    command += ["--tokens", str(tokens), "--width", str(width), "--device", str(machine.device)]
    command += ["--dtype", str(machine.dtype).removeprefix("torch.")]
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    numbers: list[float] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def child(side: str, vocabulary: int, tokens: int, width: int, machine: Machine) -> list[float]:
    """The extra bytes of a side and, from the one that imports TRL anyway, the difference from ours."""
    problem = Problem(tokens, width, vocabulary, machine)
    extra = measure(side, problem, machine)
    problem.hidden.grad = problem.head.grad = None
    return [extra, difference(problem, machine)] if side == "trl" else [extra]


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--vocabularies", type=positives, default="8192,32768,151936", help="sizes V, with commas"
    )
    parser.add_argument("--tokens", type=positive, default=512, help="M: completion tokens of the pack")
    parser.add_argument("--width", type=positive, default=1024, help="D: size of a hidden state")
    parser.add_argument("--child", choices=SIDES, help="measure this alone, in this process")
    args = parse(parser, argv, "trl")
    machine = machine_of(args)
    chunk_bytes = chunk_bytes_of(gpu=machine.device.type == "cuda")
    if args.child:
        print(json.dumps(child(args.child, args.vocabularies[0], args.tokens, args.width, machine)))
        return

    def case(vocabulary: int) -> dict[str, Any]:
        sizes = (vocabulary, args.tokens, args.width, machine)
        (extra_ours,), (extra_trl, gap) = (in_a_fresh_process(side, *sizes) for side in SIDES)
        head = 2 * vocabulary * args.width * torch.empty((), dtype=machine.dtype).element_size()
        return {
            "V": vocabulary, "M": args.tokens, "D": args.width, "chunk_bytes": chunk_bytes,
            "bytes_logits": 4 * args.tokens * vocabulary, "bytes_head_and_gradient": head,
            "extra_ours": extra_ours, "extra_trl": extra_trl,
            "ratio": extra_trl / max(extra_ours, 1), "chunks_ours": extra_ours / chunk_bytes,
            "gradient_gap": gap,
        }  # fmt: skip

    run("memory", args.vocabularies, case, args, versions(machine, "trl"))


if __name__ == "__main__":
    main()
