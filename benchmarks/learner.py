"""Loss and backward of one group: ours against TRL's own trainer, on identical inputs, side by side.

    OMP_NUM_THREADS=2 python benchmarks/learner.py [--json FILE] [--rounds 5] [--shapes vqa,long,...] [--allocator keep]
    python benchmarks/learner.py --device cuda --dtype bfloat16 --size 3b

A Qwen2.5-VL of 24 M parameters in fp32 unless --size and --dtype say otherwise, no checkpointing, all
parameters trainable. For each shape the gradients of both sides are first asserted equal; then the two run in
turn, warm, and medians are compared. `bound` is the time that the matrix products of our side would take at the
best rate that this machine was seen to reach (see `common.flops`), so TRL / bound is what no learner of this kind
could pass.

TRL's time differs from one process to the next, by what the allocator does with its large blocks. So --json adds a
sitting to those that the file has of equal versions, and its rows hold medians and ranges over all sittings. With
--allocator keep glibc keeps the blocks that are freed, which is TRL's best setting; those sittings stand apart.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from common import (
    BASE,
    SIZES,
    Machine,
    flops,
    interleaved,
    load_shapes_processor,
    make_model,
    make_prompt,
    patches_of,
)
from harness import arguments, machine_of, parse, positive, ranged, run, versions
from torch import Tensor

from mm_grpo import GRPOConfig
from mm_grpo.learner.forward import PackForward
from mm_grpo.learner.loss import LossInputs, PackTokens, pack_loss
from mm_grpo.learner.pack import Item, layout
from mm_grpo.learner.step_report import LossStatistics
from mm_grpo.processors.base import Processor
from mm_grpo.types import Prompt

# name: G completions of T tokens, image side in pixels (0: no image)
SHAPES = {
    "vqa": (8, 64, 448),
    "wide": (16, 32, 448),
    "long": (8, 256, 448),
    "text": (8, 256, 0),
}
KEEP = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "17179869184"}
"""What tells glibc to keep freed blocks. Read as a process starts."""
FIRST_WORD = 300  # ids below are the tokenizer's own; random answers take those above


class Ours:
    """Our pack, loss and backward."""

    def __init__(
        self, model: Any, processor: Processor, prompt: Prompt, answers: Tensor, advantages: Tensor
    ) -> None:
        config = GRPOConfig.from_dict({"model": {"path": str(BASE)}})
        self.config = config.algorithm
        # TRL's loss masks nothing, so neither do we here
        self.module = PackForward(model, processor, config, as_sampled=False)
        items = [Item(i, 0, prompt, tuple(row)) for i, row in enumerate(answers.tolist())]
        self.pack = layout([items], frozenset()).to(model.device)
        count = answers.numel()
        weights = torch.full((len(answers),), 1.0 / count, dtype=torch.float64, device=model.device)
        self.inputs = LossInputs(advantages.double().to(model.device), weights, count)

    def __call__(self) -> None:
        logp, entropy, _ = self.module(self.pack)
        old = logp.detach()
        tokens = PackTokens(self.pack.completion_index, logp, entropy, old, old, None)
        pack_loss(self.config, self.inputs, tokens, LossStatistics()).backward()


class TRL:
    """TRL's GRPOTrainer, its own `_compute_loss` on a batch of G rows."""

    def __init__(
        self, model: Any, processor: Any, prompt: Prompt, answers: Tensor, advantages: Tensor, folder: str
    ) -> None:
        import datasets
        from trl import GRPOConfig as TRLConfig
        from trl import GRPOTrainer as TRLTrainer

        count, length = answers.shape
        arguments = TRLConfig(
            output_dir=folder, use_cpu=model.device.type == "cpu", bf16=False,
            per_device_train_batch_size=count, num_generations=count, max_completion_length=length,
            gradient_checkpointing=False, report_to="none", loss_type="dapo",
        )  # fmt: skip
        self.trainer = TRLTrainer(
            model=model, args=arguments, processing_class=processor.hf, reward_funcs=[lambda **k: []],
            train_dataset=datasets.Dataset.from_list([{"prompt": "x"}] * count),
        )  # fmt: skip
        self.trainer.current_gradient_accumulation_steps = 1
        self.model = self.trainer.model
        self.model.train()
        ids = torch.tensor([prompt.token_ids] * count)
        kinds = (ids == processor.image_token_id).int()
        inputs = {
            "prompt_ids": ids, "prompt_mask": torch.ones_like(ids), "completion_ids": answers,
            "completion_mask": torch.ones_like(answers), "advantages": advantages,
            "num_items_in_batch": torch.tensor(answers.numel()),
            "mm_token_type_ids": torch.cat([kinds, torch.zeros_like(answers, dtype=torch.int)], 1),
        }  # fmt: skip
        if prompt.vision:
            inputs |= {k: torch.cat([v] * count) for k, v in prompt.vision.items()}
        self.inputs: dict[str, Any] = {k: v.to(model.device) for k, v in inputs.items()}
        if prompt.vision:
            self.inputs["num_images"] = [len(prompt.vision["image_grid_thw"])] * count

    def __call__(self) -> None:
        self.trainer._compute_loss(self.model, self.inputs).backward()


