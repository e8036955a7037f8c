"""Makes the small Qwen2.5-VL that the video_qa recipe starts from, by a warm start.

    python examples/video_qa/make_base.py --out examples/video_qa/base     # 1 CPU core, about 4 minutes

The base must see, and must answer in the right form, but must not know the answers. Six of ten rows ask "What
happens?", and the answer is a caption (`clips.caption`); the others are the task's own questions with an answer drawn
at random, whatever the clip shows. The right answer to a question is never used here: GRPO has to find it.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, get_args

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
import clips  # noqa: E402
import small_bases  # noqa: E402

from mm_grpo import GRPOConfig, warm  # noqa: E402
from mm_grpo.trained.warm_mark import MARK  # noqa: E402

SIZE = {"hidden": 64, "layers": 3, "vision_hidden": 64, "vision_layers": 2}
STEPS, BATCH, RATE, CAPTIONS = 2000, 32, 1e-3, 0.6
WHAT = "What happens?"


def lessons(count: int, seed: int = 5) -> list[dict[str, Any]]:
    """Return rows whose column `lesson` is what the base is taught to answer."""
    rows, tasks = [], get_args(clips.Task)
    for index in range(count):
        rng = random.Random(f"lesson/{seed}/{index}")
        clip = clips.scene(
            split="train", index=index // len(tasks), task=tasks[index % len(tasks)], seed=seed
        )
        caption = rng.random() < CAPTIONS
        question = WHAT if caption else clips.QUESTIONS[clip.task].format(*clip.options)
        lesson = clips.caption(clip) if caption else clips.guess(clip, rng)
        rows.append(clips.row_of(clip, question) | {"lesson": lesson})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of the warm start")
    parser.add_argument("--seed", type=int, default=0, help="of the weights before it")
    args = parser.parse_args()
    rows = lessons(BATCH * args.steps)
    others = ("to", "or", "then", "from", "until", "first", "last", "lamp")
    words = [*clips.COLOURS, *clips.DIRECTIONS, *clips.NUMBERS, *others]
    texts = [
        *words,
        *(f" {word}" for word in words),
        *clips.QUESTIONS.values(),
        WHAT,
        "user",
        "assistant",
        "\n",
    ]
    seconds = [f"{frame / clips.FPS:.1f}" for frame in range(1, clips.FRAMES + 1)]
    tokenizer = small_bases.make_tokenizer(texts, pieces=seconds)
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "start"
        small_bases.make_model(tokenizer, args.seed, SIZE).save_pretrained(start)
        processor = small_bases.make_processor(tokenizer, max_pixels=224 * 224, background=clips.BACKGROUND)
        processor.save_pretrained(start)
        config = GRPOConfig.from_dict(
            {
                "model": {"path": str(start), "dtype": "float32"},
                "rollout": {"prompts_per_step": BATCH, "max_completion_length": 20},
                "optim": {"learning_rate": RATE, "lr_scheduler_type": "cosine", "warmup_steps": 20},
                "run": {"dir": str(Path(folder) / "run")},
            }
        )
        warm(config, train=rows, answer="lesson", steps=args.steps)
        shutil.copytree(Path(folder) / "run-warm" / "model", args.out, dirs_exist_ok=True)
        (args.out / MARK).unlink()  # a base is no warm start of the user's


if __name__ == "__main__":
    main()
