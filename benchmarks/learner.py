"""Loss and backward of one group: ours against TRL's own trainer, on identical inputs, side by side.

    OMP_NUM_THREADS=2 python benchmarks/learner.py [--json FILE] [--rounds 5] [--shapes vqa,long,...]

A Qwen2.5-VL of 24 M parameters in fp32, no checkpointing, all parameters trainable. For each shape the
gradients of both sides are first asserted equal (relative 1e-4 per tensor); then the two run in turn,
warm, and medians are compared. `bound` is the time that the matrix products of our side would take at
this machine's measured rate: FLOPs of the language model over L + G * T tokens, of its attention where the
mask allows it, of the vision tower over the patches once and of the head over G * T states, times three for
forward and backward.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from mm_grpo import GRPOConfig
from mm_grpo.learner.forward import PackForward
from mm_grpo.learner.objective import PackTokens, Tally, Terms, pack_loss
from mm_grpo.learner.pack import Item, layout
from mm_grpo.processors.base import Processor, load_processor
from mm_grpo.types import Prompt, Sample

BASE = Path(__file__).parents[1] / "examples" / "shapes" / "base"
# name: G completions of T tokens, image side in pixels (0: no image)
SHAPES = {
    "vqa": (8, 64, 448),
    "wide": (16, 32, 448),
    "long": (8, 256, 448),
    "text": (8, 256, 0),
}
VOCAB = 8192


def make_model(processor: Any) -> Any:
    """24 M parameters, random, with the special tokens of the shapes recipe's tokenizer."""
    ids = processor.config
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCAB, "hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 8,
            "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
            "tie_word_embeddings": True,
            "bos_token_id": 0, "eos_token_id": ids.text_config.eos_token_id, "pad_token_id": 0,
        },
        vision_config={
            "depth": 6, "hidden_size": 256, "out_hidden_size": 384, "intermediate_size": 768, "num_heads": 4,
            "patch_size": 14, "spatial_merge_size": 2, "window_size": 112, "fullatt_block_indexes": [2, 5],
        },
        image_token_id=ids.image_token_id, video_token_id=ids.video_token_id,
        vision_start_token_id=ids.vision_start_token_id, vision_end_token_id=ids.vision_end_token_id,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen2_5_VLForConditionalGeneration(config).train()


def make_prompt(processor: Processor, side: int) -> Prompt:
    """One prompt with a picture of `side` pixels, or without one."""
    noise = torch.randint(0, 256, (side, side, 3), generator=torch.Generator().manual_seed(1))
    images = (Image.fromarray(noise.numpy().astype("uint8")),) if side else ()
    parts = [*({"type": "image"} for _ in images), {"type": "text", "text": "What colour is the circle?"}]
    return processor.prompt(Sample("row", [{"role": "user", "content": parts}], images))


class Ours:
    """Our pack, objective and backward."""

    def __init__(
        self, model: Any, processor: Processor, prompt: Prompt, answers: Tensor, advantages: Tensor
    ) -> None:
        self.config = GRPOConfig.from_dict({"model": {"path": str(BASE)}}).algorithm
        # TRL masks nothing at sampling, so neither do we here
        self.module = PackForward(
            model, media_token_ids=frozenset(), blank=processor.blank(), temperature=1.0
        )
        items = [Item(i, 0, prompt, tuple(row)) for i, row in enumerate(answers.tolist())]
        self.pack = layout([items], frozenset())
        count = answers.numel()
        weights = torch.full((len(answers),), 1.0 / count, dtype=torch.float64)
        self.terms = Terms(advantages.double(), weights, count)

    def __call__(self) -> None:
        logp, entropy = self.module(self.pack)
        old = logp.detach()
        tokens = PackTokens(self.pack.owners, logp, entropy, old, old, None)
        pack_loss(self.config, self.terms, tokens, Tally()).backward()


