"""Models and prompts to measure on, clocks, and the work that a pass has to do. Times are seconds, sizes bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from mm_grpo.processors.base import Processor, load_processor
from mm_grpo.types import Completion, Prompt, Sample

BASE = Path(__file__).parents[1] / "examples" / "shapes" / "base"

# (text, vision) configs; 3b and 7b are Qwen2.5-VL's, with random weights
_VISION: dict[str, Any] = {"patch_size": 14, "spatial_merge_size": 2, "window_size": 112}
_LARGE_VISION: dict[str, Any] = _VISION | {
    "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
    "fullatt_block_indexes": [7, 15, 23, 31],
}  # fmt: skip
SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tiny": (
        {
            "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True,
            "rope_parameters": {"mrope_section": [4, 6, 6]},
        },
        _VISION | {
            "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2,
            "fullatt_block_indexes": [1],
        },
    ),
    "24m": (
        {
            "vocab_size": 8192, "hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 8,
            "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": True,
            "rope_parameters": {"mrope_section": [8, 12, 12]},
        },
        _VISION | {
            "depth": 6, "hidden_size": 256, "intermediate_size": 768, "num_heads": 4,
            "fullatt_block_indexes": [2, 5],
        },
    ),
    "3b": (
        {
            "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
            "num_attention_heads": 16, "num_key_value_heads": 2, "tie_word_embeddings": True,
            "rope_parameters": {"mrope_section": [16, 24, 24]},
        },
        _LARGE_VISION,
    ),
    "7b": (
        {
            "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
            "rope_parameters": {"mrope_section": [16, 24, 24]},
        },
        _LARGE_VISION,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """Where and in what precision a benchmark runs."""

    device: torch.device
    dtype: torch.dtype

    def seconds(self, run: Callable[[], Any]) -> float:
        """Seconds of one call, which on a GPU ends when the GPU is done."""
        self.wait()
        start = time.perf_counter()
        run()
        self.wait()
        return time.perf_counter() - start

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def rate(self, rounds: int = 30) -> float:
        """FLOP/s of a product of the model's kind of size: the best of `rounds`, so that noise does not count."""
        rows, inner, columns = (768, 384, 1152) if self.device.type == "cpu" else (8192, 4096, 11008)
        a = torch.randn(rows, inner, device=self.device, dtype=self.dtype)
        b = torch.randn(inner, columns, device=self.device, dtype=self.dtype)

        def ten() -> None:
            for _ in range(10):
                a @ b

        return max(10 * 2 * rows * inner * columns / self.seconds(ten) for _ in range(rounds))


def interleaved(
    runs: Mapping[str, Callable[[], Any]],
    rounds: int,
    machine: Machine,
    *,
    warm: int = 1,
    before: Callable[[], Any] = lambda: None,
) -> dict[str, float]:
    """Median seconds of each run over `rounds`, in turn, after `warm` rounds that do not count.

    In turn, because a machine's speed drifts over minutes: each round meets all runs. `before` is called,
    untimed, ahead of every run.
    """
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(warm + rounds):
        for name, run in runs.items():
            before()
            seconds = machine.seconds(run)
            if number >= warm:
                taken[name].append(seconds)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


class Stopwatch:
    """Seconds by name, of methods of living objects, added up until they are taken."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self._silent = 0

    def wrap(self, owner: Any, method: str, name: str) -> None:
        """Add the seconds of each call of `owner.method` to `name`."""
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = inner(*args, **kwargs)
            if not self._silent:
                self.sums[name] = self.sums.get(name, 0.0) + time.perf_counter() - start
            return result

        setattr(owner, method, timed)

    def silence(self, owner: Any, method: str) -> None:
        """Count nothing of what `owner.method` calls."""
        inner: Callable[..., Any] = getattr(owner, method)

        def silent(*args: Any, **kwargs: Any) -> Any:
            self._silent += 1
            try:
                return inner(*args, **kwargs)
            finally:
                self._silent -= 1

        setattr(owner, method, silent)

    def take(self) -> dict[str, float]:
        """The sums so far, which start again from nothing."""
        found, self.sums = self.sums, {}
        return found


def load_shapes_processor(max_pixels: int = 448 * 448) -> Any:
    """The processor of the shapes recipe: its tokenizer serves all models here, whatever their vocabulary."""
    return load_processor(str(BASE), max_pixels=max_pixels)


def make_model(processor: Any, size: str, machine: Machine) -> Any:
    """A Qwen2.5-VL of `size` with random weights and the special tokens of the shapes recipe's tokenizer."""
    ids = processor.config
    text, vision = SIZES[size]
    rope = {"rope_type": "default", "rope_theta": 1e6, **text["rope_parameters"]}
    config = Qwen2_5_VLConfig(
        text_config=text | {
            "max_position_embeddings": 32768, "rope_parameters": rope,
            "bos_token_id": 0, "eos_token_id": ids.text_config.eos_token_id, "pad_token_id": 0,
        },
        vision_config=vision | {"out_hidden_size": text["hidden_size"]},
        image_token_id=ids.image_token_id, video_token_id=ids.video_token_id,
        vision_start_token_id=ids.vision_start_token_id, vision_end_token_id=ids.vision_end_token_id,
        tie_word_embeddings=text["tie_word_embeddings"],
    )  # fmt: skip
    torch.manual_seed(0)
    with machine.device:
        model = Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=machine.dtype)
    return model.to(machine.device).train()


