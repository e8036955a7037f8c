"""How long a training step waits for its images, with and without threads that make them ahead.

    OMP_NUM_THREADS=2 python benchmarks/images.py [--json FILE] [--prompts 256] [--workers 0 2] [--steps 2] [--frames N]

P rows with one JPEG of 2 megapixels each (1600 x 1250, with noise, so that it does not decode faster than a photo),
resized to at most `--max-pixels`; G completions of T tokens each by our transformers engine, and one update. The model
has random weights. `wait` is the metric `time/data`: reading rows, and waiting for images that are not ready yet. The
first step, whose images nothing could hide, is not counted, nor is the last, which has no next step to make ready.
That every image was decoded once a step is asserted. With `--frames` each row has a clip in the place of a picture, 10
seconds of 1280 x 720 at 30 frames a second in H.264, of which N frames are shown.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stdout
from os import devnull
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from common import BASE, SIZES, Machine, load_shapes_processor, make_model
from harness import arguments, parse, positive, run, versions
from PIL import Image
from workloads import NEVER, alternate

from mm_grpo import GRPOConfig, GRPOTrainer
from mm_grpo.rollout import prompts

SIDES = (1600, 1250)


def draw(folder: Path, count: int) -> list[dict[str, Any]]:
    """`count` rows with a picture each, in `folder`."""
    rows = []
    for number in range(count):
        rng = np.random.default_rng(number)
        coarse = Image.fromarray(rng.integers(0, 256, (10, 12, 3), dtype=np.uint8)).resize(SIDES)
        noisy = np.asarray(coarse, np.int16) + rng.integers(-12, 13, (SIDES[1], SIDES[0], 1), np.int16)
        path = folder / f"{number}.jpg"
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=90)
        rows.append({"prompt": "how many", "image": str(path)})
    return rows


def film(folder: Path, count: int) -> list[dict[str, Any]]:
    """`count` rows with a clip each, in `folder`: noise that moves over noise."""
    rows = []
    for number in range(count):
        rng = np.random.default_rng(number)
        ground = np.asarray(
            Image.fromarray(rng.integers(0, 256, (9, 16, 3), dtype=np.uint8)).resize((1280, 720))
        )
        path = folder / f"{number}.mp4"
        with av.open(str(path), "w") as container:
            stream = container.add_stream("libx264", rate=30, options={"preset": "veryfast"})
            stream.width, stream.height, stream.pix_fmt = 1280, 720, "yuv420p"
            for at in range(300):
                frame = av.VideoFrame.from_ndarray(np.roll(ground, 4 * at, 1), format="rgb24")
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
        rows.append({"prompt": "how many", "video": str(path)})
    return rows


class Steps:
    """A callback that keeps the metrics of each step."""

    def __init__(self) -> None:
        self.metrics: list[Mapping[str, float]] = []

    def on_step_end(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        self.metrics.append(dict(metrics))


def measure(args: Any, rows: list[dict[str, Any]], workers: int, folder: Path) -> dict[str, Any]:
    prompts.WORKERS = workers
    processor = load_shapes_processor(args.max_pixels)
    processor.stop_token_ids = frozenset({NEVER})
    steps = Steps()
    config = GRPOConfig.from_dict(
        {
            "model": {"path": str(BASE), "device": "cpu"},
            "data": {"video_max_frames": args.frames or 2, "video_fps": 4.0, "video_max_pixels": args.max_pixels},
            "rollout": {
                "prompts_per_step": len(rows), "num_generations": args.generations,
                "max_completion_length": args.tokens,
            },
            "run": {
                "dir": str(folder / str(workers)), "max_steps": args.steps + 2,
                "report": False, "save_model": False, "guards": {"logp_gap": "off"}, "save_every": 0,
            },
        }
    )  # fmt: skip
    model = make_model(processor, args.size, Machine(torch.device("cpu"), torch.float32))
    trainer = GRPOTrainer(
        config, train=rows, rewards=[alternate], model=model, processor=processor, callbacks=[steps]
    )
    with open(devnull, "w") as nowhere, redirect_stdout(nowhere):
        trainer.train()
    counted = steps.metrics[1:-1]
    decoded, each = ("frames", args.frames) if args.frames else ("images", 1)
    assert all(m[f"prompts/{decoded}_decoded"] == len(rows) * each for m in steps.metrics)
    return {
        "workers": workers,
        "P": len(rows),
        "wait": statistics.median(m["time/data"] for m in counted),
        "step": statistics.median(m["step_time"] for m in counted),
        "share": statistics.median(m["time/data"] / m["step_time"] for m in counted),
    }


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__, machine=False)
    parser.add_argument("--prompts", type=positive, default=256, help="rows of a step")
    parser.add_argument("--generations", type=positive, default=4, help="completions of a row")
    parser.add_argument("--tokens", type=positive, default=8, help="tokens of a completion")
    parser.add_argument("--max-pixels", type=positive, default=448 * 448, help="pixels after the resize")
    parser.add_argument("--size", default="tiny", choices=sorted(SIZES), help="the model's")
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[0, 2], help="threads that make images ahead"
    )
    parser.add_argument("--frames", type=int, default=0, help="frames of a clip a row, or pictures if 0")
    parser.add_argument("--steps", type=positive, default=2, help="timed steps")
    args = parse(parser, argv)
    sizes = {k: getattr(args, k) for k in ("generations", "tokens", "max_pixels", "size", "steps", "frames")}
    with tempfile.TemporaryDirectory() as name:
        rows = (film if args.frames else draw)(Path(name), args.prompts)

        def case(workers: int) -> dict[str, Any]:
            return measure(args, rows, workers, Path(name))

        run("clips" if args.frames else "images", args.workers, case, args, versions() | sizes)


if __name__ == "__main__":
    main()