def gradients(model: Any, run: Callable[[], None]) -> dict[str, Tensor]:
    run()
    return {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}


def gap(ours: dict[str, Tensor], theirs: dict[str, Tensor], dtype: torch.dtype) -> float:
    """How far apart the gradients lie, relative to their norm; raises where they are not the same.

    In fp32 the largest over the tensors, at most 1e-4; in bf16, where both sides round, that of all tensors
    taken together, at most 0.05. Without an image TRL leaves the vision tower without gradients, where ours
    gives it zeros.
    """
    for name in ours.keys() - theirs.keys():
        assert not ours[name].any(), name
    assert theirs.keys() <= ours.keys()
    norms = {n: (float((ours[n] - g).float().norm()), float(g.float().norm())) for n, g in theirs.items()}
    if dtype == torch.float32:
        found, most = max(d / norm for d, norm in norms.values() if norm > 0), 1e-4
    else:
        found = (sum(d**2 for d, _ in norms.values()) / sum(n**2 for _, n in norms.values())) ** 0.5
        most = 0.05
    assert found < most, f"the gradients differ by {found:.1e} of their norm"
    return found


def batch(size: str, shape: tuple[int, int, int]) -> tuple[Processor, Prompt, Tensor, Tensor]:
    """Processor and prompt of a shape, G random answers [G, T] and their advantages [G]."""
    count, tokens, side = shape
    processor = load_shapes_processor(max(448, side) ** 2)
    generator = torch.Generator().manual_seed(2)
    words = SIZES[size][0]["vocab_size"]
    answers = torch.randint(FIRST_WORD, words, (count, tokens), generator=generator)
    return processor, make_prompt(processor, side), answers, torch.randn(count, generator=generator)


def about(name: str, size: str, shape: tuple[int, int, int], prompt: Prompt) -> dict[str, Any]:
    """What a row says of its shape."""
    count, tokens, side = shape
    kind = "image" if side else "text"
    return {"shape": name, "size": size, "G": count, "T": tokens, "L": len(prompt.token_ids), "kind": kind}


def measure(
    name: str, rounds: int, size: str, machine: Machine, shape: tuple[int, int, int]
) -> dict[str, Any]:
    """One shape: gradients compared, then both sides timed."""
    processor, prompt, answers, advantages = batch(size, shape)
    # a model each, with equal weights: ours has its attention and its tower changed
    model, their_model = (make_model(processor, size, machine) for _ in range(2))
    ours = Ours(model, processor, prompt, answers, advantages)

    def forget() -> None:
        for each in (model, their_model):
            each.zero_grad(set_to_none=True)

    with tempfile.TemporaryDirectory() as folder:
        theirs = TRL(their_model, processor, prompt, answers, advantages, folder)
        found = gradients(model, ours)
        forget()
        gradient_gap = gap(found, gradients(their_model, theirs), machine.dtype)
        del found
        seconds = interleaved(  # the comparison of the gradients was the warm round
            {"ours": ours, "trl": theirs}, rounds, machine, warm=0, before=forget
        )
    row = about(name, size, shape, prompt)
    return row | {
        "ratio": seconds["trl"] / seconds["ours"],
        "seconds_ours": seconds["ours"], "seconds_trl": seconds["trl"],
        "gradient_gap": gradient_gap,
        "flops": flops(model, row["L"], row["G"], row["T"], patches_of(prompt)),
    }  # fmt: skip


