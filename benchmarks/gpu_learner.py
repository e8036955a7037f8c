"""Stages of gpu_proof.py on attention and on the learner's updates.

Utilisation (`mfu`) is FLOPs / seconds / peak. FLOPs are those that an update cannot do without, in matrix products:
per group `common.forward_flops`, times three where weights are trained (forward, gradients of the inputs, gradients of
the weights). With adapters the language layers and the head have no gradients of weights (times two), and the tower
only runs forward (times one). What gradient checkpointing computes again is not counted, nor are the adapters.

Memory is measured where the parts of a run come into being, and stands beside mm_grpo/preflight/memory.py's
arithmetic, which `mm-grpo estimate` prints:

    weights     after the model was made            estimate: weights
    optimizer   after the first update              estimate: optimizer (fp32 masters and AdamW's means)
    passes      the peak of forward and backward    estimate: gradients, activations, log-probs, vision, masks
    update      the peak of clipping and AdamW; the estimate has no name for it

On a CPU, in a dry run, bytes are those of the process, and mean nothing for so small a model.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import forward_flops, interleaved, make_prompt, patches_of
from gpu_models import SHAPES, Setting, config_and_processor, make_model, write_without_weights
from memory import peak_over_now, resident
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask
from torch.nn.functional import scaled_dot_product_attention

from mm_grpo import GRPOConfig
from mm_grpo.learner import flex
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.model import adopt_model
from mm_grpo.learner.pack import attention_mask
from mm_grpo.preflight.memory import ModelSizes, learner_memory
from mm_grpo.processors.base import load_processor
from mm_grpo.types import Completion, Group

Row = dict[str, Any]
Case = Callable[[Setting], Row]

PROMPTS = 2
"""P: groups of one update, each a pack of its own, so that the second pack meets the gradients of the first."""
TOKENS = 256
"""T: tokens of a completion."""
WHOLE = 16384
"""Tokens of a pack as runs have them, which holds several groups."""
CASES = (
    ("lora", 8, 448, True, False), ("full", 8, 1024, True, False), ("lora", 8, 448, True, True),
    ("full", 8, 448, True, True), ("full", 8, 448, False, False), ("lora", 8, 448, False, False),
    ("lora", 16, 1024, True, False), ("full", 16, 448, True, True),
)  # fmt: skip
"""Weights trained, G, size of the image, checkpointing, whole packs; what is asked for most stands first."""
FACTORS = {
    "full": {"layers": 3, "attention": 3, "head": 3, "tower": 3},
    "lora": {"layers": 2, "attention": 3, "head": 2, "tower": 1},
}
"""FLOPs of forward and backward over those of the forward."""

# attention -----------------------------------------------------------------------------------

HEADS = {"qwen2_5_vl-3b": (16, 2, 128), "qwen3_vl-4b": (32, 8, 128)}
"""Heads, heads of keys and values, and their size."""
PACKS = {"448 px, G 8": (296, 8, 256), "1024 px, G 8": (1336, 8, 256), "1024 px, G 16": (1336, 16, 256)}
"""L, G, T."""
ABOVE = {torch.bfloat16: torch.float32, torch.float32: torch.float64}


def attention_cases() -> dict[str, Case]:
    """FlexAttention against plain attention, by model, dtype and pack."""
    return {
        f"{model}, {str(dtype).removeprefix('torch.')}, {pack}": partial(
            attention, heads=HEADS[model], dtype=dtype, pack=shape
        )
        for model in HEADS
        for dtype in (torch.bfloat16,)  # the kernels of fp32 spill, and no run takes them unasked
        for pack, shape in PACKS.items()
    }


def attention(
    setting: Setting, heads: tuple[int, int, int], dtype: torch.dtype, pack: tuple[int, int, int]
) -> Row:
    """Forward and backward of one layer's attention on one row: seconds, bytes, and how far both are from the truth.

    The truth is plain attention in the next larger dtype. Distances are shares of the norm, the largest over the output
    and the gradients of queries, keys and values.
    """
    device = setting.machine.device
    length, count, tokens = setting.of(pack, (12, pack[1] // 4, 9))
    query_heads, kv_heads, size = setting.of(heads, (4, 2, 16))
    with _kernel_on(device):
        fault = flex.fault(device, dtype, query_heads, kv_heads, size)
        known = [0] * length + [g + 1 for g in range(count) for _ in range(tokens)]
        segments = torch.tensor([known], device=device)
        generator = torch.Generator().manual_seed(0)
        q, k, v, weight = (
            torch.randn(1, len(known), h, size, generator=generator).to(device, dtype).transpose(1, 2)
            for h in (query_heads, kv_heads, kv_heads, query_heads)
        )
        block, dense = flex.block_mask(segments), attention_mask(segments)

        def by_flex(*inputs: Tensor) -> Tensor:
            return flex.attend(*inputs, block)

        def plain(*inputs: Tensor) -> Tensor:
            return scaled_dot_product_attention(*inputs, attn_mask=dense, enable_gqa=True)

        def run(attend: Callable[..., Tensor], dtype: torch.dtype = dtype) -> list[Tensor]:
            leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
            out = attend(*leaves)
            return [out.detach(), *torch.autograd.grad((out * weight.to(dtype)).sum(), leaves)]

        truth = [x.float() for x in run(plain, ABOVE[dtype])]
        distances = {
            name: max(
                float((a.float() - b).norm() / b.norm()) for a, b in zip(run(attend), truth, strict=True)
            )
            for name, attend in (("flex", by_flex), ("plain", plain))
        }
        del truth
        rounds = setting.of(10, 1)
        runs = {"flex": lambda: run(by_flex), "plain": lambda: run(plain)}
        seconds = interleaved(runs, rounds, setting.machine)
        extra = {name: peak_over_now(one, setting.machine) for name, one in runs.items()}
    right = fault is None and distances["flex"] <= flex.LIMITS[dtype]
    return {
        "heads": query_heads, "kv_heads": kv_heads, "size": size, "dtype": str(dtype).removeprefix("torch."),
        "L": length, "G": count, "T": tokens, "right": right, "kernel_fault": fault, "limit": flex.LIMITS[dtype],
        **{f"distance_{name}": value for name, value in distances.items()},
        **{f"seconds_{name}": value for name, value in seconds.items()},
        **{f"bytes_{name}": value for name, value in extra.items()},
        "ratio": seconds["plain"] / seconds["flex"],
        **({} if right else {"fault": fault or f"FlexAttention is {distances['flex']:.1e} from the truth"}),
    }  # fmt: skip


@contextmanager
def _kernel_on(device: torch.device) -> Any:
    """FlexAttention as it is on a GPU. It has no backward pass on a CPU: plain attention under its mask stands in."""
    if device.type == "cuda":
        yield
        return
    before = flex._compiled
    flex._compiled = lambda: _stand_in  # type: ignore[assignment]
    flex.fault.cache_clear()
    try:
        yield
    finally:
        flex._compiled = before
        flex.fault.cache_clear()


def _stand_in(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    batch, width = query.shape[0], query.shape[2]
    mask = create_mask(options["block_mask"].mask_mod, batch, 1, width, width, device=query.device)
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=options["scale"], enable_gqa=options["enable_gqa"]
    )


# the learner ---------------------------------------------------------------------------------


def learner_cases(model: str) -> dict[str, Case]:
    """Updates of one model: all weights or adapters, G, size of the image, checkpointing, size of a pack."""
    return {
        f"{train}, G {count}, {side} px, {'checkpointing' if again else 'no checkpointing'}"
        + (", whole packs" if whole else ""): partial(
            learner, name=model, train=train, count=count, side=side, checkpointing=again, whole=whole
        )
        for train, count, side, again, whole in CASES
    }


class Meter:
    """Bytes held now and at most since the last `reset`: torch's on a GPU, the process's on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.gpu = device, device.type == "cuda"
        self.start = self.now()

    def now(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.gpu else resident("VmRSS")

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.gpu else resident("VmHWM")

    def reset(self) -> None:
        if self.gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")


class Watched:
    """Seconds and peaks of both halves of an update: the passes, and the optimizer that `apply` stands for."""

    def __init__(self, learner: Learner, meter: Meter, setting: Setting) -> None:
        self.learner, self.meter, self.machine = learner, meter, setting.machine
        self.peaks = {"passes": 0, "update": 0}
        self.optimizer_seconds = 0.0
        self._resting = 0
        self._apply = learner.optimizer.apply
        learner.optimizer.apply = self.apply  # type: ignore[method-assign]

    def update(self, groups: list[Group]) -> Any:
        self._resting = self.meter.now()
        self.meter.reset()
        return self.learner.update(groups)

    def apply(self, live_tokens: int) -> Any:
        self.machine.wait()
        self._keep("passes")
        found: list[Any] = []
        self.optimizer_seconds = self.machine.seconds(lambda: found.append(self._apply(live_tokens)))
        self._keep("update")
        return found[0]

    def _keep(self, part: str) -> None:
        self.peaks[part] = max(self.peaks[part], self.meter.peak() - self._resting)
        self.meter.reset()


def learner(
    setting: Setting, name: str, train: str, count: int, side: int, checkpointing: bool, whole: bool
) -> Row:
    """Updates on PROMPTS packs, of a group each or `whole`: seconds, utilisation, memory beside the estimate."""
    machine, tokens = setting.machine, setting.of(TOKENS, 6)
    count, side = setting.of(count, count // 4), setting.of(side, side // 8)
    config, parts = config_and_processor(name, setting)
    with tempfile.TemporaryDirectory() as made:
        write_without_weights(config, parts, Path(made))
        processor = load_processor(made, max_pixels=side**2)
        meter = Meter(machine.device)
        model = make_model(config, parts, machine)
        length = len(make_prompt(processor, side, seed=0).token_ids)
        groups_each = max(1, setting.of(WHOLE, 512) // (length + count * tokens)) if whole else 1
        size = PROMPTS * groups_each
        prompts = [make_prompt(processor, side, seed=number) for number in range(size)]
        pack = -(-groups_each * (length + count * tokens) // flex.BLOCK) * flex.BLOCK
        given = GRPOConfig.from_dict(
            {
                "model": {"path": made, "lora": {"rank": 16} if train == "lora" else None},
                "rollout": {
                    "prompts_per_step": size, "num_generations": count, "max_completion_length": tokens,
                },
                "optim": {
                    "gradient_checkpointing": checkpointing, "max_tokens_per_pack": pack,
                    "learning_rate": 1e-5, "warmup_steps": 0,
                },
            }
        )  # fmt: skip
        adopt_model(model, given.model, processor.family)
        weights = meter.now() - meter.start
        made_learner = Learner(model, processor, given, 100)
    groups = [_group(made_learner, prompt, slot, count, tokens) for slot, prompt in enumerate(prompts)]
    watched = Watched(made_learner, meter, setting)
    watched.update(groups)  # compiles, and makes AdamW's means
    optimizer = meter.now() - meter.start - weights
    watched.peaks = dict.fromkeys(watched.peaks, 0)
    seconds, optimizing, reports = [], [], list[Any]()
    for _ in range(setting.of(3, 1)):
        seconds.append(machine.seconds(lambda: reports.append(watched.update(groups))))
        optimizing.append(watched.optimizer_seconds)
    update_norm = reports[-1].updates[-1].update_norm
    assert update_norm > 0, "the update changed no weight"
    patches = patches_of(prompts[0])
    by_part = forward_flops(model, length, count, tokens, patches)
    work = size * sum(FACTORS[train][part] * flops for part, flops in by_part.items())
    taken, of_update = statistics.median(seconds), statistics.median(optimizing)
    estimate = learner_memory(
        ModelSizes.of(model),
        tokens=pack,
        checkpointing=checkpointing,
        gpu=machine.device.type == "cuda",
        pixels=groups_each * sum(patches) * config.vision_config.patch_size**2,
    )
    resting = weights + optimizer
    return {
        "model": name, "train": train, "P": size, "pack": pack, "G": count, "T": tokens, "L": length, "side": side,
        "checkpointing": checkpointing, "flex": made_learner.module.masks.flex,
        "seconds": taken, "seconds_optimizer": of_update,
        "samples_per_second": size * count / taken,
        "tokens_per_second": size * (length + count * tokens) / taken,
        "flops": work, "peak": setting.peak, "peak_from": setting.peak_from,
        "mfu": work / taken / setting.peak, "mfu_passes": work / (taken - of_update) / setting.peak,
        "bytes_weights": weights, "bytes_optimizer": optimizer,
        "bytes_passes": watched.peaks["passes"], "bytes_update": watched.peaks["update"],
        "bytes_peak": resting + max(watched.peaks.values()),
        "estimate_weights": estimate["weights"], "estimate_optimizer": estimate["optimizer"],
        "estimate_passes": sum(estimate.values()) - estimate["weights"] - estimate["optimizer"],
        "estimate_peak": sum(estimate.values()), "update_norm": update_norm,
    }  # fmt: skip


def _group(learner: Learner, prompt: Any, slot: int, count: int, tokens: int) -> Group:
    """G random answers, with the learner's own log-probs for the engine's, half of them better than the others."""
    generator = torch.Generator().manual_seed(slot)
    banned = learner.processor.media_token_ids | learner.processor.stop_token_ids
    words = learner.model.config.get_text_config().vocab_size
    legal = torch.tensor([token for token in range(words) if token not in banned])
    ids = legal[torch.randint(len(legal), (count, tokens), generator=generator)].tolist()
    scores = learner.score(prompt, ids, as_sampled=True)
    completions = tuple(
        Completion(tuple(row), tuple(logp), "", "stop", seed=slot * count + g)
        for g, (row, logp) in enumerate(zip(ids, scores, strict=True))
    )
    rewards = tuple(float(g % 2) for g in range(count))
    return Group(slot, prompt, completions, rewards, tuple(2 * r - 1 for r in rewards))


STAGES: dict[str, dict[str, Case]] = {
    "attention": attention_cases(),
    **{f"learner-{model}": learner_cases(model) for model in SHAPES},
}