class TRL:
    """TRL's GRPOTrainer, its own `_compute_loss` on a batch of G rows."""

    def __init__(
        self, model: Any, processor: Any, prompt: Prompt, answers: Tensor, advantages: Tensor
    ) -> None:
        import datasets
        from trl import GRPOConfig as TRLConfig
        from trl import GRPOTrainer as TRLTrainer

        count, length = answers.shape
        arguments = TRLConfig(
            output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, per_device_train_batch_size=count,
            num_generations=count, max_completion_length=length, gradient_checkpointing=False,
            report_to="none", loss_type="dapo",
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
        self.inputs = {
            "prompt_ids": ids, "prompt_mask": torch.ones_like(ids), "completion_ids": answers,
            "completion_mask": torch.ones_like(answers), "advantages": advantages,
            "num_items_in_batch": torch.tensor(answers.numel()),
            "mm_token_type_ids": torch.cat([kinds, torch.zeros_like(answers, dtype=torch.int)], 1),
        }  # fmt: skip
        if prompt.vision:
            self.inputs |= {k: torch.cat([v] * count) for k, v in prompt.vision.items()}
            self.inputs["num_images"] = [1] * count

    def __call__(self) -> None:
        self.trainer._compute_loss(self.model, self.inputs).backward()


def gradients(model: Any, run: Callable[[], None]) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    run()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest relative difference over the tensors; raises past 1e-4.

    Without an image TRL leaves the vision tower without gradients, where ours gives it zeros.
    """
    for name in ours.keys() - theirs.keys():
        assert not ours[name].any(), name
    assert theirs.keys() <= ours.keys()
    worst = max(float((ours[n] - g).norm() / g.norm()) for n, g in theirs.items() if g.norm() > 0)
    assert worst < 1e-4, f"gradients differ by {worst:.1e} of their norm"
    return worst


def matmul_rate() -> float:
    """FLOP/s of this machine in an fp32 product of the model's kind of size."""
    a, b = torch.randn(768, 384), torch.randn(384, 1152)
    rates = []
    for _ in range(30):
        start = time.perf_counter()
        for _ in range(10):
            a @ b
        rates.append(10 * 2 * 768 * 384 * 1152 / (time.perf_counter() - start))
    return max(rates)


def flops(model: Any, length: int, count: int, tokens: int, patches: int) -> float:
    """FLOPs of forward and backward of our pack, in matrix products alone."""
    config, vision = model.config.text_config, model.config.vision_config
    dense = sum(
        p.numel() for n, p in model.named_parameters() if "layers" in n and p.ndim == 2 and "visual" not in n
    )
    tower = sum(p.numel() for n, p in model.named_parameters() if ".blocks." in n and p.ndim == 2)
    merger = sum(p.numel() for n, p in model.named_parameters() if ".merger." in n and p.ndim == 2)
    row = length + count * tokens
    pairs = length**2 / 2 + count * tokens * (length + tokens / 2)
    windows = min(patches, (vision.window_size // vision.patch_size) ** 2)
    seen = 2 / 6 * patches**2 + 4 / 6 * patches * windows
    forward = 2 * dense * row + 4 * config.num_hidden_layers * pairs * config.hidden_size
    forward += 2 * tower * patches + 4 * vision.depth * seen * vision.hidden_size + 2 * merger * patches / 4
    forward += 2 * count * tokens * config.hidden_size * VOCAB
    return 3 * forward


def measure(name: str, rounds: int, rate: float) -> dict[str, Any]:
    count, tokens, side = SHAPES[name]
    processor: Any = load_processor(str(BASE), max_pixels=448 * 448)
    prompt = make_prompt(processor, side)
    generator = torch.Generator().manual_seed(2)
    answers = torch.randint(300, VOCAB, (count, tokens), generator=generator)
    advantages = torch.randn(count, generator=generator)
    model = make_model(processor)
    theirs = TRL(model, processor, prompt, answers, advantages)
    ours = Ours(model, processor, prompt, answers, advantages)
    gap = assert_equal(gradients(model, ours), gradients(model, theirs))
    seconds: dict[str, list[float]] = {"ours": [], "trl": []}
    for _ in range(rounds):
        for label, run in (("ours", ours), ("trl", theirs)):
            model.zero_grad(set_to_none=True)
            start = time.perf_counter()
            run()
            seconds[label].append(time.perf_counter() - start)
    length = len(prompt.token_ids)
    patches = len(prompt.vision["pixel_values"]) if prompt.vision else 0
    mine, other = (statistics.median(seconds[k]) for k in ("ours", "trl"))
    bound = flops(model, length, count, tokens, patches) / rate
    return {
        "shape": name, "G": count, "T": tokens, "L": length, "ratio": other / mine,
        "seconds_ours": mine, "seconds_trl": other, "seconds_bound": bound, "gradient_gap": gap,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write versions and rows to this file")
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each side, after a warm-up")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="of " + ", ".join(SHAPES))
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    rate = matmul_rate()
    print(f"{rate / 1e9:.0f} GFLOP/s in fp32 products on {torch.get_num_threads()} threads")
    print(f"{'shape':<6}{'G':>4}{'T':>5}{'L':>5}{'ours s':>9}{'TRL s':>9}{'ratio':>7}{'ours/bound':>12}")
    rows = []
    for name in args.shapes.split(","):
        row = measure(name, args.rounds, rate)
        rows.append(row)
        print(
            f"{name:<6}{row['G']:>4}{row['T']:>5}{row['L']:>5}{row['seconds_ours']:>9.3f}{row['seconds_trl']:>9.3f}"
            f"{row['ratio']:>7.2f}{row['seconds_ours'] / row['seconds_bound']:>12.2f}",
            flush=True,
        )
    if args.json:
        packages = {name: version(name) for name in ("torch", "transformers", "trl")}
        versions = {"python": platform.python_version(), "threads": torch.get_num_threads(), **packages}
        args.json.write_text(json.dumps({"versions": versions, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