def apart(
    name: str, rounds: int, size: str, machine: Machine, shape: tuple[int, int, int], checkpointing: bool
) -> dict[str, Any]:
    """One shape where the device may not hold both: each side is timed alone, and gone before the other comes.

    A side that the device has no memory for is `fault_ours` or `fault_trl`: a result beside the other's.
    """
    processor, prompt, *rest = batch(size, shape)
    row = about(name, size, shape, prompt) | {"checkpointing": checkpointing}
    found: dict[str, dict[str, Tensor]] = {}

    def alone(side: str, folder: str) -> None:
        model = make_model(processor, size, machine)
        row["flops"] = flops(model, row["L"], row["G"], row["T"], patches_of(prompt))
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        given = (model, processor, prompt, *rest)
        run = Ours(*given) if side == "ours" else TRL(*given, folder)
        found[side] = gradients(model, run)
        clear = partial(model.zero_grad, set_to_none=True)
        row[f"seconds_{side}"] = interleaved({side: run}, rounds, machine, warm=0, before=clear)[side]

    for side in ("ours", "trl"):
        try:
            with tempfile.TemporaryDirectory() as folder:
                alone(side, folder)
        except torch.OutOfMemoryError:
            row[f"fault_{side}"] = "out of memory"
        gc.collect()
        if machine.device.type == "cuda":
            torch.cuda.empty_cache()
    if len(found) == 2:
        row["ratio"] = row["seconds_trl"] / row["seconds_ours"]
        try:
            row["gradient_gap"] = gap(found["ours"], found["trl"], machine.dtype)
        except AssertionError as error:
            row["fault"] = str(error)
    return row


def shapes(text: str) -> dict[str, tuple[int, int, int]]:
    """G, T and side by name, of a list of names or GxTxSIDE, with commas."""
    found: dict[str, tuple[int, int, int]] = {}
    for name in text.split(","):
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x(\d+)", name)
        if name not in SHAPES and not match:
            raise argparse.ArgumentTypeError(
                f"{name!r} must be one of {', '.join(SHAPES)}, or GxTxSIDE, such as 8x64x448 (side 0: no image)"
            )
        found[name] = (int(match[1]), int(match[2]), int(match[3])) if match else SHAPES[name]
    return found


def summary(sittings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each shape: medians over its sittings, with the ranges of the ratios.

    `ratio`, `seconds_...`, `ours_bound` and `trl_bound` are of glibc's allocator as it is; `kept_ratio` is of the
    sittings that kept freed blocks, if there are any.
    """
    shapes: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for sitting in sittings:
        for row in sitting["rows"]:
            bound = row["flops"] / sitting["flops_per_second"]
            by_allocator = shapes.setdefault(row["shape"], {})
            by_allocator.setdefault(sitting["allocator"], []).append({**row, "seconds_bound": bound})
    rows = []
    for by_allocator in shapes.values():
        plain, keep = by_allocator.get("glibc", []), by_allocator.get("keep", [])
        if not plain:
            continue
        row = {key: plain[-1][key] for key in ("shape", "size", "kind", "G", "T", "L", "flops")}
        row["sittings"], row["kept_sittings"] = len(plain), len(keep)
        row["gradient_gap"] = max(r["gradient_gap"] for r in (*plain, *keep))
        for key in ("seconds_ours", "seconds_trl", "seconds_bound"):
            row[key] = statistics.median(r[key] for r in plain)
        row |= ranged("ratio", [r["ratio"] for r in plain])
        if keep:
            row |= ranged("kept_ratio", [r["ratio"] for r in keep])
        for name in ("ours", "trl"):
            row |= ranged(f"{name}_bound", [r[f"seconds_{name}"] / r["seconds_bound"] for r in plain])
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=positive, default=5, help="timed runs of each side, after a warm-up")
    parser.add_argument(
        "--shapes", type=shapes, default=",".join(SHAPES), help="of " + ", ".join(SHAPES) + ", or GxTxSIDE"
    )
    parser.add_argument("--size", default="24m", choices=SIZES)
    parser.add_argument("--allocator", default="glibc", choices=["glibc", "keep"])
    args = parse(parser, argv, "trl")
    if args.allocator == "keep" and any(os.environ.get(name) != value for name, value in KEEP.items()):
        os.execve(
            sys.executable,
            [sys.executable, __file__, *(sys.argv[1:] if argv is None else argv)],
            os.environ | KEEP,
        )
    machine = machine_of(args)
    sitting: dict[str, Any] = {"allocator": args.allocator, "flops_per_second": 0.0}

    def case(name: str) -> dict[str, Any]:
        row = measure(name, args.rounds, args.size, machine, args.shapes[name])
        # measured with each shape, the best of all counts: a machine that is busy just now must not flatter us
        sitting["flops_per_second"] = max(sitting["flops_per_second"], machine.rate())
        return row

    run("learner", args.shapes, case, args, versions(machine, "trl"), summary=summary, sitting=sitting)


if __name__ == "__main__":
    main()
