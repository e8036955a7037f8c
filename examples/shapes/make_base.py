"""Makes the small Qwen2.5-VL that the shapes demo starts from.

    python examples/shapes/make_base.py --out examples/shapes/base     # 1 CPU core, about 10 minutes

The base must see, and must answer in the right form, but must not know the answers. So it is trained
on two things, both drawn from the train split of the shapes task:

(a) captions, first of single objects, then of whole scenes with the objects in random order:
    "red circle and blue square", "circle in red and square in blue";
(b) the task's questions with an answer drawn at random, uniformly, among the right class of answers:
    "What colour is the circle?" gets each of the five colours equally often, whatever the image shows.

The right answer to a question is never used here: finding it is what GRPO is for. What lands in
`--out` is an ordinary Hugging Face folder (weights, tokenizer, chat template, image processor), loaded
by AutoProcessor and Qwen2_5_VLForConditionalGeneration or served by vLLM. The last lines printed say
how well the base sees and how evenly it guesses.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import torch
from PIL.Image import Image
from transformers import (
    GenerationConfig,
    Qwen2_5_VLConfig,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)
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

SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
CAPTIONS = {
    "What colours and shapes are there?": "{colour} {shape}",
    "What shapes and colours are there?": "{shape} in {colour}",
}
CHAT_TEMPLATE = (  # ChatML, as Qwen2.5-VL's, without its default system prompt
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.content is string %}{{ message.content }}{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part.type == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{%- else %}{{ part.text }}{%- endif %}{%- endfor %}{%- endif %}{{ '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
PATCH, MERGE = 14, 2
HEAD_DIM = 32  # of both towers; vLLM's CPU attention knows 32, 64, 80, ...
SIZE = {"hidden": 128, "layers": 4, "vision_hidden": 96, "vision_layers": 4}
INIT = 0.1  # standard deviation of the first weights; the usual 0.02 suits wider models
# Shares of the steps: single objects until ALONE, no questions until CAPTIONS_ONLY.
ALONE, CAPTIONS_ONLY = 0.2, 0.6
QUESTION_SHARE = 0.4  # of the lessons after that
MIN_PIXELS, MAX_PIXELS = (PATCH * MERGE) ** 2, 224 * 224


def make_processor() -> Processor:
    """A byte-level BPE tokenizer trained on the task's own words, and Qwen2.5-VL's image processing."""
    # Each word twice: at the start of an answer, and after a space.
    words = [*COLOURS, *SHAPES, *NUMBERS, *SIDES, "and", "in", "user", "assistant", "system", "\n"]
    texts = [*words, *(f" {word}" for word in words), *QUESTIONS.values(), *CAPTIONS]
    blank = Qwen2Tokenizer(eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer = blank.train_new_from_iterator(
        texts * 2, vocab_size=2048, new_special_tokens=SPECIAL[1:], show_progress=False
    )
    # Limits under which the task's images (84 pixels and up) are left as they are.
    picture: dict[str, Any] = {
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        "patch_size": PATCH,
        "merge_size": MERGE,
        "image_mean": [level / 255 for level in BACKGROUND],  # empty patches are 0: shapes are learned sooner
        "image_std": [0.3] * 3,
    }
    return Processor(
        image_processor=Qwen2VLImageProcessor(**picture),
        video_processor=Qwen2VLVideoProcessor(**picture),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(tokenizer: Qwen2Tokenizer, seed: int, size: dict[str, int]) -> Model:
    """A Qwen2.5-VL of 1 to 2 million parameters, at random."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    heads = size["hidden"] // HEAD_DIM
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": math.ceil(len(tokenizer) / 64) * 64,
            "hidden_size": size["hidden"],
            "intermediate_size": size["hidden"] * 3,
            "num_hidden_layers": size["layers"],
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "max_position_embeddings": 1024,
            "initializer_range": INIT,
            # Time, height, width: parts of HEAD_DIM / 2. The base is low because prompts are short.
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 6, 6]},
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": size["vision_layers"],
            "hidden_size": size["vision_hidden"],
            "out_hidden_size": size["hidden"],
            "intermediate_size": size["vision_hidden"] * 3,
            "num_heads": size["vision_hidden"] // HEAD_DIM,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "initializer_range": INIT,
            "window_size": 112,
            # Full attention everywhere: images up to 112 pixels are one window anyway.
            "fullatt_block_indexes": list(range(size["vision_layers"])),
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = Model(config)
    model.generation_config = GenerationConfig(
        bos_token_id=ids["<|endoftext|>"], eos_token_id=ids["<|im_end|>"], pad_token_id=ids["<|endoftext|>"]
    )
    return model


def caption(scene: Scene, prompt: str, rng: random.Random) -> str:
    """The objects in random order: the second word of a pair must then be looked up for its first."""
    things = rng.sample(scene.objects, len(scene.objects))
    return " and ".join(CAPTIONS[prompt].format(colour=thing.colour, shape=thing.shape) for thing in things)


def lesson(index: int, seed: int, progress: float, options: dict[str, int]) -> tuple[str, str, Image]:
    """One (prompt, reply, image): a caption, or a question with an answer drawn blindly.

    `progress` runs from 0 to 1: captions of single objects, then of whole scenes, then questions too.
    """
    rng = random.Random(f"base/{seed}/{index}")
    if progress < ALONE:
        options = {**options, "max_objects": 1}
        kind: Kind = "colour"
    else:
        kind = rng.choice(get_args(Kind))
    shown = scene(split="train", index=index, seed=seed, kind=kind, **options)
    if progress >= CAPTIONS_ONLY and rng.random() < QUESTION_SHARE:
        return question(shown, kind), rng.choice(answers(kind, options["max_objects"])), render(shown)
    prompt = rng.choice(tuple(CAPTIONS))
    return prompt, caption(shown, prompt, rng), render(shown)