def make_prompt(processor: Processor, side: int, *, images: int = 1, words: int = 0, seed: int = 1) -> Prompt:
    """One prompt with `images` pictures of `side` pixels (none where it is 0) and `words` more of text."""
    generator = torch.Generator().manual_seed(seed)
    noise = [
        torch.randint(0, 256, (side, side, 3), generator=generator) for _ in range(images if side else 0)
    ]
    pictures = tuple(Image.fromarray(n.numpy().astype("uint8")) for n in noise)
    text = "What colour is the circle?" + " red" * words
    parts = [*({"type": "image"} for _ in pictures), {"type": "text", "text": text}]
    return processor.prompt(Sample("row", [{"role": "user", "content": parts}], pictures))


def make_completions(answers: Iterable[Sequence[int]]) -> tuple[Completion, ...]:
    """Completions of these ids, with log-probs far from the model's."""
    return tuple(Completion(tuple(ids), (-6.0,) * len(ids), "", "stop", g) for g, ids in enumerate(answers))


def assert_moved_alike(
    before: Mapping[str, torch.Tensor], one: torch.nn.Module, other: torch.nn.Module
) -> None:
    """AssertionError, naming the parameter, where two models of one start moved apart by more than 1 %."""
    moved = dict(other.named_parameters())
    for name, parameter in one.named_parameters():
        change, expected = parameter.detach() - before[name], moved[name].detach() - before[name]
        assert float((change - expected).norm()) <= 0.01 * float(expected.norm()), name


def patches_of(prompt: Prompt) -> list[int]:
    """Patches of each image of a prompt."""
    return [int(grid.prod()) for grid in prompt.vision["image_grid_thw"]] if prompt.vision else []


def flops(model: Any, length: int, count: int, tokens: int, patches: Sequence[int]) -> float:
    """FLOPs of forward and backward of one group's pack: those of `forward_flops`, times three."""
    return 3 * sum(forward_flops(model, length, count, tokens, patches).values())


def forward_flops(
    model: Any, length: int, count: int, tokens: int, patches: Sequence[int]
) -> dict[str, float]:
    """FLOPs of the forward of one group's pack, in matrix products alone, by part of the model.

    The language model over L + G * T tokens (`layers`), its attention where the mask allows it, the vision tower over
    the images once and the head over G * T states. What is computed twice (the head's logits, inside attention) and
    adapters are left out: the figure is a floor.
    """
    config, vision = model.config.text_config, model.config.vision_config
    matrices = [(n, p.numel()) for n, p in model.named_parameters() if p.ndim == 2 and ".lora_" not in n]
    dense = sum(size for n, size in matrices if "layers" in n and "visual" not in n)
    tower = sum(size for n, size in matrices if ".blocks." in n)
    merger = sum(size for n, size in matrices if ".merger." in n or ".deepstack_merger_list." in n)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    row = length + count * tokens
    pairs = length**2 / 2 + count * tokens * (length + tokens / 2)
    found = {
        "layers": 2.0 * dense * row,
        "attention": 4 * config.num_hidden_layers * pairs * config.num_attention_heads * width,
        "head": 2.0 * count * tokens * config.hidden_size * config.vocab_size,
        "tower": 0.0,
    }
    windowed = hasattr(vision, "fullatt_block_indexes")  # else every block sees the whole image
    full = len(vision.fullatt_block_indexes) if windowed else vision.depth
    for n in patches:
        window = min(n, (vision.window_size // vision.patch_size) ** 2) if windowed else n
        seen = full * n**2 + (vision.depth - full) * n * window
        found["tower"] += 2 * tower * n + 4 * seen * vision.hidden_size
        found["tower"] += 2 * merger * n / vision.spatial_merge_size**2
    return found
