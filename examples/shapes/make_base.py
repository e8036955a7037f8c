"""Makes the small Qwen2.5-VL that the shapes demo starts from.

    python examples/shapes/make_base.py --out examples/shapes/base     # 1 CPU core, about 10 minutes

The base must see, and must answer in the right form, but must not know the answers. So it is trained
on two things, both drawn from the train split of the shapes task:

(a) captions, first of single objects, then of whole scenes with the objects in random order:
    "red circle and blue square", "circle in red and square in blue";
(b) the task's questions with an answer drawn at random, uniformly, among the right class of answers:
    "What colour is the circle?" gets each of the five colours equally often, whatever the image shows.

The right answer to a question is never used here: GRPO has to find it. `--out` becomes an ordinary Hugging Face
folder (weights, tokenizer, chat template, image processor), loaded by AutoProcessor and
Qwen2_5_VLForConditionalGeneration or served by vLLM. The last lines printed say how well the base sees and how
evenly it guesses.
"""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from pathlib import Path
from typing import get_args

import torch
from PIL.Image import Image
from transformers import Qwen2_5_VLForConditionalGeneration as Model
from transformers import Qwen2_5_VLProcessor as Processor

from mm_grpo.data.shapes import (
    BACKGROUND,
    COLOURS,
    NUMBERS,
    QUESTIONS,
    SHAPES,
    SIDES,
    Kind,
    Scene,
    answers,
    question,
    render,
    scene,
)

sys.path.append(str(Path(__file__).parents[1]))  # examples/, the folder of small_bases.py
import small_bases
from small_bases import base_arguments, make_model, make_tokenizer, reply_shares

CAPTIONS = {
    "What colours and shapes are there?": "{colour} {shape}",
    "What shapes and colours are there?": "{shape} in {colour}",
}
SIZE = {"hidden": 128, "layers": 4, "vision_hidden": 96, "vision_layers": 4}
# Shares of the steps: single objects until ALONE, no questions until CAPTIONS_ONLY.
ALONE, CAPTIONS_ONLY = 0.2, 0.6
QUESTION_SHARE = 0.4  # of the lessons after that
MAX_PIXELS = 224 * 224


def make_processor() -> Processor:
    """Make a byte-level BPE tokenizer trained on the task's own words, and Qwen2.5-VL's image processing."""
    # Each word twice: at the start of an answer, and after a space.
    words = [*COLOURS, *SHAPES, *NUMBERS, *SIDES, "and", "in", "user", "assistant", "system", "\n"]
    texts = [*words, *(f" {word}" for word in words), *QUESTIONS.values(), *CAPTIONS]
    # Limits under which the task's images (84 pixels and up) are left as they are.
    return small_bases.make_processor(make_tokenizer(texts), max_pixels=MAX_PIXELS, background=BACKGROUND)


def caption(scene: Scene, prompt: str, rng: random.Random) -> str:
    """The objects in random order: the second word of a pair must then be looked up for its first."""
    things = rng.sample(scene.objects, len(scene.objects))
    return " and ".join(CAPTIONS[prompt].format(colour=thing.colour, shape=thing.shape) for thing in things)


def lesson(index: int, seed: int, progress: float, options: dict[str, int]) -> tuple[str, str, Image]:
    """Return (prompt, reply, image): a caption, or a question with an answer drawn blindly.

    `progress` runs from 0 to 1: captions of single objects, then of whole scenes, then questions too.
    """
    rng = random.Random(f"base/{seed}/{index}")
    if progress < ALONE:
        options = {**options, "max_objects": 1}
        kind: Kind = "colour"
    else:
        kind = rng.choice(get_args(Kind))
    picture = scene(split="train", index=index, seed=seed, kind=kind, **options)
    if progress >= CAPTIONS_ONLY and rng.random() < QUESTION_SHARE:
        return question(picture, kind), rng.choice(answers(kind, options["max_objects"])), render(picture)
    prompt = rng.choice(tuple(CAPTIONS))
    return prompt, caption(picture, prompt, rng), render(picture)


def conversation(prompt: str, image: Image, reply: str | None = None) -> small_bases.Conversation:
    """Return a prompt with its image, and the reply, as input of `encode`."""
    content = [{"type": "image"}, {"type": "text", "text": prompt}]
    replies = [] if reply is None else [{"role": "assistant", "content": reply}]
    return [{"role": "user", "content": content}, *replies], [image], None