def encode(
    processor: Processor, prompts: list[str], images: list[Image], replies: list[str] | None = None
) -> dict[str, torch.Tensor]:
    """Model inputs for a batch; with replies also `labels`, -100 outside the reply and its end token."""
    texts = [
        processor.apply_chat_template(
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": prompt}]}],
            add_generation_prompt=True,
        )
        for prompt in prompts
    ]
    if replies is None:
        return dict(
            processor(text=texts, images=images, padding=True, padding_side="left", return_tensors="pt")
        )
    ends = [reply + "<|im_end|>" for reply in replies]
    texts = [text + end for text, end in zip(texts, ends, strict=True)]
    batch = dict(
        processor(text=texts, images=images, padding=True, padding_side="right", return_tensors="pt")
    )
    batch["labels"] = torch.full_like(batch["input_ids"], -100)
    lengths = batch["attention_mask"].sum(1).tolist()
    for row, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        start = length - len(processor.tokenizer(end).input_ids)
        batch["labels"][row, start:length] = batch["input_ids"][row, start:length]
    return batch


def train(model: Model, processor: Processor, args: argparse.Namespace, options: dict[str, int]) -> None:
    """Supervised steps in fp32: short warm-up, then a cosine to a twentieth of the rate."""
    steps, batch = args.steps, args.batch
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.learning_rate, betas=(0.9, 0.99), weight_decay=0.01
    )
    warmup = min(100, max(1, steps // 10))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            min(1.0, (step + 1) / warmup) * (0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)
        ),
    )
    started = time.perf_counter()
    for step in range(steps):
        lessons = [lesson(step * batch + row, args.seed, step / steps, options) for row in range(batch)]
        prompts, replies, images = (list(column) for column in zip(*lessons, strict=True))
        loss = model(**encode(processor, prompts, images, replies), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % 100 == 0:
            seconds = time.perf_counter() - started
            print(f"step {step + 1}/{steps}  loss {loss.item():.4f}  {seconds:.0f} s", flush=True)
    model.eval()


@torch.inference_mode()
def eyes(model: Model, processor: Processor, *, rows: int, options: dict[str, int]) -> float:
    """The share of the objects of held-out scenes that greedy captions name right; extra ones are misses."""
    right = wrong = 0
    for prompt in CAPTIONS:
        scenes = [scene(split="heldout", index=index, kind="position", **options) for index in range(rows)]
        batch = encode(processor, [prompt] * rows, [render(one) for one in scenes])
        out = model.generate(**batch, max_new_tokens=24, do_sample=False)
        replies = processor.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        for shown, reply in zip(scenes, replies, strict=True):
            named = Counter(reply.split(" and "))
            true = Counter(
                CAPTIONS[prompt].format(colour=thing.colour, shape=thing.shape) for thing in shown.objects
            )
            right += (named & true).total()
            wrong += max((named - true).total(), (true - named).total())
    return right / (right + wrong)


@torch.inference_mode()
def guesses(
    model: Model, processor: Processor, kind: Kind, *, rows: int, options: dict[str, int]
) -> dict[str, float]:
    """How the base answers held-out questions of a kind.

    `in form` and `right`: the probability that a sampled reply is one word of the right class and its end,
    and that it is the answer. `spread`: the entropy of that answer, over that of the uniform distribution.
    """
    legal = answers(kind, options["max_objects"])
    right = [row % len(legal) for row in range(rows)]
    scenes = [
        scene(split="heldout", index=index, kind=kind, answer=legal[which], **options)
        for index, which in enumerate(right)
    ]
    prompts, images = [question(one, kind) for one in scenes], [render(one) for one in scenes]
    shares = []
    for word in legal:
        batch = encode(processor, prompts, images, [word] * rows)
        labels = batch.pop("labels")[:, 1:]
        logprobs = model(**batch, use_cache=False).logits[:, :-1].log_softmax(-1)
        picked = logprobs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        shares.append((picked * (labels >= 0)).sum(1).exp())
    share = torch.stack(shares, 1)  # [rows, classes]
    entropy = -(share * share.log()).sum(1).mean().item() / math.log(len(legal))
    return {
        "in form": share.sum(1).mean().item(),
        "spread": entropy,
        "right": share[range(rows), right].mean().item(),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Makes the small Qwen2.5-VL that the shapes demo starts from."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--steps", type=int, default=2400, help="supervised steps")
    parser.add_argument("--batch", type=int, default=32, help="lessons per step")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the lessons")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--image-size", type=int, default=84, help="side of the images in pixels")
    parser.add_argument("--max-objects", type=int, default=2, choices=(2, 3, 4), help="most in a scene")
    parser.add_argument("--check-rows", type=int, default=300, help="held-out rows for the closing figures")
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of torch; another number, other rounding"
    )
    for name, value in SIZE.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    options = {"image_size": args.image_size, "max_objects": args.max_objects}
    processor = make_processor()
    model = make_model(processor.tokenizer, args.seed, {name: getattr(args, name) for name in SIZE})
    print(f"{model.num_parameters() / 1e6:.2f} million parameters, {len(processor.tokenizer)} tokens")
    train(model, processor, args, options)
    model.save_pretrained(args.out)
    processor.save_pretrained(args.out)
    for most in sorted({1, args.max_objects}):
        seen = eyes(model, processor, rows=args.check_rows, options={**options, "max_objects": most})
        print(f"eyes: {seen:.3f} of held-out objects captioned right, at most {most} in a scene")
    for kind in QUESTIONS:
        measured = guesses(model, processor, kind, rows=args.check_rows, options=options)
        print(f"{kind}: " + "  ".join(f"{name} {value:.3f}" for name, value in measured.items()))


if __name__ == "__main__":
    main()
