"""What one more completion, a longer prompt, a larger image and one more image cost our learner.

    OMP_NUM_THREADS=2 python benchmarks/scaling.py [--json FILE] [--rounds 5] [--sweeps completions,...]
    python benchmarks/scaling.py --device cuda --dtype bfloat16 --size 3b

Measured is forward and backward of one group, warm, the points of a sweep in turn, medians. Each sweep changes one
thing; a straight line is laid through its points by least squares:

    completions, completions_text   G = 2, 4, 8, 16 of T tokens, with an image and with a text of the same length
    prompt                          words of text before the question
    side                            side of the image in pixels; against its patches
    images                          1, 2, 4 images of one size

The claim under test is that a completion pays for its own T tokens and not for its prompt. The line over G gives
the slope (one more completion) and the first completion's cost, its value at G = 1. In tokens the first costs
L + T, each further one T: `token_share` = T / (L + T). `share` is the same in measured time, slope / first, and
`flop_share` in counted matrix products (`common.flops`). Without sharing all three would be 1.

The tokens of a completion are not quite those of a prompt: they go through the head, which adds 23 % to a token's
products in the 24m model and 11 % in the 3b, and attend to the whole prompt; and the first completion also
pays for the image, which is no token of the language model. So `share` should follow `flop_share`, and come near
`token_share` where the prompt is text, from above; with an image it lies below.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from common import (
    SIZES,
    Machine,
    flops,
    interleaved,
    load_shapes_processor,
    make_model,
    make_prompt,
    patches_of,
)
from harness import arguments, machine_of, parse, positive, run, versions
from learner import FIRST_WORD, Ours

from mm_grpo.types import Prompt

COUNTS = (2, 4, 8, 16)
FEW, TOKENS = 4, 32
"""Completions in the sweeps over prompts, and tokens of a completion in all sweeps."""


class Point:
    """One group to measure: a prompt, G, T, and x, the number that the sweep changes."""

    def __init__(self, x: int, prompt: Prompt, count: int, tokens: int = TOKENS) -> None:
        self.x, self.prompt, self.count, self.tokens = x, prompt, count, tokens
        self.length, self.patches = len(prompt.token_ids), patches_of(prompt)


def points(sweep: str, processor: Any, side: int) -> list[Point]:
    """The groups of one sweep; `side` is that of the image where the sweep leaves it."""
    image = make_prompt(processor, side)
    if sweep == "completions":
        return [Point(g, image, g, 2 * TOKENS) for g in COUNTS]
    if sweep == "completions_text":
        text = make_prompt(processor, 0, words=0)
        # a word is one token or two, so the length is found and not reckoned
        words = 0
        while len(text.token_ids) < len(image.token_ids):
            words += 1
            text = make_prompt(processor, 0, words=words)
        return [Point(g, text, g, 2 * TOKENS) for g in COUNTS]
    if sweep == "prompt":
        prompts = [make_prompt(processor, 0, words=n) for n in (32, 128, 256, 512)]
        return [Point(len(p.token_ids), p, FEW) for p in prompts]
    if sweep == "side":
        prompts = [make_prompt(processor, n * side // 4 // 28 * 28) for n in (1, 2, 3, 4)]
        return [Point(sum(patches_of(p)), p, FEW) for p in prompts]
    prompts = [make_prompt(processor, side // 2 // 28 * 28, images=n) for n in (1, 2, 4)]
    return [Point(n, p, FEW) for n, p in zip((1, 2, 4), prompts, strict=True)]


SWEEPS = ("completions", "completions_text", "prompt", "side", "images")


def line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope of the least-squares line.

    >>> line([1, 2, 4], [5, 7, 11])
    (3.0, 2.0)
    """
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum(
        (x - mean_x) ** 2 for x in xs
    )
    return mean_y - slope * mean_x, slope


def measure(
    sweep: str, found: list[Point], model: Any, processor: Any, rounds: int, machine: Machine
) -> list[dict[str, Any]]:
    """Rows of one sweep: its points, then one row for the line ("x": None)."""
    words = model.config.text_config.vocab_size
    generator = torch.Generator().manual_seed(2)
    runs = {}
    for point in found:
        answers = torch.randint(FIRST_WORD, words, (point.count, point.tokens), generator=generator)
        advantages = torch.randn(point.count, generator=generator)
        runs[str(point.x)] = Ours(model, processor, point.prompt, answers, advantages)
    seconds = interleaved(runs, rounds, machine, before=lambda: model.zero_grad(set_to_none=True))
    rows: list[dict[str, Any]] = [
        {
            "sweep": sweep, "x": p.x, "G": p.count, "T": p.tokens, "L": p.length, "patches": sum(p.patches),
            "tokens": int((runs[str(p.x)].pack.segments >= 0).sum()), "seconds": seconds[str(p.x)],
        }
        for p in found
    ]  # fmt: skip
    start, slope = line([p.x for p in found], list(seconds.values()))
    fit: dict[str, Any] = {"sweep": sweep, "x": None, "intercept": start, "slope": slope}
    if sweep.startswith("completions"):
        first, tokens, length = found[0], found[0].tokens, found[0].length
        work = [flops(model, length, g, tokens, first.patches) for g in (1, 2)]
        share, token_share = slope / (start + slope), tokens / (length + tokens)
        fit |= {
            "first": start + slope, "share": share, "token_share": token_share,
            "flop_share": (work[1] - work[0]) / work[0], "share_over_token_share": share / token_share,
        }  # fmt: skip
    return [*rows, fit]


def sweeps(text: str) -> list[str]:
    """The names of sweeps, of a list with commas."""
    names = text.split(",")
    for name in names:
        if name not in SWEEPS:
            raise argparse.ArgumentTypeError(f"{name!r} must be one of {', '.join(SWEEPS)}")
    return names


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--rounds", type=positive, default=5, help="timed runs of each point, after a warm-up"
    )
    parser.add_argument("--sweeps", type=sweeps, default=",".join(SWEEPS), help="of " + ", ".join(SWEEPS))
    parser.add_argument("--size", default="24m", choices=SIZES)
    parser.add_argument("--side", type=positive, default=448, help="side of the image, in pixels")
    args = parse(parser, argv)
    machine = machine_of(args)
    processor = load_shapes_processor(args.side**2)
    model = make_model(processor, args.size, machine)

    def case(sweep: str) -> list[dict[str, Any]]:
        return measure(sweep, points(sweep, processor, args.side), model, processor, args.rounds, machine)

    run("scaling", args.sweeps, case, args, versions(machine) | {"size": args.size})


if __name__ == "__main__":
    main()