def encode(
    processor: Processor, prompts: list[str], images: list[Image], replies: list[str]
) -> dict[str, torch.Tensor]:
    """Return model inputs for a batch, with `labels`."""
    return small_bases.encode(
        processor, [conversation(*parts) for parts in zip(prompts, images, replies, strict=True)]
    )


def encode_prompts(processor: Processor, prompts: list[str], images: list[Image]) -> dict[str, torch.Tensor]:
    """Return model inputs for a batch of prompts without replies."""
    texts = [
        processor.apply_chat_template(conversation(prompt, image)[0], add_generation_prompt=True)
        for prompt, image in zip(prompts, images, strict=True)
    ]
    return dict(processor(text=texts, images=images, padding=True, padding_side="left", return_tensors="pt"))


@torch.inference_mode()
def eyes(model: Model, processor: Processor, *, rows: int, options: dict[str, int]) -> float:
    """Return the share of the objects of held-out scenes that greedy captions name right; extra ones are misses."""
    right = wrong = 0
    for prompt in CAPTIONS:
        scenes = [scene(split="heldout", index=index, kind="position", **options) for index in range(rows)]
        batch = encode_prompts(processor, [prompt] * rows, [render(picture) for picture in scenes])
        out = model.generate(**batch, max_new_tokens=24, do_sample=False)
        replies = processor.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        for picture, reply in zip(scenes, replies, strict=True):
            captioned = Counter(reply.split(" and "))
            true = Counter(
                CAPTIONS[prompt].format(colour=thing.colour, shape=thing.shape) for thing in picture.objects
            )
            right += (captioned & true).total()
            wrong += max((captioned - true).total(), (true - captioned).total())
    return right / (right + wrong)


@torch.inference_mode()
def guesses(
    model: Model, processor: Processor, kind: Kind, *, rows: int, options: dict[str, int]
) -> dict[str, float]:
    """Measure the base's answers to held-out questions of a kind.

    `in form` and `right`: the probability that a sampled reply is one word of the right class and its end,
    and that it is the answer. `spread`: the entropy of that answer, over that of the uniform distribution.
    """
    legal = answers(kind, options["max_objects"])
    right = [row % len(legal) for row in range(rows)]
    scenes = [
        scene(split="heldout", index=index, kind=kind, answer=legal[answer], **options)
        for index, answer in enumerate(right)
    ]
    prompts, images = [question(picture, kind) for picture in scenes], [render(picture) for picture in scenes]
    eos = processor.tokenizer.eos_token_id
    shares = [
        reply_shares(model, encode(processor, prompts, images, [word] * rows), eos)[0] for word in legal
    ]
    share = torch.stack(shares, 1)  # [rows, classes]
    entropy = -(share * share.log()).sum(1).mean().item() / math.log(len(legal))
    return {
        "in form": share.sum(1).mean().item(),
        "spread": entropy,
        "right": share[range(rows), right].mean().item(),
    }


def main(argv: list[str] | None = None) -> None:
    text = "Makes the small Qwen2.5-VL that the shapes demo starts from."
    parser = base_arguments(text, SIZE, steps=2400, check_rows=300)
    parser.add_argument("--image-size", type=int, default=84, help="side of the images in pixels")
    parser.add_argument("--max-objects", type=int, default=2, choices=(2, 3, 4), help="most in a scene")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    options = {"image_size": args.image_size, "max_objects": args.max_objects}
    processor = make_processor()
    model = make_model(processor.tokenizer, args.seed, {name: getattr(args, name) for name in SIZE})
    print(f"{model.num_parameters() / 1e6:.2f} million parameters, {len(processor.tokenizer)} tokens")

    def batch_at(step: int) -> dict[str, torch.Tensor]:
        first, progress = step * args.batch, step / args.steps
        lessons = [lesson(first + row, args.seed, progress, options) for row in range(args.batch)]
        prompts, replies, images = (list(column) for column in zip(*lessons, strict=True))
        return encode(processor, prompts, images, replies)

    small_bases.train(model, batch_at, steps=args.steps, rate=args.learning_rate)
    model.save_pretrained(args.out)
    processor.save_pretrained(args.out)
    for max_objects in sorted({1, args.max_objects}):
        share = eyes(model, processor, rows=args.check_rows, options={**options, "max_objects": max_objects})
        print(f"eyes: {share:.3f} of held-out objects captioned right, at most {max_objects} in a scene")
    for kind in QUESTIONS:
        measured = guesses(model, processor, kind, rows=args.check_rows, options=options)
        print(f"{kind}: " + "  ".join(f"{name} {value:.3f}" for name, value in measured.items()))


if __name__ == "__main__":
    main()
