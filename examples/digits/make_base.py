"""Makes the small Qwen2.5-VL that the digits recipe starts from.

    python examples/digits/make_base.py --out examples/digits/base     # 1 CPU core, about 6 minutes

The base must see, and must answer in the right form, but must not know the answers. It is trained on pairs of pictures
of the digits task's train split, with the task's own question, and a reply that reads both digits and then states a
number from 0 to 18 that is drawn at random, uniformly, whatever the pictures show: "3+5=11". Pictures are shifted by up
to a pixel and their ink is varied, because there are only some 1,400 of them.

It never sees a right sum: GRPO has to find that the sum of both digits is rewarded. `--out` becomes an ordinary
Hugging Face folder. The last lines printed say how well it reads and how evenly it guesses.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import Qwen2_5_VLForConditionalGeneration as Model
from transformers import Qwen2_5_VLProcessor as Processor

sys.path += [str(Path(__file__).parents[n]) for n in (0, 1)]  # the folders of the task and of small_bases.py
import small_bases
from digits import LEVELS, PAPER, QUESTION, SIDE, Digit, digits, pair, render
from small_bases import Conversation, base_arguments, encode, make_model, make_tokenizer

IMAGE_SIZE = 56
SIZE = {"hidden": 128, "layers": 3, "vision_hidden": 96, "vision_layers": 3}
SUMS = range(19)


def make_processor() -> Processor:
    """Make a byte-level BPE tokenizer in which every number up to 18 is one token, and an image processor."""
    words = ["user", "assistant", "system", "\n"]
    texts = [*words, *(f" {word}" for word in words), QUESTION]
    tokenizer = make_tokenizer(texts, pieces=[str(number) for number in SUMS if number > 9])
    return small_bases.make_processor(tokenizer, max_pixels=224 * 224, background=[PAPER] * 3)


def augment(digit: Digit, rng: random.Random) -> list[int]:
    """Return the picture shifted by up to a pixel, with somewhat more or less ink and some noise."""
    right, down, ink = rng.choice((-1, 0, 0, 1)), rng.choice((-1, 0, 0, 1)), rng.uniform(0.8, 1.2)
    levels = []
    for y in range(SIDE):
        for x in range(SIDE):
            inside = 0 <= x - right < SIDE and 0 <= y - down < SIDE
            level = digit.levels[(y - down) * SIDE + x - right] if inside else 0
            levels.append(min(LEVELS, max(0, round(level * ink + rng.gauss(0, 0.7)))))
    return levels


def reply(pictures: Sequence[Digit], number: int) -> str:
    """Return the base's reply to two pictures: the digits, and a number."""
    first, second = pictures
    return f"{first.value}+{second.value}={number}"


def conversation(pictures: Sequence[Sequence[int]], text: str) -> Conversation:
    """Return the task's question about two pictures and a reply, as input of `encode`."""
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": QUESTION}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": text}]
    return messages, [render(levels, IMAGE_SIZE) for levels in pictures], None


def lesson(index: int, seed: int) -> Conversation:
    """Return two pictures of the train split, their digits, and a number drawn blindly."""
    rng = random.Random(f"digits base/{seed}/{index}")
    pictures = [rng.choice(rng.choice(digits("train"))) for _ in range(2)]
    return conversation([augment(digit, rng) for digit in pictures], reply(pictures, rng.choice(SUMS)))


def figures(model: Model, processor: Processor, *, rows: int) -> dict[str, float]:
    """Measure how well the base reads held-out pictures and how evenly it guesses.

    `pairs read`: the share of pairs of which greedy decoding writes both digits right. The other figures are for
    replies that start with the right digits. `in form`: the probability that a number from 0 to 18 and the end
    follow. `spread`: the entropy of that number, over that of the uniform distribution. `right`: the probability
    that it is the sum.
    """
    pairs = [pair(split="heldout", index=index, seed=1) for index in range(rows)]
    shares, pairs_read = [], []
    for number in SUMS:
        batch = encode(
            processor,
            [
                conversation([digit.levels for digit in digit_pair], reply(digit_pair, number))
                for digit_pair in pairs
            ],
        )
        labels = batch.pop("labels")[:, 1:]
        with torch.inference_mode():
            logprobs = model(**batch, use_cache=False).logits[:, :-1].log_softmax(-1)
        starts = (labels >= 0).int().argmax(1)  # of the reply: digit, +, digit, =, number, end
        at = torch.arange(rows)
        picked = logprobs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        shares.append((picked[at, starts + 4] + picked[at, starts + 5]).exp())
        best = logprobs.argmax(-1) == labels
        pairs_read.append(best[at, starts] & best[at, starts + 2])
    share = torch.stack(shares, 1)  # [rows, numbers]
    conditional = share / share.sum(1, keepdim=True)
    true = torch.tensor([sum(digit.value for digit in digit_pair) for digit_pair in pairs])
    return {
        "pairs read": pairs_read[0].float().mean().item(),
        "in form": share.sum(1).mean().item(),
        "spread": -(conditional * conditional.log()).sum(1).mean().item() / math.log(len(SUMS)),
        "right": share[torch.arange(rows), true].mean().item(),
    }


def main(argv: list[str] | None = None) -> None:
    text = "Makes the small Qwen2.5-VL that the digits recipe starts from."
    args = base_arguments(text, SIZE, steps=1600, check_rows=300).parse_args(argv)
    torch.set_num_threads(args.threads)
    processor = make_processor()
    model = make_model(processor.tokenizer, args.seed, {name: getattr(args, name) for name in SIZE})
    print(f"{model.num_parameters() / 1e6:.2f} million parameters, {len(processor.tokenizer)} tokens")

    def batch_at(step: int) -> dict[str, torch.Tensor]:
        rows = range(step * args.batch, (step + 1) * args.batch)
        return encode(processor, [lesson(row, args.seed) for row in rows])

    small_bases.train(model, batch_at, steps=args.steps, rate=args.learning_rate)
    model.save_pretrained(args.out)
    processor.save_pretrained(args.out)
    for name, value in figures(model, processor, rows=args.check_rows).items():
        print(f"{name}: {value:.3f}")


if __name__ == "__main__":
    main()
