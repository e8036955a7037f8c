"""Loss and backward of one group with a video: ours against plain forwards of its G completions, side by side.

    OMP_NUM_THREADS=2 python benchmarks/videos.py [--json FILE] [--rounds 5] [--shapes 8x64x16x224,...]

A Qwen2.5-VL of 24 M parameters in fp32, no checkpointing, all parameters trainable. A shape is G completions of T
tokens about F frames of SIDE pixels. `plain` is the same loss on a batch of G whole rows by transformers' own forward,
with the frames of each row and our positions (its own are wrong behind a video); trainers that take videos run that.
The gradients of the two are first asserted equal; then they run in turn, warm, and medians are compared.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

import torch
from common import SIZES, Machine, interleaved, load_shapes_processor, make_model
from harness import arguments, machine_of, parse, positive, run, versions
from hybrid import Plain
from learner import FIRST_WORD, Ours, gap, gradients
from PIL import Image

from mm_grpo.types import Prompt, Sample, Video

SHAPES = "8x64x16x224,8x64x32x224,8x256x16x224"


def make_prompt(processor: Any, frames: int, side: int) -> Prompt:
    """A question about a video of random frames, two a second."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randint(0, 256, (frames, side, side, 3), generator=generator).numpy().astype("uint8")
    video = Video(tuple(map(Image.fromarray, noise)), tuple(i / 2 for i in range(frames)), 2.0)
    content = [{"type": "video"}, {"type": "text", "text": "What colour is the circle?"}]
    prompt: Prompt = processor.prompt(Sample("row", [{"role": "user", "content": content}], videos=(video,)))
    return prompt


class PlainVideo(Plain):
    """The loss of `Ours` on a batch of G whole rows, each with its frames."""

    def __init__(self, model: Any, ours: Ours, prompt: Prompt, answers: torch.Tensor) -> None:
        super().__init__(model, ours, prompt, answers)
        count, tokens = answers.shape
        first = prompt.next_position
        behind = torch.arange(first, first + tokens).expand(3, -1)
        positions = torch.cat([prompt.position_ids, behind], 1)
        self.inputs = {
            "input_ids": self.inputs["input_ids"],
            "position_ids": positions[:, None].expand(-1, count, -1),
            "pixel_values_videos": self.inputs["pixel_values"],
            "video_grid_thw": self.inputs["image_grid_thw"],
        }


def measure(shape: tuple[int, ...], rounds: int, size: str, machine: Machine) -> dict[str, Any]:
    count, tokens, frames, side = shape
    processor = load_shapes_processor(max(448, side) ** 2)
    prompt = make_prompt(processor, frames, side)
    generator = torch.Generator().manual_seed(2)
    answers = torch.randint(FIRST_WORD, SIZES[size][0]["vocab_size"], (count, tokens), generator=generator)
    models = [make_model(processor, size, machine) for _ in range(2)]
    ours = Ours(models[0], processor, prompt, answers, torch.randn(count, generator=generator))
    plain = PlainVideo(models[1], ours, prompt, answers)

    def forget() -> None:
        for model in models:
            model.zero_grad(set_to_none=True)

    gradient_gap = gap(gradients(models[0], ours), gradients(models[1], plain), machine.dtype)
    seconds = interleaved({"ours": ours, "plain": plain}, rounds, machine, warm=0, before=forget)
    return {
        "frames": frames, "side": side, "size": size, "G": count, "T": tokens, "L": len(prompt.token_ids),
        "seconds_ours": seconds["ours"], "seconds_plain": seconds["plain"],
        "ratio": seconds["plain"] / seconds["ours"], "gradient_gap": gradient_gap,
    }  # fmt: skip


def shapes(text: str) -> list[tuple[int, ...]]:
    """G, T, F and side of each shape."""
    if not re.fullmatch(r"([1-9]\d*x){3}[1-9]\d*(,([1-9]\d*x){3}[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be GxTxFxSIDE, such as 8x64x16x224, with commas")
    return [tuple(map(int, shape.split("x"))) for shape in text.split(",")]


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=positive, default=5, help="timed runs of each side")
    parser.add_argument("--shapes", type=shapes, default=SHAPES, help="GxTxFxSIDE, with commas")
    parser.add_argument("--size", default="24m", choices=SIZES)
    args = parse(parser, argv)
    machine = machine_of(args)
    run(
        "videos",
        args.shapes,
        lambda shape: measure(shape, args.rounds, args.size, machine),
        args,
        versions(machine),
    )


if __name__ == "__main__":
    main()
